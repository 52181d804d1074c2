"""Gated DeltaNet: the short convolution, the fused layouts, a whole layer by hand, documents, padding and the cache."""

import dataclasses
import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from common import tiny_config

from qwen3next.cache import DeltaNetCache, empty_cache
from qwen3next.config import Compute, Dtype
from qwen3next.context import locate
from qwen3next.deltanet import GatedDeltaNet, short_convolution

# One layer, whose outputs before `out_proj` are as wide as its inputs; three value heads to a key head.
CONFIG = tiny_config(
    num_hidden_layers=1,
    hidden_size=30,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=4,
    linear_value_head_dim=5,
    initializer_range=0.3,
)
KEY, VALUE, REPEATS, VALUE_HEADS = 4, 5, 3, 6


def _random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- The short convolution


@oracles.quick_jit
def _convolve(x, weight, window, segment_ids=None, cache=None):
    """Also the bookkeeping of a cache, which says how old the document is that the window belongs to."""
    context, cache = locate(CONFIG, Compute(), x.shape[:2], segment_ids, None, cache)
    return *short_convolution(x, weight, window, context.packing), cache


def _inputs(kernel, seq=7, batch=2, channels=3):
    x, weight = _random(batch, seq, channels), _random(channels, 1, kernel, seed=1)
    return tuple(jnp.asarray(a) for a in (x, weight, _random(batch, kernel - 1, channels, seed=2)))


KERNELS = pytest.mark.parametrize("kernel", [1, 2, 3, 4])


@KERNELS
def test_convolution_of_each_channel(kernel):
    x, weight, window = _inputs(kernel)
    y, after, _ = _convolve(x, weight, window)
    history = np.concatenate([window, x], axis=1).astype(np.float64)
    for row, channel in np.ndindex(2, 3):
        # The last tap stands at the current token.
        expected = np.convolve(history[row, :, channel], weight[channel, 0, ::-1], mode="valid")
        np.testing.assert_allclose(y[row, :, channel], expected, atol=1e-6)
    np.testing.assert_array_equal(after, history[:, 7:])


@KERNELS
def test_convolution_gradients(kernel):
    inputs, cotangent = _inputs(kernel), jnp.asarray(_random(2, 7, 3, seed=3))

    def reference(x, weight, window):
        history = jnp.concatenate([window, x], axis=1)
        layout = ("NWC", "OIW", "NWC")
        return jax.lax.conv_general_dilated(history, weight, (1,), "VALID", None, None, layout, feature_group_count=3)

    def gradients(function):
        return oracles.quick_jit(lambda *inputs: jax.vjp(function, *inputs)[1](cotangent))(*inputs)

    actual = gradients(lambda x, weight, window: short_convolution(x, weight, window, None)[0])
    expected = gradients(reference)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-5)


@KERNELS
@pytest.mark.parametrize("ids", [None, [[1] * 7, [1] * 3 + [2] * 4]])
def test_convolution_continues_from_the_window(kernel, ids):
    """Cut in two at every place, and into pieces shorter than the window; one document a row, and two in the second."""
    x, weight, window = _inputs(kernel)
    window = jnp.zeros_like(window)  # before a document stands nothing
    ids = None if ids is None else jnp.asarray(ids, jnp.int32)
    expected, last, _ = _convolve(x, weight, window, ids, empty_cache(CONFIG, 2, 7))
    for cuts in ([1], [2], [3], [4], [5], [6], [1, 3, 6]):
        after, cache, outs = window, empty_cache(CONFIG, 2, 7), []
        for start, stop in itertools.pairwise([0, *cuts, 7]):
            named = None if ids is None else ids[:, start:stop]
            y, after, cache = _convolve(x[:, start:stop], weight, after, named, cache)
            outs.append(y)
        np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, atol=1e-6)
        np.testing.assert_array_equal(after, last)


