"""Experts and router against a loop over tokens: every way of dispatch, values and gradients; the balance loss."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from common import tiny_config

from qwen3next.config import Compute, Dispatch
from qwen3next.context import locate
from qwen3next.experts import Experts
from qwen3next.loss import balance_loss
from qwen3next.moe import MoE, RouterStats

DISPATCHES: tuple[Dispatch, ...] = ("dense", "blocks", "ragged", "all_to_all")
NAMES = ("x", "weights", "gate_proj", "up_proj", "down_proj")


def _random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _config(experts, top_k, **changes):
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "moe_intermediate_size": 5, "shared_expert_intermediate_size": 7}
    return tiny_config(**sizes, num_experts=experts, num_experts_per_tok=top_k, **changes)


# --- The experts, given who is chosen


def _one_token(chosen, x, weights, gate, up, down):
    """The definition: choice by choice."""
    out = jnp.zeros_like(x)
    for k, expert in enumerate(chosen):
        inner = gate[expert] @ x
        out = out + weights[k] * (down[expert] @ (inner / (1 + jnp.exp(-inner)) * (up[expert] @ x)))
    return out


def _loop(chosen, x, weights, *projections):
    """Token by token."""
    return jax.lax.map(lambda token: _one_token(*token, *projections), (chosen, x, weights))


def _with(projections, top_k):
    """Experts with these weights."""
    experts = Experts(_config(projections[0].shape[0], top_k), key=jax.random.key(0))
    return eqx.tree_at(lambda m: (m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight), experts, projections)


def _dispatched(dispatch, chosen, x, weights, *projections):
    experts = _with(projections, chosen.shape[1])
    return experts(x, weights, chosen, Compute(dispatch=dispatch, capacity_factor=0.6))[0]


@functools.cache
def _values_and_gradients(function, *options):
    """Of `function(*options, chosen, *args)`: the output, and the gradient of each argument."""

    def apply(chosen, *args):
        out, pull = jax.vjp(functools.partial(function, *options, chosen), *args)
        return out, *pull(jnp.asarray(_random(*out.shape, seed=9), out.dtype))

    return apply


def _distinct(experts, tokens, top_k, seed=0):
    """Random choices, an expert at most once a token."""
    random = np.random.default_rng(seed)
    return np.stack([random.permutation(experts)[:top_k] for _ in range(tokens)])


def _assert_each_close(actual, expected, what):
    """Along the first axis: an average over experts would hide one that is wrong."""
    error, size = (np.abs(x).reshape(len(x), -1).max(axis=1) for x in (np.asarray(actual) - expected, expected))
    assert np.all(error <= 1e-5 * np.maximum(size, 1)), what


ROUTES = {
    "two_of_six_idle": (6, np.array([0, 2, 3, 5])[_distinct(4, 11, 2)]),
    "first_and_last_idle": (6, 1 + _distinct(4, 11, 3)),
    "all_to_the_last": (6, np.full((11, 1), 5)),
    "one_token": (6, np.array([[4, 1]])),
    "every_expert": (4, _distinct(4, 7, 4)),
    "more_experts_than_assignments": (16, _distinct(16, 3, 2)),
    "one_expert": (1, np.zeros((20, 1))),  # its table holds all: there are no blocks
    # Several blocks to an expert; skewed, one expert has most tokens and another a single one.
    "many_tokens": (3, _distinct(3, 300, 2)),
    "many_tokens_skewed": (4, np.where(np.arange(300)[:, None] == 7, [[1, 0]], [[3, 0]])),
}


def _arguments(experts, chosen):
    tokens, top_k = chosen.shape
    weights = np.random.default_rng(1).uniform(0.2, 1, (tokens, top_k)).astype(np.float32)
    gate, up, down = _random(experts, 5, 8, seed=2), _random(experts, 5, 8, seed=3), _random(experts, 8, 5, seed=4)
    return [jnp.asarray(a) for a in (_random(tokens, 8), weights, gate, up, down)]


@pytest.mark.parametrize("route", ROUTES)
def test_dispatch_equals_a_loop_over_tokens(route):
    """And the gradient of an idle expert is exactly 0."""
    experts, chosen = ROUTES[route]
    chosen = chosen.astype(np.int32)
    floats = _arguments(experts, chosen)
    expected = oracles.in_float64(_values_and_gradients(_loop), chosen, *floats)
    idle = np.setdiff1d(np.arange(experts), chosen)
    for dispatch in DISPATCHES:
        found = oracles.quick_jit(_values_and_gradients(_dispatched, dispatch))(chosen, *floats)
        for name, actual, wanted in zip(("out", *NAMES), found, expected, strict=True):
            _assert_each_close(actual, wanted, (dispatch, name))
            if name.endswith("proj"):
                assert not np.any(actual[idle]), (dispatch, name)


def test_what_exceeds_a_capacity_is_dropped_or_sent_later():
    """On one device the first tokens' assignments fit; the others are counted, and lost only if overflow drops."""
    experts, chosen = 3, _distinct(3, 20, 2)
    x, weights, *projections = _arguments(experts, chosen)
    module = _with(projections, 2)
    fits = (np.arange(40) < 24).reshape(20, 2)  # 40 assignments x 0.6
    for overflow, kept in (("drop", jnp.where(fits, weights, 0)), ("repeat", weights)):
        compute = Compute(dispatch="all_to_all", capacity_factor=0.6, on_overflow=overflow)
        out, over = module(x, weights, jnp.asarray(chosen, jnp.int32), compute)
        assert float(over) == 16
        np.testing.assert_allclose(out, _loop(chosen, x, kept, *projections), rtol=1e-5, atol=1e-5)


