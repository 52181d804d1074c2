"""The gated delta rule (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks"), chunked and one step at a time.

For each value head, with state M in R^{key x value}:

    M <- e^{g_t} M;    d_t = beta_t (v_t - M^T k_t);    M <- M + k_t d_t^T;    o_t = M^T q_t

The chunked form solves a chunk's d_t at once. With D_ij = exp(g_{j+1} + ... + g_i) for j <= i and 0 above:

    T = (I + A)^{-1},  A_ij = beta_i (k_i.k_j) D_ij for j < i
    d = T (beta v) - T (beta e^G k) M,    o = e^G q M + (q k^T * D) d,    M <- e^{G_last} M + (e^{G_last - G} k)^T d

where G_i sums the chunk's g up to i. Every array is float32; the inverse's products are so on every backend, the others
in the backend's own precision for float32. Queries and keys stay at their own head count.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

_BASE = 8  # below this size the inverse doubles under a mask: tiny products cost more than they compute
_STRONGEST = -104.0  # e^-104 is 0 in float32


def unit_triangular_inverse(lower: Float[Array, "*batch chunk chunk"]) -> Float[Array, "*batch chunk chunk"]:
    """(I + lower)^{-1} for a strictly lower triangular matrix whose size is a power of two.

    By halves: inv [[P, 0], [L, Q]] = [[P', 0], [-Q' L P', Q']]. As stable as substitution.
    """
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    size = lower.shape[-1]
    if size > _BASE:
        half = size // 2
        blocks = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]], axis=-3)
        inverses = unit_triangular_inverse(blocks)
        first, second = inverses[..., 0, :, :], inverses[..., 1, :, :]
        corner = -product(second, product(lower[..., half:, :half], first))
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
    index = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    half = 1
    while half < size:
        i, j = index[:, None], index[None, :]
        corners = jnp.where((i // (2 * half) == j // (2 * half)) & (i // half > j // half), lower, 0.0)
        # At the first size the inverse is still the identity.
        inverse = inverse - (corners if half == 1 else product(inverse, product(corners, inverse)))
        half *= 2
    return inverse


def _sums(x: Float[Array, "*batch chunk"]) -> Float[Array, "*batch chunk"]:
    """Running sums, as a product: XLA on CPUs spells `cumsum` out again in whatever each of its elements meets."""
    triangle = jnp.tril(jnp.ones((x.shape[-1], x.shape[-1])))
    return jnp.einsum("...j,ij->...i", x, triangle, precision=jax.lax.Precision.HIGHEST)


def _decay(
    g: Float[Array, "*batch chunk"], documents: Float[Array, "*#batch chunk"] | None
) -> tuple[Float[Array, "*batch chunk chunk"], Float[Array, "*batch chunk"]]:
    """D, and e^G. Between two documents of a chunk both are 0, as from the state before it into a later document.

    A difference of two cumulative sums would lose the small terms next to the large ones. So g is split into a
    multiple of a power of two, large enough for a chunk's sums to be exact in float32, and a remainder whose sums are
    small; the remainder carries the derivative.
    """
    size = g.shape[-1]
    g, quantum = jnp.maximum(g, _STRONGEST), size / 2**17  # 104 * size is below 2^24 of them
    coarse = jax.lax.stop_gradient(jnp.round(g / quantum) * quantum)
    coarse_sum, fine = _sums(coarse), g - coarse
    visible = jnp.tril(jnp.ones((size, size), bool))
    if documents is None:
        fine_sum = _sums(fine)
        from_start = coarse_sum + fine_sum
    else:  # summed by document: the derivative of a sum over the chunk would leave rounding noise in the others
        visible = visible & (documents[..., :, None] == documents[..., None, :])
        fine_sum = jnp.sum(jnp.where(visible, fine[..., None, :], 0), axis=-1)
        from_start = jnp.where(documents == 0, coarse_sum + fine_sum, -jnp.inf)
    between = (coarse_sum[..., :, None] - coarse_sum[..., None, :]) + (fine_sum[..., :, None] - fine_sum[..., None, :])
    return jnp.exp(jnp.where(visible, between, -jnp.inf)), jnp.exp(from_start)


class _Chunks(NamedTuple):
    """Sequences in chunks; R value heads share a key head. `documents` counts those that began in the chunk.

    The rows of a batch and their key heads are one axis: XLA on CPUs sums a product of arrays with an axis of one, such
    as a batch of one row, twenty times as slowly.
    """

    q: Float[Array, "n heads 1 chunk key"]
    k: Float[Array, "n heads 1 chunk key"]
    v: Float[Array, "n heads repeats chunk value"]
    g: Float[Array, "n heads repeats chunk"]
    beta: Float[Array, "n heads repeats chunk"]
    documents: Float[Array, "n heads 1 chunk"] | None


def _transposed(x: Float[Array, "*batch rows columns"]) -> Float[Array, "*batch columns rows"]:
    return jnp.swapaxes(x, -1, -2)


def _by_key_head(
    x: Float[Array, "n heads repeats rows inner"], y: Float[Array, "n heads 1 inner columns"]
) -> Float[Array, "n heads repeats rows columns"]:
    """`x @ y` as one product a key head: a broadcast `y` would be written out."""
    rows = x.reshape(*x.shape[:2], 1, -1, x.shape[-1]) @ y
    return rows.reshape(*x.shape[:-1], -1)


def _products_within(chunks: _Chunks) -> tuple[Array, Array]:
    """`k_i.k_j` and `q_i.k_j`, [n, batch, key_heads, 1, chunk, chunk]."""
    keys = _transposed(chunks.k)
    return chunks.k @ keys, chunks.q @ keys


def _reads(chunks: _Chunks, inverse: Array, from_start: Array) -> Float[Array, "n heads repeats chunk key"]:
    """What the deltas take of a chunk's first state: `T (beta e^G k)`."""
    return _by_key_head(inverse * (chunks.beta * from_start)[..., None, :], chunks.k)


