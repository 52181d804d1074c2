"""Slow references, written from the definitions and from nothing in the package but how it compiles."""

from functools import partial

import jax
import jax.numpy as jnp

from qwen3next.programs import quick_options

# For tests of many shapes: compiling takes a fraction of the time, and the arithmetic is the same.
quick_jit = partial(jax.jit, compiler_options=quick_options())


def delta_rule(q, k, v, g, beta, state, resets=None):
    """The gated delta rule as its definition reads, one token after another, in the dtype of its inputs.

    `q` and `k` are [batch, seq, key_heads, key], `v` [batch, seq, value_heads, value], `g` and `beta` [batch, seq,
    value_heads], `state` [batch, value_heads, key, value], `resets` [batch, seq]. Returns outputs and final state.
    """
    repeats = v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(x, repeats, axis=2) for x in (q, k))
    if resets is None:
        resets = jnp.zeros(v.shape[:2], bool)

    def token(m, now):
        q, k, v, g, beta, reset = now
        m = jnp.where(reset[:, None, None, None], 0, m)
        m = jnp.exp(g)[:, :, None, None] * m
        error = v - jnp.sum(k[..., None] * m, axis=-2)
        m = m + k[..., None] * (beta[..., None] * error)[:, :, None, :]
        return m, jnp.sum(q[..., None] * m, axis=-2)

    state, out = jax.lax.scan(token, state, [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, resets)])
    return jnp.moveaxis(out, 0, 1), state


def in_float64(function, *args):
    """`function` of the arguments, arrays or trees of them, in float64: a reference without rounding of its own."""

    def widen(x):
        return jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    with jax.enable_x64(True):
        return jax.tree.map(jax.device_get, quick_jit(function)(*jax.tree.map(widen, args)))
