"""Normalisations. Statistics are float32 whatever the input's dtype; there is one cast back, at the end."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qwen3next.remat import recomputed


def _normalize(x: Float[Array, "*batch width"], eps: float) -> Float[Array, "*batch width"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


@recomputed
def l2_norm(x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis, in float32. Zero stays zero and its slope finite."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


class RMSNorm(eqx.Module):
    """Zero-centred RMS norm: `x / sqrt(mean(x^2) + eps) * (1 + weight)`; the weight starts at 0."""

    weight: Float[Array, " width"]
    eps: float = eqx.field(static=True)

    def __init__(self, width: int, eps: float, dtype: jnp.dtype):
        self.weight = jnp.zeros(width, dtype)
        self.eps = eps

    @recomputed
    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        return (_normalize(x, self.eps) * (1 + self.weight.astype(jnp.float32))).astype(x.dtype)


class GatedRMSNorm(eqx.Module):
    """RMS norm, then gate: `weight * x / sqrt(mean(x^2) + eps) * silu(gate)`; this weight is a plain factor, from 1."""

    weight: Float[Array, " width"]
    eps: float = eqx.field(static=True)

    def __init__(self, width: int, eps: float, dtype: jnp.dtype):
        self.weight = jnp.ones(width, dtype)
        self.eps = eps

    @recomputed
    def __call__(
        self, x: Float[Array, "*batch width"], gate: Float[Array, "*batch width"]
    ) -> Float[Array, "*batch width"]:
        normed = _normalize(x, self.eps).astype(gate.dtype) * self.weight.astype(gate.dtype)
        return (normed.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)