@KERNELS
@pytest.mark.parametrize("left", [0, 1, 3, 5])
def test_convolution_ignores_padding(kernel, left):
    """Whatever it holds, on the right as well; the window of the call before reaches across it."""
    x, weight, window = _inputs(kernel)
    expected, last, _ = _convolve(x, weight, window)
    widths = ((0, 0), (left, 5 - left), (0, 0))
    ids = jnp.pad(jnp.ones((2, 7), jnp.int32), widths[:2])
    cache = dataclasses.replace(empty_cache(CONFIG, 2, 12), segment=jnp.ones(2, jnp.int32), count=jnp.full(2, 9))
    y, after, _ = _convolve(jnp.pad(x, widths, constant_values=1e3), weight, window, ids, cache)
    np.testing.assert_allclose(y[:, left : left + 7], expected, atol=1e-6)
    np.testing.assert_array_equal(after, last)


@KERNELS
def test_convolution_of_nothing_but_padding_keeps_the_window(kernel):
    x, weight, window = _inputs(kernel)
    np.testing.assert_array_equal(_convolve(x, weight, window, jnp.zeros((2, 7), jnp.int32))[1], window)


@KERNELS
@pytest.mark.parametrize("row", [[1, 1, 1, 2, 2, 2, 2], [1, 2, 3, 3, 4, 4, 5], [0, 7, 7, 0, 3, 0, 0]])
def test_convolution_separates_documents(kernel, row):
    """Each as on its own, and the window is what the last document leaves: nothing of the one before it."""
    x, weight, window = _inputs(kernel)
    window = jnp.zeros_like(window)
    y, after, _ = _convolve(x, weight, window, jnp.asarray([row] * 2, jnp.int32))
    for document in set(row) - {0}:
        (places,) = np.nonzero(np.asarray(row) == document)
        expected, last, _ = _convolve(x[:, places], weight, window)
        np.testing.assert_allclose(y[:, places], expected, atol=1e-6)
        if document == [d for d in row if d][-1]:
            np.testing.assert_array_equal(after, last)


# --- The layer


def _layer(**changes):
    """Random, with states that last: at the default decay a lost state would not show."""
    layer = GatedDeltaNet(dataclasses.replace(CONFIG, **changes), key=jax.random.key(0))
    decay = jnp.asarray(np.log(0.05) + 0.3 * _random(VALUE_HEADS, seed=4))
    weights = (decay, jnp.asarray(_random(VALUE_HEADS, seed=5)), jnp.asarray(1 + 0.3 * _random(VALUE, seed=6)))
    return eqx.tree_at(lambda m: (m.A_log, m.dt_bias, m.norm.weight), layer, weights)


def _with_identity_output(layer):
    return eqx.tree_at(lambda m: m.out_proj.weight, layer, jnp.eye(CONFIG.hidden_size))


def _apply(layer, x, segment_ids=None, cache=None, dtype: Dtype = "float32"):
    """Output of the layer, and the cache moved past the call; chunks of 4, so that there are several."""
    context, moved = locate(CONFIG, Compute(dtype=dtype, chunk_size=4), x.shape[:2], segment_ids, None, cache)
    out, entry, _ = layer(x, context, None if cache is None else cache.layers[0])
    return out, None if moved is None else dataclasses.replace(moved, layers=(entry,))


_run = oracles.quick_jit(_apply, static_argnames="dtype")


def _silu(x):
    return x / (1 + np.exp(-x))