def test_parts_of_the_tokens_sent_one_after_another_change_nothing():
    chosen = _distinct(6, 24, 2).astype(np.int32)
    floats = _arguments(6, chosen)

    def sent(parts):
        def apply(x, weights, *projections):
            compute = Compute(dispatch="all_to_all", capacity_factor=0.4, expert_chunks=parts)
            return _with(projections, 2)(x, weights, jnp.asarray(chosen), compute)[0]

        out, pull = oracles.quick_jit(lambda *args: jax.vjp(apply, *args))(*floats)
        return out, *pull(jnp.ones_like(out))

    for one, other in zip(sent(1), sent(4), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


# --- The whole layer

EXPERTS = 6


def _layer(top_k=2, **changes):
    layer, random = MoE(_config(EXPERTS, top_k, **changes), key=jax.random.key(0)), np.random.default_rng(5)
    return jax.tree.map(lambda leaf: jnp.asarray(0.5 * random.standard_normal(leaf.shape), leaf.dtype), layer)


def _apply(layer, x, segment_ids=None, dispatch: Dispatch = "dense"):
    context, _ = locate(layer.config, Compute(dispatch=dispatch), x.shape[:2], segment_ids, None, None)
    return layer(x, context)


_run = oracles.quick_jit(_apply, static_argnames="dispatch")


def _swiglu(x, mlp):
    inner = mlp.gate_proj.weight @ x
    return mlp.down_proj.weight @ (inner / (1 + jnp.exp(-inner)) * (mlp.up_proj.weight @ x))


def _by_hand(chosen, layer, x):
    """Token by token; `chosen` [tokens, top_k]."""
    experts = (layer.experts.gate_proj.weight, layer.experts.up_proj.weight, layer.experts.down_proj.weight)

    def token(now):
        chosen, x = now
        probability = jnp.exp(layer.gate.weight @ x)
        weights = (probability / jnp.sum(probability))[chosen]
        if layer.config.norm_topk_prob:
            weights = weights / jnp.sum(weights)
        gate = 1 / (1 + jnp.exp(-layer.shared_expert_gate.weight @ x))
        return _one_token(chosen, x, weights, *experts) + gate * _swiglu(x, layer.shared_expert)

    return jax.lax.map(token, (chosen, x.reshape(-1, x.shape[-1]))).reshape(x.shape)


def _most_likely(layer, x):
    """Of equally likely experts the first."""
    logits = np.asarray(x, np.float64).reshape(-1, x.shape[-1]) @ np.asarray(layer.gate.weight, np.float64).T
    return np.argsort(-logits, axis=-1, kind="stable")[:, : layer.config.num_experts_per_tok].astype(np.int32)


def _output(dispatch, _, layer, x):
    return _apply(layer, x, dispatch=dispatch)[0]


def _check_layer(layer, x, dispatch):
    """Output and the gradient of every parameter and of x; those of idle experts are exactly 0."""
    chosen = _most_likely(layer, x)
    expected = oracles.in_float64(_values_and_gradients(_by_hand), chosen, layer, x)
    actual = oracles.quick_jit(_values_and_gradients(_output, dispatch))(chosen, layer, x)
    for (path, leaf), wanted in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        _assert_each_close(leaf, wanted, jax.tree_util.keystr(path))
    idle = np.setdiff1d(np.arange(EXPERTS), chosen)
    assert not any(np.any(leaf[idle]) for leaf in jax.tree.leaves(actual[1].experts))
    return idle


@pytest.mark.parametrize("top_k, normalised", [(2, True), (2, False), (EXPERTS, True)])
def test_layer_by_hand(top_k, normalised):
    _check_layer(_layer(top_k, norm_topk_prob=normalised), jnp.asarray(_random(2, 4, 8)), "blocks")


@pytest.mark.parametrize("dispatch", ["blocks", "ragged"])
def test_idle_experts_of_a_router(dispatch):
    """Two of six experts are never chosen."""
    layer, x = _layer(), jnp.asarray(_random(2, 4, 8)).at[..., 0].set(1)
    layer = eqx.tree_at(lambda m: m.gate.weight, layer, layer.gate.weight.at[jnp.asarray([1, 4]), 0].set(-30))
    assert list(_check_layer(layer, x, dispatch)) == [1, 4]


@pytest.mark.parametrize("same", [range(EXPERTS), [0, 3, 5]])
def test_ties_go_to_the_first(same):
    """All logits equal, or those of three experts far above the rest."""
    layer, x = _layer(), jnp.asarray(_random(2, 4, 8)).at[..., 0].set(1)
    rows = jnp.zeros((EXPERTS, 8)).at[jnp.asarray(same), 0].set(5)
    layer = eqx.tree_at(lambda m: m.gate.weight, layer, rows)
    _check_layer(layer, x, "blocks")
    expected = np.zeros(EXPERTS)
    expected[list(same)[:2]] = 8
    for dispatch in DISPATCHES:
        np.testing.assert_array_equal(_run(layer, x, dispatch=dispatch)[1].assigned, expected)


def test_automatic_dispatch_is_by_blocks_here():
    layer, x = _layer(), jnp.asarray(_random(2, 4, 8))
    np.testing.assert_array_equal(_run(layer, x, dispatch="auto")[0], _run(layer, x, dispatch="blocks")[0])


# --- Router sums and the balance loss


def _softmax(logits):
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("top_k", [1, 2])
def test_router_sums_leave_padding_out(top_k):
    layer, x = _layer(top_k), _random(3, 5, 8)
    ids = np.array([[0, 0, 1, 1, 2], [1, 1, 0, 0, 0], [0] * 5])
    out, stats = _run(layer, jnp.asarray(x), jnp.asarray(ids, jnp.int32))
    np.testing.assert_array_equal(out, _run(layer, jnp.asarray(x))[0])
    probability = _softmax(x[ids > 0].astype(np.float64) @ np.asarray(layer.gate.weight, np.float64).T)
    assigned = np.zeros(EXPERTS)
    for token in probability:
        for expert in sorted(range(EXPERTS), key=lambda e: -token[e])[:top_k]:
            assigned[expert] += 1
    np.testing.assert_array_equal(stats.assigned, assigned)
    np.testing.assert_allclose(stats.probability, probability.sum(axis=0), rtol=1e-5)
    assert stats.tokens == 5


def test_router_is_float32_after_bfloat16_logits():
    layer = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _layer())
    x = jnp.asarray(_random(2, 40, 8), jnp.bfloat16)
    logits = np.asarray(layer.gate(x), np.float64).reshape(-1, EXPERTS)
    out, stats = _apply(layer, x)  # compiled, the logits need not be rounded
    assert (out.dtype, stats.assigned.dtype, stats.probability.dtype) == ("bfloat16", "float32", "float32")
    np.testing.assert_allclose(stats.probability, _softmax(logits).sum(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(np.sum(stats.assigned), 160)


def _pooled(layers, top_k):
    """The loss from router probabilities [tokens, experts] of each layer, assignment by assignment."""
    tokens = [token for layer in layers for token in layer]
    fraction, mean = np.zeros(EXPERTS), np.zeros(EXPERTS)
    for token in tokens:
        for expert in sorted(range(EXPERTS), key=lambda e: -token[e])[:top_k]:
            fraction[expert] += 1 / len(tokens)
        mean += token / len(tokens)
    return EXPERTS * sum(fraction * mean)


def _stats(probability, top_k):
    assigned = np.bincount(np.argsort(-probability)[:, :top_k].ravel(), minlength=EXPERTS)
    leaves = (assigned, probability.sum(axis=0), len(probability), 0)
    return RouterStats(*(jnp.asarray(leaf, jnp.float32) for leaf in leaves))


@pytest.mark.parametrize("top_k", [1, 2])
def test_balance_loss_pools_layers(top_k):
    """Over all tokens of all layers, dense ones aside; not the mean of the layers' losses, however weighted."""
    layers = [_softmax(scale * _random(tokens, EXPERTS, seed=tokens)) for tokens, scale in ((5, 2), (11, 1), (3, 3))]
    stats = [_stats(layer, top_k) for layer in layers]
    loss = balance_loss([stats[0], None, stats[1], stats[2], None])
    assert loss == pytest.approx(_pooled(layers, top_k), rel=1e-5)
    sizes = np.array([len(layer) for layer in layers])
    alone = np.array([_pooled([layer], top_k) for layer in layers])
    assert abs(loss - alone.mean()) > 1e-2 and abs(loss - alone @ sizes / sizes.sum()) > 1e-2


def test_balance_loss_is_top_k_at_balance_and_zero_without_experts():
    even = [
        RouterStats(jnp.full(EXPERTS, 4.0), jnp.full(EXPERTS, 2.0), jnp.asarray(12.0), jnp.zeros(())) for _ in range(3)
    ]
    assert balance_loss(even) == pytest.approx(2, rel=1e-6)
    assert balance_loss([None, None]) == 0 and balance_loss([]) == 0
    nothing = RouterStats(jnp.zeros(EXPERTS), jnp.zeros(EXPERTS), jnp.zeros(()), jnp.zeros(()))
    assert balance_loss([nothing]) == 0


def test_balance_loss_gradient_comes_from_the_probabilities_alone():
    layer, x = _layer(), jnp.asarray(_random(2, 9, 8))
    ids = jnp.asarray([[0] * 3 + [1] * 6, [1] * 9], jnp.int32)
    real = np.asarray(x)[np.asarray(ids) > 0]
    counts = np.bincount(_most_likely(layer, real).ravel(), minlength=EXPERTS)

    def formula(weight, real, counts):
        probability = jax.nn.softmax(real @ weight.T, axis=-1)
        return EXPERTS * jnp.sum(counts / len(real) * jnp.mean(probability, axis=0))

    expected = oracles.in_float64(jax.grad(formula), layer.gate.weight, real, counts.astype(np.float32))
    gradient = oracles.quick_jit(jax.grad(lambda layer: balance_loss([_apply(layer, x, ids)[1]])))(layer)
    np.testing.assert_allclose(gradient.gate.weight, expected, atol=1e-6)
    rest = eqx.tree_at(lambda m: m.gate.weight, gradient, jnp.zeros_like(expected))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(rest))
