"""Does a choice of rematerialisation take effect? Each property against what follows from the config alone.

What is counted is counted on the traced programs of the config itself, without allocating a parameter. What must be
compiled and run is done on a model with the same order of layers and small sizes.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jaxtyping import Array, Float, PyTree

from qwen3next.cache import empty_cache
from qwen3next.config import Compute, LayerKind, ModelConfig
from qwen3next.context import Context, locate
from qwen3next.jaxprs import equations, inner_jaxprs, is_unit, remat_regions
from qwen3next.layer import Layer
from qwen3next.mlp import MLP
from qwen3next.model import Qwen3Next, abstract_model
from qwen3next.moe import MoE
from qwen3next.pattern import find_pattern
from qwen3next.programs import quick_options
from qwen3next.remat import WORDS, Remat
from qwen3next.residuals import saved_values
from qwen3next.stack import HybridBlock

_BATCH, _LENGTH, _CHUNK = 2, 20, 8  # three chunks, so that no loop over them has one iteration
_LONG = 1024  # tokens of a row where nothing is run: experts on a CPU keep nothing of few rows


class Check(NamedTuple):
    """One property: what it must be, what it is, and whether that agrees."""

    name: str
    expected: str
    found: str
    passed: bool


def same(name: str, expected: Any, found: Any) -> Check:
    """The check that two values are equal."""
    return Check(name, str(expected), str(found), expected == found)


def shrunk(config: ModelConfig) -> ModelConfig:
    """Small sizes, the same kinds of layers in the same order, and at most two cycles."""
    pattern, kinds = find_pattern(config.layer_kinds), list(config.layer_kinds)
    cycle = sum(run.length for run in pattern.cycle)
    start = sum(run.length for run in pattern.prefix)
    del kinds[start + min(pattern.repeats, 2) * cycle : start + pattern.repeats * cycle]
    dense = tuple(index for index, kind in enumerate(kinds) if kind.mlp == "dense")
    return dataclasses.replace(
        config,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=len(kinds),
        layer_types=tuple(kind.mixer for kind in kinds),
        mlp_only_layers=dense,
        decoder_sparse_step=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rope_parameters=dataclasses.replace(config.rope_parameters, rope_type="default", partial_rotary_factor=0.5),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4 if config.num_experts else 0,
        num_experts_per_tok=2,
        initializer_range=0.1,
        dtype="float32",
    )


# --- counted on traces ------------------------------------------------------------------------------------------------


def _forward(config: ModelConfig, compute: Compute, cached: bool) -> Jaxpr:
    ids = jax.ShapeDtypeStruct((_BATCH, _LENGTH), jnp.int32)

    def run(model: Qwen3Next, ids: Array) -> PyTree:
        cache = empty_cache(config, _BATCH, 2 * _LENGTH, jnp.dtype(compute.dtype)) if cached else None
        return model.hidden(ids, None, cache, compute=compute).states

    return jax.make_jaxpr(run)(abstract_model(config), ids).jaxpr


def _depth(jaxpr: Jaxpr) -> int:
    """How many units of rematerialisation stand inside each other."""

    def inside(equation: Any) -> int:
        deepest = max((_depth(inner) for inner in inner_jaxprs(equation)), default=0)
        return deepest + is_unit(equation)

    return max(map(inside, jaxpr.eqns), default=0)


def _products(function: Callable[..., Any], *args: PyTree) -> int:
    """Matrix products that the gradient of `function` in all its arguments executes."""

    def total(*args: PyTree) -> Float[Array, ""]:
        leaves = [leaf for leaf in jax.tree.leaves(function(*args)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return sum((jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves), jnp.float32(0))

    inexact = tuple(range(len(args)))
    with jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(jax.grad(total, argnums=inexact))(*args).jaxpr
    return sum(times for equation, times in equations(jaxpr) if "dot_general" in equation.primitive.name)


class _Units(NamedTuple):
    """The units that a choice makes of a config, written out once more by hand: `jax.checkpoint` and plain loops."""

    config: ModelConfig
    compute: Compute

    def _layer(self, layer: Layer, h: Array) -> tuple[Array, PyTree]:
        h, _, stats = layer(h, self._context(), None)
        return h, stats

    def _context(self) -> Context:
        shape = (_BATCH, _LENGTH)
        bare = dataclasses.replace(self.compute, remat=Remat("none"))
        return locate(self.config, bare, shape, None, None, None)[0]

    def _policy(self, kind: LayerKind) -> Any:
        return self.compute.remat.jax_policy(kind.mixer)

    def counts(self) -> tuple[int, int]:
        """Units of the whole model, and the products that they compute again in the backward pass."""
        remat, dtype = self.compute.remat, jnp.dtype(self.compute.dtype)
        h = jax.ShapeDtypeStruct((_BATCH, _LENGTH, self.config.hidden_size), dtype)
        units, again = 0, 0

        def abstract(kind: LayerKind) -> Layer:
            return eqx.filter_eval_shape(Layer, self.config, kind, key=jax.random.key(0))

        if remat.placement in ("block", "both"):
            pattern, nested = find_pattern(self.config.layer_kinds), remat.placement == "both"
            for runs, times in ((pattern.prefix, 1), (pattern.cycle, pattern.repeats), (pattern.remainder, 1)):
                if not runs:
                    continue
                block = eqx.filter_eval_shape(HybridBlock, self.config, runs, key=jax.random.key(0))
                layers, policies = [run.modules for run in block.runs], [self._policy(run.kind) for run in runs]
                inner = [jax.checkpoint(self._layer, policy=policy) if nested else self._layer for policy in policies]
                unit = jax.checkpoint(_in_turn(inner), policy=None if nested else policies[0])
                plain = _in_turn([self._layer] * len(runs))
                units += times * (1 + nested * sum(run.length for run in runs))
                again += times * (_products(unit, layers, h) - _products(plain, layers, h))
            return units, again
        for kind in dict.fromkeys(self.config.layer_kinds):
            layer, count = abstract(kind), self.config.layer_kinds.count(kind)
            if remat.is_unit(kind.mixer):
                step, args = self._layer, (layer, h)
            elif kind.mlp in remat.placement.split("+"):
                step, args = self._mlp, (layer.mlp, h)
            else:
                continue
            units += count
            again += count * (
                _products(jax.checkpoint(step, policy=self._policy(kind)), *args) - _products(step, *args)
            )
        return units, again

    def _mlp(self, mlp: MoE | MLP, x: Array) -> PyTree:
        return mlp(x, self._context()) if isinstance(mlp, MoE) else mlp(x)


def _in_turn(steps: list[Any]) -> Callable[[PyTree, Array], PyTree]:
    """Runs of layers, each a loop, for whose last iteration nothing is left out that the others need."""

    def run(stacks: PyTree, h: Array) -> PyTree:
        stats = []
        for step, stack in zip(steps, stacks, strict=True):
            h, sums = jax.lax.scan(lambda h, layer, step=step: step(layer, h), h, stack)
            stats.append(sums)
        return h, stats

    return run


def _traced(config: ModelConfig, compute: Compute) -> Iterator[Check]:
    remat = compute.remat
    units, again = _Units(config, compute).counts()
    for cached in (False, True):
        jaxpr, words = _forward(config, compute, cached), "with caches" if cached else "without caches"
        yield same(f"units of rematerialisation, {words}", units, remat_regions(jaxpr))
        deepest = 0 if not units else 2 if remat.placement == "both" else 1
        yield same(f"units inside each other, {words}", deepest, _depth(jaxpr))

    ids = jnp.zeros((_BATCH, _LENGTH), jnp.int32)

    def products(compute: Compute) -> int:
        return _products(lambda model: model.hidden(ids, compute=compute), abstract_model(config))

    none = dataclasses.replace(compute, remat=Remat("none"))
    yield same("products computed again", again, products(compute) - products(none))


def _kept(config: ModelConfig, compute: Compute) -> Iterator[Check]:
    """What is kept, where the policy says it by name."""
    remat, saved = compute.remat, saved_values(config, compute, _BATCH, _LONG)
    if remat.placement == "none" or "dots" in remat.policy or "everything" in remat.policy:
        return
    kinds = {key: values for key, values in saved.items() if key == "cycle" or remat.is_unit(key.split("/")[0])}
    if remat.placement == "block":
        kinds = {"cycle": saved["cycle"]}
    for key, values in kinds.items():
        mixer = config.layer_kinds[0].mixer if key == "cycle" else key.split("/")[0]
        asked = set() if remat.placement == "both" and key == "cycle" else remat.names(mixer)
        found = {value.name.removeprefix("offloaded ") for value in values if value.name != "unit input"}
        yield Check(f"kept by {key}", f"of {_listed(asked)}", _listed(found), found <= asked)
    asked = set().union(*(remat.names(kind.mixer) for kind in config.layer_kinds))
    everywhere = {value.name.removeprefix("offloaded ") for values in kinds.values() for value in values}
    yield Check("names that are kept nowhere", "none", _listed(asked - everywhere), asked <= everywhere)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


# --- compiled and run -------------------------------------------------------------------------------------------------


def _gradient(config: ModelConfig, compute: Compute) -> Any:
    ids = jax.random.randint(jax.random.key(1), (_BATCH, _LENGTH), 0, config.vocab_size)

    def loss(model: Qwen3Next) -> Float[Array, ""]:
        return jnp.mean(jax.nn.logsumexp(model.logits(model.hidden(ids, compute=compute).states), axis=-1))

    return jax.value_and_grad(loss)


def _compiled(config: ModelConfig, compute: Compute) -> Iterator[Check]:
    gradient = _gradient(config, compute)
    model = abstract_model(config)
    traced = jax.make_jaxpr(gradient)(model).jaxpr
    stream = (_BATCH, _LENGTH, config.hidden_size)  # what tells a loop over layers from others
    loops = sum(
        equation.primitive.name == "scan"
        and equation.params["length"] == 1
        and any(getattr(variable.aval, "shape", None) == stream for variable in equation.outvars)
        for equation, _ in equations(traced)
    )
    text = jax.jit(gradient, compiler_options=quick_options()).lower(model).compile().as_text() or ""
    left = len(re.findall(r' while\(.*"known_trip_count":\{"n":"1"\}', text))
    wanted = loops if compute.remat.barrier and not compute.unroll else 0
    yield same("loops of one iteration in the compiled program", wanted, left)


def _agreeing(config: ModelConfig, compute: Compute) -> Iterator[Check]:
    model = jax.jit(lambda key: Qwen3Next(config, key=key), compiler_options=quick_options())(jax.random.key(0))

    def run(remat: Remat) -> tuple[float, list[Array]]:
        gradient = _gradient(config, dataclasses.replace(compute, remat=remat))
        value, grads = jax.jit(gradient)(model)
        return float(value), jax.tree.leaves(grads)

    value, grads = run(Remat("none"))
    scale = sum(float(jnp.sum(leaf**2)) for leaf in grads) ** 0.5
    others = dict.fromkeys([*(Remat(word) for word in WORDS if word != "none"), compute.remat])
    for remat in others:
        if remat == Remat("none"):
            continue
        other, slopes = run(remat)
        away = sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(grads, slopes, strict=True)) ** 0.5 / scale
        worst = max(abs(other - value) / abs(value), away)
        yield Check(f"loss and gradient of {remat} against none", "within 1e-6", f"{worst:.1e}", worst < 1e-6)


def remat_checks(config: ModelConfig, compute: Compute) -> Iterator[Check]:
    """Every check of `compute.remat` for a model, one after another."""
    yield from _traced(config, compute)
    yield from _kept(config, compute)
    small = shrunk(config)
    plain = dataclasses.replace(compute, dtype="float32", chunk_size=_CHUNK)
    yield from _compiled(small, plain)
    yield from _agreeing(small, plain)