def _by_hand(layer, x):
    """One row, a value head at a time, in float64."""
    qkvz, ba, conv, a_log, dt_bias, norm, out_proj = (
        np.asarray(leaf, np.float64)
        for leaf in (
            layer.in_proj_qkvz.weight,
            layer.in_proj_ba.weight,
            layer.conv1d[:, 0],
            layer.A_log,
            layer.dt_bias,
            layer.norm.weight,
            layer.out_proj.weight,
        )
    )

    def mixed(rows, first_channel):
        u = x @ rows.T
        taps = conv[first_channel : first_channel + len(rows)]
        return _silu(np.stack([np.convolve(u[:, i], w[::-1])[: len(x)] for i, w in enumerate(taps)], axis=1))

    def unit(x):
        return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)

    heads = []
    for head in range(VALUE_HEADS):
        group, member = divmod(head, REPEATS)
        rows = np.split(qkvz, 2)[group]  # of this key head: q, k, the v of its value heads, their z
        q_rows, k_rows, v_rows, z_rows = np.split(rows, [KEY, 2 * KEY, 2 * KEY + REPEATS * VALUE])
        v_rows, z_rows = (np.split(rows, REPEATS)[member] for rows in (v_rows, z_rows))
        b_rows, a_rows = np.split(np.split(ba, 2)[group], 2)
        q = unit(mixed(q_rows, group * KEY)) / np.sqrt(KEY)
        k = unit(mixed(k_rows, 2 * KEY + group * KEY))
        v = mixed(v_rows, 4 * KEY + head * VALUE)
        beta = 1 / (1 + np.exp(-x @ b_rows[member]))
        decay = np.exp(-np.exp(a_log[head]) * np.logaddexp(0, x @ a_rows[member] + dt_bias[head]))
        state, outs = np.zeros((KEY, VALUE)), []
        for t in range(len(x)):
            state = decay[t] * state
            state = state + np.outer(k[t], beta[t] * (v[t] - k[t] @ state))
            outs.append(q[t] @ state)
        out = np.stack(outs)
        out = out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + CONFIG.rms_norm_eps)
        heads.append(norm * out * _silu(x @ z_rows.T))
    return np.concatenate(heads, axis=-1) @ out_proj.T


def test_layer_by_hand():
    layer, x = _layer(), _random(2, 11, 30)
    out, _ = _run(layer, jnp.asarray(x))
    for row in range(2):
        np.testing.assert_allclose(out[row], _by_hand(layer, x[row].astype(np.float64)), atol=1e-5)


def _rows(part, group, member=0):
    """Rows of `in_proj_qkvz` that make a part, of a key head or of one of its value heads."""
    size = VALUE if part in "vz" else KEY
    start = {"q": 0, "k": KEY, "v": 2 * KEY, "z": 2 * KEY + REPEATS * VALUE}[part] + member * size
    return slice(group * 38 + start, group * 38 + start + size)


def _heads_that_change(rows):
    layer, x = _with_identity_output(_layer()), jnp.asarray(_random(1, 11, 30))
    changed = eqx.tree_at(lambda m: m.in_proj_qkvz.weight, layer, layer.in_proj_qkvz.weight.at[rows].set(0))
    before, after = (np.asarray(_run(m, x)[0]).reshape(11, VALUE_HEADS, VALUE) for m in (layer, changed))
    return list(np.nonzero(np.any(before != after, axis=(0, 2)))[0]), after


@pytest.mark.parametrize("head", range(VALUE_HEADS))
def test_closing_a_gate_silences_one_head(head):
    changed, out = _heads_that_change(_rows("z", *divmod(head, REPEATS)))
    assert changed == [head]
    assert not np.any(out[:, head])


@pytest.mark.parametrize("part, heads_of", [("q", range(2)), ("k", range(2)), ("v", range(VALUE_HEADS))])
def test_a_key_head_serves_neighbouring_value_heads(part, heads_of):
    for head in heads_of:
        group, member = divmod(head, REPEATS) if part == "v" else (head, 0)
        changed, _ = _heads_that_change(_rows(part, group, member))
        assert changed == ([head] if part == "v" else [head * REPEATS + r for r in range(REPEATS)])


# --- Precision


def test_decay_stays_float32_in_a_bfloat16_model():
    layer = GatedDeltaNet(dataclasses.replace(CONFIG, dtype="bfloat16"), key=jax.random.key(0))
    wide = {"A_log", "dt_bias"}
    for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
        assert leaf.dtype == ("float32" if path[0].name in wide else "bfloat16"), path


