"""Gated attention against softmax attention written out a head at a time; its layouts, documents, padding, cache."""

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from common import tiny_config

from qwen3next.attention import GatedAttention
from qwen3next.cache import empty_cache
from qwen3next.config import Compute, RopeParameters
from qwen3next.context import locate

HEADS, KV_HEADS, HEAD, ROTATED = 6, 2, 8, 4
# One layer, whose outputs before `o_proj` are as wide as its inputs; three query heads to a key/value head.
CONFIG = tiny_config(
    num_hidden_layers=1,
    layer_types=("full_attention",),
    hidden_size=HEADS * HEAD,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD,
    attention_bias=True,
    rope_parameters=RopeParameters(rope_theta=100.0, partial_rotary_factor=0.5),
)


def _random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _layer(config=CONFIG):
    layer, random = GatedAttention(config, key=jax.random.key(0)), np.random.default_rng(1)

    def noisy(leaf):
        return leaf + 0.3 * jnp.asarray(random.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree.map(noisy, layer)


def _with_identity_output(layer):
    weights = (jnp.eye(CONFIG.hidden_size), jnp.zeros(CONFIG.hidden_size))
    return eqx.tree_at(lambda m: (m.o_proj.weight, m.o_proj.bias), layer, weights)


def _apply(layer, x, segment_ids=None, cache=None):
    context, moved = locate(layer.config, Compute(), x.shape[:2], segment_ids, None, cache)
    out, entry, _ = layer(x, context, None if cache is None else cache.layers[0])
    return out, None if moved is None else dataclasses.replace(moved, layers=(entry,))


_run = oracles.quick_jit(_apply)


def _by_hand(layer, x):
    """One document, in float64."""
    x = np.asarray(x, np.float64)

    def project(linear, rows):
        bias = 0 if linear.bias is None else np.asarray(linear.bias[rows], np.float64)
        return x @ np.asarray(linear.weight[rows], np.float64).T + bias

    def normed_and_turned(y, weight):
        y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + CONFIG.rms_norm_eps) * (1 + np.asarray(weight))
        angles = np.arange(len(y))[:, None] * 100.0 ** (-np.arange(0, ROTATED, 2) / ROTATED)
        turned = (y[:, :2] + 1j * y[:, 2:4]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag, y[:, 4:]], axis=-1)

    outs = []
    for head in range(HEADS):
        kv_rows = slice(head // 3 * HEAD, (head // 3 + 1) * HEAD)
        q = normed_and_turned(project(layer.q_proj, slice(head * 16, head * 16 + 8)), layer.q_norm.weight)
        gate = project(layer.q_proj, slice(head * 16 + 8, head * 16 + 16))
        k = normed_and_turned(project(layer.k_proj, kv_rows), layer.k_norm.weight)
        scores = np.where(np.tri(len(x), dtype=bool), q @ k.T / np.sqrt(HEAD), -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        outs.append(weights @ project(layer.v_proj, kv_rows) / (1 + np.exp(-gate)))
    out = np.concatenate(outs, axis=-1) @ np.asarray(layer.o_proj.weight, np.float64).T
    return out if layer.o_proj.bias is None else out + np.asarray(layer.o_proj.bias)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_by_hand(bias):
    layer, x = _layer(dataclasses.replace(CONFIG, attention_bias=bias)), _random(2, 9, CONFIG.hidden_size)
    out, _ = _run(layer, jnp.asarray(x))
    for row in range(2):
        np.testing.assert_allclose(out[row], _by_hand(layer, x[row]), atol=2e-5)


def _heads_that_change(change, where):
    """Query heads whose outputs move when one leaf is changed, and the outputs after."""
    layer, x = _with_identity_output(_layer()), jnp.asarray(_random(1, 9, CONFIG.hidden_size))
    changed = eqx.tree_at(where, layer, change(where(layer)))
    before, after = (np.asarray(_run(m, x)[0]).reshape(9, HEADS, HEAD) for m in (layer, changed))
    return list(np.nonzero(np.any(before != after, axis=(0, 2)))[0]), after


@pytest.mark.parametrize("head", range(HEADS))
def test_closing_a_gate_silences_one_head(head):
    """The gate of a head stands right behind its query."""
    rows = slice(head * 16 + 8, head * 16 + 16)
    changed, out = _heads_that_change(lambda bias: bias.at[rows].set(-1e4), lambda m: m.q_proj.bias)
    assert changed == [head]
    assert not np.any(out[:, head])


@pytest.mark.parametrize("kv_head", range(KV_HEADS))
@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_a_key_value_head_serves_neighbouring_query_heads(name, kv_head):
    rows = slice(kv_head * HEAD, (kv_head + 1) * HEAD)
    changed, _ = _heads_that_change(lambda weight: weight.at[rows].set(0), lambda m: getattr(m, name).weight)
    assert changed == [3 * kv_head, 3 * kv_head + 1, 3 * kv_head + 2]


# --- Documents, padding, cache

PACKED = [[1] * 4 + [2] * 5 + [3] * 1 + [4] * 2, [0] * 2 + [1] * 3 + [2] * 2 + [3] * 3 + [0] * 2]


def _packed():
    return _layer(), jnp.asarray(_random(2, 12, CONFIG.hidden_size)), jnp.asarray(PACKED, jnp.int32)


def test_documents_are_separate():
    layer, x, ids = _packed()
    out, _ = _run(layer, x, ids)
    for row in range(2):
        for document in set(PACKED[row]) - {0}:
            own = np.asarray(PACKED[row]) == document
            np.testing.assert_allclose(out[row, own], _by_hand(layer, x[row, own]), atol=2e-5)


def test_nothing_crosses_documents():
    """A later document's outputs are the same bits, and its gradient with respect to the rest is exactly 0."""
    layer, x, ids = _packed()
    later = ids == jnp.asarray([[4], [2]])
    perturbed = jnp.where(later[..., None], x, 10 * x)
    np.testing.assert_array_equal(_run(layer, x, ids)[0][later], _run(layer, perturbed, ids)[0][later])

    def loss(x):
        return jnp.sum(jnp.where(later[..., None], _apply(layer, x, ids)[0], 0))

    gradient = oracles.quick_jit(jax.grad(loss))(x)
    assert np.any(gradient[later]) and not np.any(gradient[~later])


def test_gradients_with_padding_are_finite_and_zero_there():
    """Padding holds zeros, where a careless norm has no slope; one row holds nothing else."""
    layer, ids = _layer(), jnp.asarray([[0] * 5 + [1] * 4, [0] * 9, [1] * 7 + [0] * 2], jnp.int32)
    real = (ids > 0)[..., None]
    x = jnp.where(real, jnp.asarray(_random(3, 9, CONFIG.hidden_size)), 0)

    def loss(inputs):
        layer, x = inputs
        return jnp.sum(jnp.where(real, _apply(layer, x, ids)[0], 0) ** 2)

    gradients, gradient = oracles.quick_jit(jax.grad(loss))((layer, x))
    assert all(np.all(np.isfinite(leaf)) and np.any(leaf) for leaf in jax.tree.leaves(gradients))
    assert np.all(np.isfinite(gradient)) and np.all(np.isfinite(_run(layer, x, ids)[0]))
    assert not np.any(gradient[ids == 0]) and np.all(np.any(gradient[ids == 1], axis=-1))


@pytest.mark.parametrize("cuts", [[5], [1, 3, 6]])
@pytest.mark.parametrize("packed", [False, True])
def test_pieces_continue_from_the_cache(cuts, packed):
    """The cache has room to spare; slots that hold nothing are not seen."""
    layer, x, ids = _packed()
    expected, _ = _run(layer, x, ids if packed else None)
    cache, outs = empty_cache(CONFIG, 2, 15), []
    for start, stop in itertools.pairwise([0, *cuts, 12]):
        out, cache = _run(layer, x[:, start:stop], ids[:, start:stop] if packed else None, cache)
        outs.append(out)
    real = np.asarray(ids) > 0 if packed else np.ones((2, 12), bool)
    np.testing.assert_allclose(np.concatenate(outs, axis=1)[real], expected[real], atol=1e-5)
