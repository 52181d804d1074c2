"""The scanned decoder against a Python loop over its layers: values, gradients, what the scans carry, and remat."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import as_users_run, randomise, tiny_config, tiny_model, tokens, unrolled
from jax.flatten_util import ravel_pytree

from qwen3next import stack
from qwen3next.cache import DeltaNetCache, empty_cache
from qwen3next.config import Compute, LayerKind, ModelConfig, Remat
from qwen3next.context import locate
from qwen3next.hf import table
from qwen3next.jaxprs import equations, remat_regions
from qwen3next.loss import balance_loss
from qwen3next.model import Qwen3Next, abstract_model
from qwen3next.stack import Decoder
from qwen3next.tree import leaf_path

LINEAR, FULL = "linear_attention", "full_attention"
ORDERS: dict[str, dict[str, Any]] = {
    "cycles": dict(num_hidden_layers=8),
    "remainder": dict(num_hidden_layers=6),
    "odd": dict(num_hidden_layers=5, layer_types=(FULL, LINEAR, LINEAR, FULL, LINEAR)),
    "prefix": dict(num_hidden_layers=5, layer_types=(FULL, LINEAR, FULL, LINEAR, FULL), mlp_only_layers=(0,)),
}
PLACEMENTS = ("none", "block", "layer", "both")
# Several chunks in few tokens; of the three ways to the experts the one that is cheapest to compile.
BASE = Compute(chunk_size=8, dispatch="dense")


def _compute(placement: Any = "layer", barrier: bool = True, unroll: bool = False, **changes: Any) -> Compute:
    remat = Remat(placement, barrier=barrier)
    values: dict[str, Any] = dict(chunk_size=8, dispatch="dense", remat=remat, unroll=unroll)
    return Compute(**(values | changes))


def _close(actual: Any, expected: Any) -> None:
    """Every leaf to 1e-5 of its norm, or of 1 where it is smaller."""
    for (path, one), other in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        off, norm = np.linalg.norm(np.subtract(one, other)), np.linalg.norm(other)
        assert off <= 1e-5 * max(norm, 1.0), f"{leaf_path(path)} is off by {off}, of {norm}"


# --- Toy layers: with bodies this small every order meets every way of scanning


class Toy(eqx.Module):
    """Stands in for a layer: no two commute, kinds differ in structure, and a cache and sums go through."""

    matrix: jax.Array
    bias: jax.Array | None
    kind: LayerKind = eqx.field(static=True)

    def __init__(self, config: ModelConfig, kind: LayerKind, *, key: jax.Array):
        self.kind = kind
        self.matrix = 0.3 * jax.random.normal(key, (config.hidden_size, config.hidden_size))
        self.bias = jnp.ones(config.hidden_size) if kind.mixer == FULL else None

    def __call__(self, h: jax.Array, context: Any, cache: Any) -> tuple[jax.Array, Any, Any]:
        out = jnp.tanh(h @ self.matrix)
        if self.bias is not None:
            out = out * self.bias
        cache = jax.tree.map(lambda leaf: leaf + jnp.sum(out[0]), cache)
        return h + out, cache, None if self.bias is not None else jnp.sum(jnp.square(h))


TOY_INPUT = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 5)).astype(np.float32))


class Problem(NamedTuple):
    """A decoder, its inputs, and value and gradient by a loop over its layers."""

    decoder: Decoder
    config: ModelConfig
    layers: list[Any]
    caches: tuple[Any, ...]
    expected: Any


def _weighted(h: jax.Array, caches: Any, sums: Any) -> jax.Array:
    """A number that every output moves."""
    parts = [jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves((caches, sums))]
    return jnp.sum(h * jnp.arange(h.size, dtype=jnp.float32).reshape(h.shape) / h.size) + 0.01 * sum(parts)


@pytest.fixture(scope="module", params=ORDERS)
def toy(request: pytest.FixtureRequest) -> Problem:
    config = tiny_config(hidden_size=5, **ORDERS[request.param])
    with pytest.MonkeyPatch.context() as patch, as_users_run():
        patch.setattr(stack, "Layer", Toy)
        decoder = randomise(Decoder(config, key=jax.random.key(0)), 0)
        layers = decoder.layers()
    caches = tuple({"x": jnp.full(2, 0.1 * i)} for i in range(config.num_hidden_layers))

    @eqx.filter_jit
    @functools.partial(eqx.filter_value_and_grad, has_aux=True)
    def loop(decoder: Decoder) -> tuple[jax.Array, Any]:
        h, steps = TOY_INPUT, []
        layers: list[Any] = decoder.layers()
        for layer, cache in zip(layers, caches, strict=True):
            h, *step = layer(h, None, cache)
            steps.append(step)
        values = (h, *(tuple(column) for column in zip(*steps, strict=True)))
        return _weighted(*values), values

    with as_users_run():
        return Problem(decoder, config, layers, caches, loop(decoder))


PLACED = [_compute(placement) for placement in PLACEMENTS]
OTHERWISE = [_compute("layer", barrier=False), _compute("both", barrier=False), _compute("both", unroll=True)]
# A cycle and a remainder, and a prefix and cycles, stand for all orders in the ways of compiling them.
TOYS = [*itertools.product(ORDERS, PLACED), *itertools.product(("remainder", "prefix"), OTHERWISE)]


def _name(value: Any) -> str:
    if isinstance(value, str):
        return value
    barrier = "barrier" if value.remat.barrier else "free"
    return f"{value.remat.placement}-{barrier}-{'loop' if value.unroll else 'scan'}"


@pytest.mark.parametrize(("toy", "compute"), TOYS, indirect=["toy"], ids=_name)
def test_toy_layers_scanned_equal_a_loop(toy, compute):
    context, _ = locate(toy.config, compute, (2, 3), None, None, None)

    @eqx.filter_jit
    @functools.partial(eqx.filter_value_and_grad, has_aux=True)
    def scanned(decoder: Decoder) -> tuple[jax.Array, Any]:
        values = decoder(TOY_INPUT, toy.caches, context)
        return _weighted(*values), values

    with as_users_run():
        _close(scanned(toy.decoder), toy.expected)


def test_toy_layers_keep_their_kind_and_order(toy):
    kinds = [FULL if layer.bias is not None else LINEAR for layer in toy.layers]
    assert kinds == [kind.mixer for kind in toy.config.layer_kinds]
    assert len({float(layer.matrix[0, 0]) for layer in toy.layers}) == len(kinds)  # each drawn by itself


# --- The model itself


def _loss(model: Qwen3Next, ids: jax.Array, hidden: Callable[..., tuple[jax.Array, Any]]) -> jax.Array:
    logits, router = hidden(model, ids)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(ids, -1, axis=1))
    return jnp.mean(nats) + 0.01 * balance_loss(router)


def _scanned(compute: Compute) -> Callable[..., tuple[jax.Array, Any]]:
    def hidden(model: Qwen3Next, ids: jax.Array) -> tuple[jax.Array, Any]:
        found = model.hidden(ids, compute=compute)
        return model.logits(found.states), found.router

    return hidden


def _looped(model: Qwen3Next, ids: jax.Array) -> tuple[jax.Array, Any]:
    found = unrolled(model, ids, compute=BASE)
    return found.logits, found.router


IDS = tokens(2, 12)


@pytest.mark.parametrize("order", ["odd", "prefix"])
def test_logits_equal_those_of_a_loop(order):
    model = tiny_model(**({"num_experts": 4 if order == "prefix" else 0} | ORDERS[order]))
    logits, router = eqx.filter_jit(_scanned(BASE))(model, IDS)
    expected = unrolled(model, IDS, compute=BASE)
    _close(logits, expected.logits)
    _close(router, tuple(expected.router))


@functools.cache
def _six_layers() -> tuple[jax.Array, Callable[[jax.Array], Qwen3Next]]:
    """A cycle and a remainder, as one vector and what makes the model of it. Dense, which is cheaper to compile."""
    return ravel_pytree(tiny_model(num_hidden_layers=6, num_experts=0))


@functools.cache
def _gradient(compute: Compute | None) -> Any:
    """The compiled program for value and gradient; without a `compute`, of the loop over the layers."""
    flat, restore = _six_layers()
    hidden = _looped if compute is None else _scanned(compute)
    return jax.jit(jax.value_and_grad(lambda flat: _loss(restore(flat), IDS, hidden))).lower(flat).compile()


@functools.cache
def _steps(compute: Compute | None) -> tuple[Any, Any, list[float]]:
    """Value and gradient, and the losses of eight optimizer steps."""
    program, (flat, restore), optimizer = _gradient(compute), _six_layers(), optax.adamw(1e-3)
    state, first, losses = optimizer.init(flat), program(flat), []
    for _ in range(8):
        value, gradient = program(flat)
        losses.append(float(value))
        with jax.numpy_dtype_promotion("standard"):  # optax counts on it
            updates, state = optimizer.update(gradient, state, flat)
        flat = flat + jnp.asarray(updates)
    return first[0], restore(first[1]), losses


@pytest.mark.parametrize("compute", [*PLACED, OTHERWISE[0], OTHERWISE[2]], ids=_name)
def test_gradients_and_eight_steps_equal_those_of_a_loop(compute):
    value, gradient, losses = _steps(compute)
    expected_value, expected_gradient, expected_losses = _steps(None)
    _close(value, expected_value)
    _close(gradient, expected_gradient)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-5)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(("layers", "experts"), [(4, 4), (5, 0), (6, 4), (7, 0), (8, 0)])
def test_every_parameter_of_the_last_layer_counts(layers, experts):
    """No layer is left out where they do not fill a cycle."""
    model = tiny_model(num_hidden_layers=layers, num_experts=experts)
    logits = eqx.filter_jit(lambda model: _scanned(BASE)(model, tokens(1, 24))[0])
    expected, (leaves, structure), moved = logits(model), jax.tree.flatten(model), 0
    for place, leaf in enumerate(table(model)):
        for at in np.ndindex(leaf.tensors.shape):
            if str(leaf.tensors[at]).startswith(f"model.layers.{layers - 1}."):
                changed = np.array(leaves[place])
                changed[at] += np.random.default_rng(0).standard_normal(changed[at].shape)
                others = [*leaves[:place], jnp.asarray(changed), *leaves[place + 1 :]]
                difference = np.subtract(logits(jax.tree.unflatten(structure, others)), expected)
                assert np.max(np.abs(difference)) > 1e-4, leaf.tensors[at]
                moved += 1
    # Two norms; 7 or 6 tensors in the mixer; two gates and (4 + 1) x 3 projections in the MoE.
    assert moved == 2 + (7 if layers % 4 else 6) + (2 + 15 if experts else 3)


# --- What the scans carry


class Scan(NamedTuple):
    reverse: bool
    outputs: list[Any]  # last carry and stacked


def _scans(jaxpr: Any) -> list[Scan]:
    found = []
    for equation, _ in equations(jaxpr):
        if equation.primitive.name == "scan":
            found.append(Scan(equation.params["reverse"], [variable.aval for variable in equation.outvars]))
    return found


# Every size another, so that a shape tells what an array is.
DISTINCT: dict[str, Any] = dict(
    vocab_size=67,
    hidden_size=34,
    head_dim=12,
    num_experts=5,
    num_experts_per_tok=3,
    moe_intermediate_size=26,
    shared_expert_intermediate_size=22,
    linear_num_key_heads=7,
    linear_num_value_heads=14,
    linear_key_head_dim=9,
    linear_value_head_dim=11,
)


def _parameter_shapes(model: Qwen3Next, vectors: bool) -> set[tuple[int, ...]]:
    """Of the layers' parameters: of one layer, of a run of layers, of the runs of all blocks. A row is a vector too."""
    decoder, shapes = model.decoder, set()
    for part, stacked in ((decoder.prefix, 1), (decoder.cycles, 2), (decoder.remainder, 1)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            if leaf_path(path).endswith(("A_log", "dt_bias")):
                continue  # what a layer returns for its heads looks like these
            if vectors or sum(size > 1 for size in leaf.shape[stacked:]) > 1:
                shapes |= {leaf.shape[cut:] for cut in range(stacked + 1)}
    return shapes


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_scan_of_the_forward_returns_a_parameter(placement):
    """Neither in the forward nor in the forward half of the gradient: a returned one is a copy of all the weights."""
    model = tiny_model(num_hidden_layers=10, **DISTINCT)  # two cycles and a remainder of two
    compute, ids, cache = _compute(placement), tokens(3, 13), empty_cache(model.config, 3, 19)
    forward = jax.make_jaxpr(lambda model: model.hidden(ids, None, cache, compute=compute)[:2])(model)
    gradient = jax.make_jaxpr(jax.grad(lambda model: _loss(model, ids, _scanned(compute))))(model)
    # Without remat inside a scan its layers keep exp(A_log) and 1 + weight, which look like the vectors they come from.
    vectors = placement in ("layer", "both")
    for jaxpr, shapes in (
        (forward.jaxpr, _parameter_shapes(model, vectors=True)),
        (gradient.jaxpr, _parameter_shapes(model, vectors)),
    ):
        scans = [scan for scan in _scans(jaxpr) if not scan.reverse]
        assert len(scans) >= 4
        for scan in scans:
            assert not {aval.shape for aval in scan.outputs} & shapes
    # Backward scans do return the parameters' gradients, so a parameter's shape would have been seen.
    backward = {aval.shape for scan in _scans(gradient.jaxpr) if scan.reverse for aval in scan.outputs}
    assert len(backward & _parameter_shapes(model, vectors=True)) > 10


# --- Rematerialisation


@pytest.mark.parametrize(
    ("layers", "placement", "expected", "cached"),
    [
        (6, "none", 0, False),
        (6, "block", 1 + 1, False),  # the one cycle and the remainder
        (6, "layer", 6, False),
        (6, "both", 1 + 1 + 6, False),
        (6, "both", 1 + 1 + 6, True),
        (8, "block", 2, False),  # two cycles; an empty remainder is none
        (8, "layer", 8, False),
        (8, "both", 2 + 8, False),
    ],
)
def test_number_of_rematerialised_units(layers, placement, expected, cached):
    """Counted as they run: a unit inside a scan of n counts n times."""
    model = tiny_model(num_hidden_layers=layers)
    cache = empty_cache(model.config, 2, 20) if cached else None
    jaxpr = jax.make_jaxpr(lambda model: model.hidden(IDS, None, cache, compute=_compute(placement)).states)(model)
    assert remat_regions(jaxpr.jaxpr) == expected


def _products(function: Callable[[Qwen3Next], Any]) -> int:
    flat, restore = _six_layers()
    walked = equations(jax.make_jaxpr(function)(restore(flat)).jaxpr)
    return sum(times for equation, times in walked if equation.primitive.name == "dot_general")


@functools.cache
def _products_of_the_gradient(placement: str) -> int:
    return _products(jax.grad(lambda model: _loss(model, IDS, _scanned(_compute(placement)))))


@pytest.mark.parametrize(("placement", "times"), [("none", 0), ("block", 1), ("layer", 1), ("both", 2)])
def test_products_that_are_computed_again(placement, times):
    """As many as the forward has, and twice where units nest; less those that only a unit's output needs."""

    forward = _products(lambda model: model.hidden(IDS, compute=_compute("none")).states)
    more = _products_of_the_gradient(placement) - _products_of_the_gradient("none")
    assert 0.75 * times * forward <= more <= times * forward


def test_the_compiler_merges_nothing_that_is_computed_again():
    """In straight-line code it could: as a common part of forward and backward."""
    again, once = OTHERWISE[2], dataclasses.replace(OTHERWISE[2], remat=Remat("none"))
    programs = [_gradient(compute).as_text() for compute in (again, once)]
    compiled = [len(re.findall(r" dot\(", program)) for program in programs]
    written = [
        _products(jax.grad(lambda model, how=_scanned(compute): _loss(model, IDS, how))) for compute in (again, once)
    ]
    # A loop over chunks is compiled once, and the compiler leaves out what only a unit's output needs.
    assert compiled[0] - compiled[1] > 0.7 * (written[0] - written[1])
    loops = [line for line in programs[0].splitlines() if " while(" in line]
    assert all("delta_rule" in line for line in loops)  # over chunks; none over layers


def _loops_of_one_iteration(compute: Compute) -> int:
    return len(re.findall(r' while\(.*"known_trip_count":\{"n":"1"\}', _gradient(compute).as_text()))


def test_the_barrier_keeps_loops_of_one_iteration():
    """Six layers: the scan of the one cycle and that of its one attention layer, each forward and backward."""
    assert _loops_of_one_iteration(_compute()) >= 4
    assert _loops_of_one_iteration(_compute(barrier=False)) == 0


# --- Dtypes


@pytest.mark.parametrize(("parameters", "activations"), [("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_dtypes(parameters, activations):
    """The residual stream keeps its dtype from end to end; what must be float32 is, whatever the rest."""
    model = tiny_model(num_hidden_layers=2, full_attention_interval=2, dtype=parameters)
    compute, cache = _compute("both", dtype=activations), empty_cache(model.config, 2, 12, jnp.dtype(activations))
    forward = jax.make_jaxpr(lambda model: model.hidden(IDS, None, cache, compute=compute), return_shape=True)
    jaxpr, hidden = forward(model)
    streams = [aval.dtype for scan in _scans(jaxpr.jaxpr) for aval in scan.outputs if aval.shape == (2, 12, 32)]
    assert len(streams) == 3  # of the cycle and of its two runs
    assert set(streams) == {hidden.states.dtype} == {jnp.dtype(activations)}
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(hidden.router))
    for entry, before in zip(hidden.cache.layers, cache.layers, strict=True):
        assert jax.tree.map(lambda leaf: leaf.dtype, entry) == jax.tree.map(lambda leaf: leaf.dtype, before)
        assert not isinstance(entry, DeltaNetCache) or entry.state.dtype == jnp.float32

    with jax.numpy_dtype_promotion("standard"):  # the gradient of jax's attention counts on it
        value, gradient = jax.jit(jax.value_and_grad(lambda model: _loss(model, IDS, _scanned(compute))))(model)
    assert value.dtype == jnp.float32 and np.isfinite(value)
    for (path, leaf), slope in zip(jax.tree.leaves_with_path(model), jax.tree.leaves(gradient), strict=True):
        decay = leaf_path(path).endswith(("A_log", "dt_bias"))
        assert leaf.dtype == slope.dtype == jnp.dtype("float32" if decay else parameters)
        slope = np.asarray(slope, np.float32)
        assert np.isfinite(slope).all() and slope.any(), leaf_path(path)


def test_a_deep_model_is_no_larger_a_program():
    def program(layers: int) -> str:
        config = tiny_config(num_hidden_layers=layers)
        ids = jax.ShapeDtypeStruct((1, 24), jnp.int32)

        def loss(model, ids):
            return jnp.sum(model.logits(model.hidden(ids).states))

        return jax.jit(jax.grad(loss)).lower(abstract_model(config), ids).as_text()

    shallow, deep = (program(layers) for layers in (8, 48))
    assert deep.count("\n") == shallow.count("\n")