@jax.custom_vjp
def _rule(
    chunks: _Chunks, state: Float[Array, "heads repeats key value"]
) -> tuple[Float[Array, "n heads repeats chunk value"], Float[Array, "heads repeats key value"]]:
    """Outputs and last state. The derivative, by hand, is that of the triangular system, not of its inverse."""
    return _forward(chunks, state)[0]


def _forward(chunks: _Chunks, state: Array) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    q, k, v, g, beta, documents = chunks
    decay, from_start = _decay(g, documents)
    to_end, across = decay[..., -1, :, None], from_start[..., -1, None, None]
    kk, qk = _products_within(chunks)
    inverse = unit_triangular_inverse(jnp.tril(beta[..., None] * kk * decay, -1))
    inverse = checkpoint_name(inverse, "chunk_inverse")
    writes = inverse @ (beta[..., None] * v)

    def step(m: Array, xs: tuple[Array, Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        writes, reads, to_state, across = xs
        m = checkpoint_name(m, "chunk_states")
        delta = checkpoint_name(writes - reads @ m, "chunk_deltas")
        return across * m + _transposed(to_state) @ delta, (m, delta)

    # The loop does no more than must be serial: each chunk's outputs follow from its first state and its deltas.
    last, (states, deltas) = jax.lax.scan(
        step, state, (writes, _reads(chunks, inverse, from_start), k * to_end, across)
    )
    out = (q * from_start[..., None]) @ states + (qk * decay) @ deltas
    return (out, last), (chunks, inverse, states, deltas)


def _backward(kept: tuple[Any, ...], cotangents: tuple[Array, Array]) -> tuple[_Chunks, Array]:
    chunks, inverse, states, deltas = kept
    q, k, v, g, beta, documents = chunks
    d_out, d_last = cotangents
    (decay, from_start), decay_backward = jax.vjp(lambda g: _decay(g, documents), g)
    beta, e = beta[..., None], from_start[..., None]
    to_end, across = decay[..., -1, :, None], e[..., -1:, :]
    kk, qk = _products_within(chunks)

    def step(d_m: Array, xs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        by_scores, by_states, reads, to_state, across = xs
        d_delta = by_scores + to_state @ d_m
        return across * d_m + by_states - _transposed(reads) @ d_delta, (d_delta, d_m)

    by_scores, by_states = _transposed(qk * decay) @ d_out, _transposed(q * e) @ d_out
    terms = (by_scores, by_states, _reads(chunks, inverse, from_start), k * to_end, across)
    d_state, (d_deltas, d_ms) = jax.lax.scan(step, d_last, terms, reverse=True)

    # The deltas solve (I + A) d = beta v - beta e^G k M: d_right is the gradient of the right side, -d_right d^T of A.
    d_right = jnp.matmul(_transposed(inverse), d_deltas, precision=jax.lax.Precision.HIGHEST)
    d_system = -jnp.tril(d_right @ _transposed(deltas), -1)
    d_scores = d_out @ _transposed(deltas)
    d_reading_k = -d_right @ _transposed(states)  # of beta e^G k
    d_reading_q = d_out @ _transposed(states)  # of e^G q
    d_writing_k = deltas @ _transposed(d_ms)  # of e^{G_last - G} k

    read = jnp.sum(d_reading_k * k, axis=-1, keepdims=True)
    d_beta = jnp.sum(d_right * v, axis=-1) + (read * e)[..., 0] + jnp.sum(d_system * kk * decay, axis=-1)
    d_from_start = jnp.sum(d_reading_q * q, axis=-1) + (read * beta)[..., 0]
    d_from_start = d_from_start.at[..., -1].add(jnp.sum(states * d_ms, axis=(-1, -2)))
    d_decay = d_system * beta * kk + d_scores * qk
    d_decay = d_decay.at[..., -1, :].add(jnp.sum(d_writing_k * k, axis=-1))
    (d_g,) = decay_backward((d_decay, d_from_start))

    def shared(x: Array) -> Array:
        """A key head's sum over its value heads."""
        return jnp.sum(x, axis=2, keepdims=True)

    d_kk, d_qk = shared(d_system * beta * decay), shared(d_scores * decay)
    d_q = shared(d_reading_q * e) + d_qk @ k
    d_k = shared(d_reading_k * beta * e + d_writing_k * to_end)
    d_k += _transposed(d_qk) @ q + (d_kk + _transposed(d_kk)) @ k
    return _Chunks(d_q, d_k, beta * d_right, d_g, d_beta, None), d_state


_rule.defvjp(_forward, _backward)


def _chunked(
    q: Float[Array, "batch seq key_heads key"],
    k: Float[Array, "batch seq key_heads key"],
    v: Float[Array, "batch seq value_heads value"],
    g: Float[Array, "batch seq value_heads"],
    beta: Float[Array, "batch seq value_heads"],
    state: Float[Array, "batch value_heads key value"],
    resets: Bool[Array, "batch seq"] | None,
    chunk_size: int,
) -> tuple[Float[Array, "batch seq value_heads value"], Float[Array, "batch value_heads key value"]]:
    batch, seq, key_heads, _ = q.shape
    value_heads, value_dim = v.shape[2:]
    repeats = value_heads // key_heads
    size = min(chunk_size, 1 << (seq - 1).bit_length())
    n = -(-seq // size)

    def chunks(x: Array, *heads: int) -> Array:
        """[batch, seq, heads[0], ...] -> [n, batch * heads[0], *heads[1:], chunk, ...].

        Padding is 0, which neither decays nor writes.
        """
        x = jnp.pad(x, [(0, 0), (0, n * size - seq)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, n, size, *heads, *x.shape[3:])
        x = jnp.moveaxis(jnp.moveaxis(x, 2, 2 + len(heads)), 1, 0)
        return x.reshape(n, -1, *x.shape[3:])

    q, k = (chunks(x, key_heads, 1) for x in (q, k))
    v, g, beta = (chunks(x, key_heads, repeats) for x in (v, g, beta))
    documents = None
    if resets is not None:
        documents = jnp.repeat(_sums(chunks(resets[:, :, None].astype(jnp.float32), 1, 1)), key_heads, axis=1)
    out, last = _rule(_Chunks(q, k, v, g, beta, documents), state.reshape(-1, repeats, *state.shape[2:]))
    out = jnp.moveaxis(out.reshape(n, batch, key_heads, repeats, size, value_dim), (0, 4), (1, 2))
    out = out.reshape(batch, n * size, value_heads, value_dim)
    return out[:, :seq], last.reshape(state.shape)


def _step(
    q: Float[Array, "batch key_heads key"],
    k: Float[Array, "batch key_heads key"],
    v: Float[Array, "batch value_heads value"],
    g: Float[Array, "batch value_heads"],
    beta: Float[Array, "batch value_heads"],
    state: Float[Array, "batch value_heads key value"],
    reset: Bool[Array, " batch"] | None,
) -> tuple[Float[Array, "batch value_heads value"], Float[Array, "batch value_heads key value"]]:
    batch, key_heads, _ = q.shape
    m = state.reshape(batch, key_heads, -1, *state.shape[2:])
    decay = jnp.exp(g) if reset is None else jnp.where(reset[:, None], 0.0, jnp.exp(g))
    m = m * decay.reshape(m.shape[:3])[..., None, None]
    v, beta = v.reshape(*m.shape[:3], -1), beta.reshape(m.shape[:3])
    delta = beta[..., None] * (v - jnp.einsum("bhrkv,bhk->bhrv", m, k))
    m = m + k[:, :, None, :, None] * delta[..., None, :]
    out = jnp.einsum("bhrkv,bhk->bhrv", m, q)
    return out.reshape(batch, -1, out.shape[-1]), m.reshape(state.shape)


def gated_delta_rule(
    q: Float[Array, "batch seq key_heads key"],
    k: Float[Array, "batch seq key_heads key"],
    v: Float[Array, "batch seq value_heads value"],
    g: Float[Array, "batch seq value_heads"],
    beta: Float[Array, "batch seq value_heads"],
    state: Float[Array, "batch value_heads key value"],
    resets: Bool[Array, "batch seq"] | None = None,
    *,
    chunk_size: int = 0,
) -> tuple[Float[Array, "batch seq value_heads value"], Float[Array, "batch value_heads key value"]]:
    """Outputs and the state after the last token; all float32.

    `q` and `k` are normalised, `q` scaled; key head j serves value heads jR to jR+R-1. `g <= 0` is the log-decay.
    `g = beta = 0` makes a token inert. Where `resets` is true the state is emptied before the token.
    `chunk_size` is a power of two, or 0: by the width of a key, 16 to 64, since within a chunk each token meets each
    other and between chunks each meets a state of that width. A single token takes the one-step form.
    """
    if chunk_size < 0 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size is {chunk_size}; it must be a power of two, or 0")
    chunk_size = chunk_size or min(max(16, 1 << (q.shape[-1] - 1).bit_length()), 64)
    if q.shape[1] == 1:
        reset = None if resets is None else resets[:, 0]
        out, state = _step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state, reset)
        return out[:, None], state
    return _chunked(q, k, v, g, beta, state, resets, chunk_size)