def test_state_is_float32_and_sees_decay_that_bfloat16_cannot_hold():
    layer, x = _layer(dtype="bfloat16"), jnp.asarray(_random(2, 11, 30), jnp.bfloat16)
    moved = eqx.tree_at(lambda m: m.A_log, layer, layer.A_log * (1 + 2.0**-11))
    assert np.array_equal(moved.A_log.astype(jnp.bfloat16), layer.A_log.astype(jnp.bfloat16))
    entries = []
    for each in (layer, moved):
        out, cache = _run(each, x, None, empty_cache(CONFIG, 2, 11, jnp.dtype("bfloat16")), "bfloat16")
        entry = cache.layers[0]
        assert (out.dtype, entry.conv.dtype, entry.state.dtype) == ("bfloat16", "bfloat16", "float32")
        entries.append(entry)
    change = np.max(np.abs(entries[0].state - entries[1].state))
    assert 1e-5 < change < 1e-2  # a rounded state would move by nothing or by 2^-8


# --- Documents, padding, cache


def test_padding_changes_nothing():
    """Padding on either side or both, none, and nothing but padding, in one batch; whatever it holds."""
    layer, tokens, sides = _layer(), _random(11, 30), [(5, 0), (0, 5), (3, 2)]
    expected, bare = _run(layer, jnp.asarray(tokens)[None], None, empty_cache(CONFIG, 1, 16))
    x, ids = 10 * _random(5, 16, 30, seed=7), np.zeros((5, 16), np.int32)
    for row, (left, _) in enumerate(sides):
        x[row, left : left + 11], ids[row, left : left + 11] = tokens, 1
    ids[3] = 1
    out, cache = _run(layer, jnp.asarray(x), jnp.asarray(ids), empty_cache(CONFIG, 5, 16))
    for row, (left, _) in enumerate(sides):
        np.testing.assert_allclose(out[row, left : left + 11], expected[0], atol=1e-5)
        for leaf, wanted in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(bare.layers), strict=True):
            np.testing.assert_allclose(leaf[row], wanted[0], atol=1e-5)
    np.testing.assert_allclose(out[3], _run(layer, jnp.asarray(x[3:4]))[0][0], atol=1e-5)
    assert not any(np.any(leaf[4]) for leaf in jax.tree.leaves(cache.layers))


def test_gradients_with_padding_are_finite_and_zero_there():
    """Padding holds zeros, where a careless norm has no slope; one row holds nothing else."""
    layer, ids = _layer(), np.ones((3, 11), np.int32)
    ids[0, :5], ids[1] = 0, 0
    x = jnp.where(ids[..., None] > 0, jnp.asarray(_random(3, 11, 30)), 0)
    real = jnp.asarray(ids > 0)[..., None]

    def loss(inputs):
        layer, x = inputs
        return jnp.sum(jnp.where(real, _apply(layer, x, jnp.asarray(ids))[0], 0) ** 2)

    gradients, gradient = oracles.quick_jit(jax.grad(loss))((layer, x))
    assert all(np.all(np.isfinite(leaf)) and np.any(leaf) for leaf in jax.tree.leaves(gradients))
    assert np.all(np.isfinite(gradient))
    assert not np.any(gradient[ids == 0]) and np.all(np.any(np.asarray(gradient)[ids == 1], axis=-1))


PACKED = [[1] * 4 + [2] * 5 + [3] * 1 + [4] * 2, [0] * 2 + [1] * 3 + [2] * 2 + [3] * 5]


def test_documents_are_separate():
    layer, x, ids = _layer(), _random(2, 12, 30), np.asarray(PACKED, np.int32)
    out, _ = _run(layer, jnp.asarray(x), jnp.asarray(ids))
    for row in range(2):
        for document in set(PACKED[row]) - {0}:
            own = ids[row] == document
            expected = _by_hand(layer, x[row, own].astype(np.float64))
            np.testing.assert_allclose(out[row, own], expected, atol=1e-5)


