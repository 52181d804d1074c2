"""Norms against their formulas in float64; offsets and factors as weights; slopes at zero."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from qwen3next.norms import GatedRMSNorm, RMSNorm, l2_norm

EPS = 1e-5
BF16 = jnp.dtype("bfloat16")


def _random(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _with_weight(norm, weight, dtype=jnp.float32):
    module = norm(weight.shape[0], EPS, jnp.dtype(dtype))
    return eqx.tree_at(lambda m: m.weight, module, jnp.asarray(weight, dtype))


def _normalised(x):
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS)


def _silu(x):
    x = np.asarray(x, np.float64)
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rms_norm(scale):
    x, weight = scale * _random(3, 5, 16), _random(16, seed=1)
    np.testing.assert_allclose(_with_weight(RMSNorm, weight)(jnp.asarray(x)), _normalised(x) * (1 + weight), 1e-5, 1e-6)


def test_gated_rms_norm():
    x, gate, weight = _random(3, 5, 16), _random(3, 5, 16, seed=1), _random(16, seed=2)
    actual = _with_weight(GatedRMSNorm, weight)(jnp.asarray(x), jnp.asarray(gate))
    np.testing.assert_allclose(actual, weight * _normalised(x) * _silu(gate), 1e-5, 1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_l2_norm(scale):
    x = scale * _random(3, 5, 16)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.sum(wide**2, axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(l2_norm(jnp.asarray(x)), expected, 1e-5, 1e-6)


def test_a_fresh_norm_has_scale_one():
    """The offset starts at 0 and the factor at 1."""
    x, gate = jnp.asarray(_random(4, 16)), jnp.asarray(_random(4, 16, seed=1))
    np.testing.assert_allclose(RMSNorm(16, EPS, jnp.dtype("float32"))(x), _normalised(x), 1e-5)
    actual = GatedRMSNorm(16, EPS, jnp.dtype("float32"))(x, gate)
    np.testing.assert_allclose(actual, _normalised(x) * _silu(gate), 1e-5, 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_small_bfloat16_offset_counts(dtype):
    """1 + 2^-9 is 1 in bfloat16, so the addition must not be made there."""
    x = jnp.asarray(_random(8, 256), dtype)
    offset = _with_weight(RMSNorm, np.full(256, 2.0**-9), jnp.bfloat16)
    plain = _with_weight(RMSNorm, np.zeros(256), jnp.bfloat16)
    assert np.mean(np.asarray(offset(x) != plain(x))) > 0.3
    expected = _normalised(np.asarray(x, np.float32)) * (1 + 2.0**-9)
    if dtype == "bfloat16":
        assert np.mean(np.asarray(offset(x)) == expected.astype(BF16)) > 0.99
    else:
        np.testing.assert_allclose(offset(x), expected, 1e-5)


def test_bfloat16_rms_norm_rounds_once():
    x, weight = _random(64, 64, dtype="bfloat16"), _random(64, seed=1, dtype="bfloat16")
    actual = np.asarray(_with_weight(RMSNorm, weight, jnp.bfloat16)(jnp.asarray(x)))
    expected = (_normalised(x) * (1 + weight.astype(np.float64))).astype(BF16)
    assert actual.dtype == BF16
    assert np.mean(actual == expected) > 0.99  # but for ties that float32 statistics break otherwise


def test_bfloat16_gated_rms_norm_rounds_where_transformers_does():
    """After normalising and after the weight; the gate is float32. Rounding elsewhere moves about a third."""
    x, gate = _random(64, 64, dtype="bfloat16"), _random(64, 64, seed=1, dtype="bfloat16")
    weight = _random(64, seed=2, dtype="bfloat16")
    actual = np.asarray(_with_weight(GatedRMSNorm, weight, jnp.bfloat16)(jnp.asarray(x), jnp.asarray(gate)))
    weighted = weight * _normalised(x).astype(BF16)
    assert actual.dtype == weighted.dtype == BF16
    expected = (weighted.astype(np.float64) * _silu(gate)).astype(BF16)
    assert np.mean(actual == expected) > 0.99
    assert np.mean((weight.astype(np.float64) * _normalised(x) * _silu(gate)).astype(BF16) == expected) < 0.8


def _norms():
    weight = _random(16, seed=1)
    gate = jnp.asarray(_random(3, 16, seed=2))
    gated = _with_weight(GatedRMSNorm, weight)
    return {"l2": l2_norm, "rms": _with_weight(RMSNorm, weight), "gated": lambda x: gated(x, gate)}


@pytest.mark.parametrize("name", ["l2", "rms", "gated"])
def test_zero_vectors_have_finite_gradients(name):
    norm, x = _norms()[name], jnp.asarray(_random(3, 16)).at[1].set(0)
    cotangent = jnp.asarray(_random(3, 16, seed=3))
    out, pull = jax.vjp(norm, x)
    (gradient,) = pull(cotangent)
    assert not np.any(out[1])
    assert np.all(np.isfinite(gradient))
    if name == "l2":  # the slope there is 1 / sqrt(eps)
        np.testing.assert_allclose(gradient[1], 1e3 * cotangent[1], 1e-5)


def test_l2_norm_gradient():
    x, cotangent = _random(3, 16), _random(3, 16, seed=3)

    def formula(x, cotangent):
        return jnp.sum(cotangent * x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6))

    expected = oracles.in_float64(jax.grad(formula), x, cotangent)
    (actual,) = jax.vjp(l2_norm, jnp.asarray(x))[1](jnp.asarray(cotangent))
    np.testing.assert_allclose(actual, expected, 1e-4, 1e-6)