def test_nothing_crosses_documents():
    """A later document's outputs are the same bits, and its gradient with respect to an earlier one is exactly 0."""
    layer, x, ids = _layer(), jnp.asarray(_random(2, 12, 30)), jnp.asarray(PACKED, jnp.int32)
    later = ids >= jnp.asarray([[3], [2]])
    perturbed = jnp.where(later[..., None], x, 10 * x)
    np.testing.assert_array_equal(_run(layer, x, ids)[0][later], _run(layer, perturbed, ids)[0][later])

    def loss(x):
        return jnp.sum(jnp.where(later[..., None], _apply(layer, x, ids)[0], 0))

    gradient = oracles.quick_jit(jax.grad(loss))(x)
    assert np.any(gradient[later]) and not np.any(gradient[~later])


@pytest.mark.parametrize("cuts", [[5], [1, 3, 6]])
def test_pieces_continue_from_the_cache(cuts):
    layer, x = _layer(), jnp.asarray(_random(2, 11, 30))
    expected, whole = _run(layer, x, None, empty_cache(CONFIG, 2, 11))
    cache, outs = empty_cache(CONFIG, 2, 11), []
    for start, stop in itertools.pairwise([0, *cuts, 11]):
        out, cache = _run(layer, x[:, start:stop], None, cache)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), expected, atol=1e-5)
    for leaf, wanted in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(whole.layers), strict=True):
        np.testing.assert_allclose(leaf, wanted, atol=1e-5)


@pytest.mark.parametrize("named", [False, True])
def test_a_short_last_document_is_continued_alone(named):
    """Its window is not yet full: what stood before it must not come in with the next call, segment ids or not."""
    layer, x = _layer(), jnp.asarray(_random(1, 7, 30))
    _, cache = _run(layer, x[:, :5], jnp.asarray([[1, 1, 1, 1, 2]]), empty_cache(CONFIG, 1, 7))
    out, _ = _run(layer, x[:, 5:], jnp.asarray([[2, 2]]) if named else None, cache)
    np.testing.assert_allclose(out[0], _by_hand(layer, np.asarray(x[0, 4:], np.float64))[1:], atol=1e-5)


def test_cache_entry_is_made_of_what_the_config_says():
    (entry,) = empty_cache(CONFIG, 2, 9).layers
    assert isinstance(entry, DeltaNetCache)
    assert entry.conv.shape == (2, 3, 46) and entry.state.shape == (2, VALUE_HEADS, KEY, VALUE)


def test_heads_computed_in_parts_are_those_computed_together():
    """Values, the state and every gradient, over documents and padding; the sums over tokens are a formula's."""
    layer = _layer(linear_num_key_heads=2)
    x, ids = jnp.asarray(_random(2, 11, CONFIG.hidden_size)), jnp.asarray([[0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 0]] * 2)

    @functools.partial(oracles.quick_jit, static_argnums=0)
    def both(parts, layer, x):
        cache = empty_cache(CONFIG, 2, 11)
        context, _ = locate(CONFIG, Compute(chunk_size=4, delta_parts=parts), x.shape[:2], ids, None, cache)

        def total(layer, x):
            out, entry, stats = layer(x, context, cache.layers[0])
            return jnp.sum(jnp.sin(out)), (out, entry.state, stats)

        return eqx.filter_grad(lambda args: total(*args), has_aux=True)((layer, x))

    (slopes, (out, state, stats)), (expected, (right, end, _)) = both(2, layer, x), both(1, layer, x)
    np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state, end, rtol=1e-5, atol=1e-6)
    for one, other in zip(jax.tree.leaves(slopes), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    b, a = jnp.split((x @ layer.in_proj_ba.weight.T).reshape(2, 11, 2, 2 * REPEATS), 2, axis=-1)
    real = np.asarray(ids) > 0
    decay = -np.exp(layer.A_log) * np.logaddexp(0, np.asarray(a).reshape(2, 11, -1) + np.asarray(layer.dt_bias))
    np.testing.assert_allclose(
        stats.gate, (1 / (1 + np.exp(-np.asarray(b).reshape(2, 11, -1))))[real].sum(axis=0), rtol=1e-5
    )
    np.testing.assert_allclose(stats.decay, decay[real].sum(axis=0), rtol=1e-5)
    assert float(stats.tokens) == real.sum() == 18
