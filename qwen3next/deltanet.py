"""Gated DeltaNet, the linear mixer: projections, a short convolution, the gated delta rule, a gated norm."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from qwen3next.cache import DeltaNetCache
from qwen3next.config import ModelConfig
from qwen3next.context import Context, Packing
from qwen3next.delta_rule import gated_delta_rule
from qwen3next.linear import AbstractLinear, Linear, normal
from qwen3next.mixer import AbstractMixer, MixerStats, mixer_stats
from qwen3next.norms import GatedRMSNorm, l2_norm
from qwen3next.remat import recomputed
from qwen3next.shards import own_part


def _since(x: Array, age: Array | None, back: int) -> Array:
    """0 where a document began less than `back` tokens ago."""
    return x if age is None or back == 0 else jnp.where((age >= back)[..., None], x, 0)


def _seen(history: Array, age: Array | None, taps: int) -> list[Array]:
    """What each tap sees, the one that looks back furthest first."""
    seq = history.shape[1] - taps + 1
    return [_since(history[:, tap : tap + seq], age, taps - 1 - tap) for tap in range(taps)]


@jax.custom_vjp
def _weigh(history: Array, kernel: Array, age: Array | None) -> Array:
    """`y_t = sum_j kernel[j] history[t + j]` within documents.

    Its derivative is written out since it needs the history alone: JAX would keep what each tap sees, and its mask.
    """
    seen = _seen(history, age, kernel.shape[0])
    return sum((past * weight for past, weight in zip(seen, kernel, strict=True)), start=jnp.zeros((), history.dtype))


def _weigh_backward(kept: tuple[Array, Array, Array | None], cotangent: Array) -> tuple[Array, Array, None]:
    history, kernel, age = kept
    taps = kernel.shape[0]
    d_kernel = [
        jnp.einsum("bsc,bsc->c", past, cotangent, preferred_element_type=jnp.float32)
        for past in _seen(history, age, taps)
    ]
    # As the forward pass, from behind: slices of one padded array fuse, padded slices do not.
    around = ((0, 0), (taps - 1, taps - 1))
    wide, wide_age = jnp.pad(cotangent, (*around, (0, 0))), None if age is None else jnp.pad(age, around)
    d_history = jnp.zeros((), history.dtype)
    for tap, weight in enumerate(kernel):
        back = taps - 1 - tap
        span = slice(back, back + history.shape[1])
        d_history += _since(wide[:, span], None if wide_age is None else wide_age[:, span], back) * weight
    return d_history, jnp.stack(d_kernel).astype(kernel.dtype), None


_weigh.defvjp(lambda *args: (_weigh(*args), args), _weigh_backward)


def short_convolution(
    x: Float[Array, "batch seq channels"],
    weight: Float[Array, "channels 1 kernel"],
    window: Float[Array, "batch window channels"] | None,
    packing: Packing | None,
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch window channels"] | None]:
    """Causal convolution of each channel with itself, and the window for the next call.

    `y_t = sum_j w[j] x_{t-K+1+j}`; before the call stands the window, if any, and before a document nothing. Written
    as K shifted products: XLA's grouped convolution has a slow weight gradient on CPU.
    Tokens of a row must be contiguous up to padding on either side of a document.
    """
    taps, seq = weight.shape[-1], x.shape[1]
    kernel = weight[:, 0, :].T.astype(x.dtype)
    if packing is not None:
        x = jnp.where(packing.real[..., None], x, 0)
    history, after = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0))), None
    if window is not None and packing is None:
        history = jnp.concatenate([window, x], axis=1)
        after = history[:, seq:]
    elif window is not None and packing is not None:
        # The window goes right before a row's first real token, and is taken right before its end: what of it belongs
        # to the last document.
        insert = jax.vmap(lambda h, w, at: jax.lax.dynamic_update_slice(h, w, (at, 0)))
        take = jax.vmap(lambda h, at: jax.lax.dynamic_slice(h, (at, 0), window.shape[1:]))
        history = insert(history, window, packing.first)
        held = (jnp.arange(taps - 1, 0, -1) <= packing.length[:, None]) | (packing.last == 0)[:, None]
        after = jnp.where(held[..., None], take(history, packing.last), 0)
    return _weigh(history, kernel, None if packing is None else packing.age), after


def _split(x: Array, axis: int, parts: int) -> Array:
    """[.., heads, ..] -> [parts, .., heads / parts, ..]."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :]), axis, 0)


def _join(x: Array, axis: int) -> Array:
    """The inverse of `_split`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


class GatedDeltaNet(AbstractMixer[DeltaNetCache]):
    """Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024), as Qwen3-Next lays it out.

    `in_proj_qkvz` and `in_proj_ba` are grouped by key head: [q | k | v of its value heads | z of them], [b | a].
    The convolution's channels are not: all q, all k, all v. Key head j serves value heads jR to jR+R-1.
    """

    in_proj_qkvz: AbstractLinear
    in_proj_ba: AbstractLinear
    conv1d: Float[Array, "channels 1 kernel"]
    A_log: Float[Array, " value_heads"]
    dt_bias: Float[Array, " value_heads"]
    norm: GatedRMSNorm
    out_proj: AbstractLinear
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        c, dtype, std = config, jnp.dtype(config.dtype), config.initializer_range
        qkvz_key, ba_key, conv_key, decay_key, out_key = jax.random.split(key, 5)
        self.in_proj_qkvz = Linear(c.hidden_size, 2 * c.key_dim + 2 * c.value_dim, std, dtype, key=qkvz_key)
        self.in_proj_ba = Linear(c.hidden_size, 2 * c.linear_num_value_heads, std, dtype, key=ba_key)
        self.conv1d = normal(conv_key, (c.conv_dim, 1, c.linear_conv_kernel_dim), std, dtype)
        # The decay parameters stay float32 in a bfloat16 model: rounding them alone shifts every state.
        decay = jax.random.uniform(decay_key, (c.linear_num_value_heads,), jnp.float32, 0.01, 16.0)
        self.A_log = jnp.log(decay)
        self.dt_bias = jnp.ones(c.linear_num_value_heads, jnp.float32)
        self.norm = GatedRMSNorm(c.linear_value_head_dim, c.rms_norm_eps, dtype)
        self.out_proj = Linear(c.value_dim, c.hidden_size, std, dtype, key=out_key)
        self.config = config

    def _project(self, x: Float[Array, "batch seq hidden"]) -> tuple[Array, Array, Array, Array]:
        """Convolution inputs [batch, seq, channels]; z [batch, seq, value_heads, value]; b and a [.., value_heads]."""
        c, shape = self.config, x.shape[:2]
        key, value = c.linear_key_head_dim, c.linear_value_head_dim
        repeats = c.linear_num_value_heads // c.linear_num_key_heads
        by_head = (*shape, -1, 2 * key + 2 * repeats * value)  # as many heads as this device has
        qkvz = checkpoint_name(self.in_proj_qkvz(x), "qkvz_proj").reshape(by_head)
        *qkv, z = jnp.split(qkvz, (key, 2 * key, 2 * key + repeats * value), axis=-1)
        ba = checkpoint_name(self.in_proj_ba(x), "ba_proj").reshape(*shape, -1, 2 * repeats)
        b, a = (part.reshape(*shape, -1) for part in jnp.split(ba, 2, axis=-1))
        flat = jnp.concatenate([part.reshape(*shape, -1) for part in qkv], axis=-1)
        return flat, z.reshape(*shape, -1, value), b, a

    def _own_kernel(self) -> Float[Array, "channels 1 kernel"]:
        """The convolution's kernel for the channels of this device's heads."""
        c = self.config
        parts = jnp.split(self.conv1d, (c.key_dim, 2 * c.key_dim))
        return jnp.concatenate([own_part(part, 0) for part in parts])

    def _gates(
        self, b: Float[Array, "batch seq value_heads"], a: Float[Array, "batch seq value_heads"]
    ) -> tuple[Float[Array, "batch seq value_heads"], Float[Array, "batch seq value_heads"]]:
        """Log-decay of the state and strength of writing, beta; float32."""
        rate = jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias.astype(jnp.float32))
        return -jnp.exp(self.A_log.astype(jnp.float32)) * rate, jax.nn.sigmoid(b).astype(jnp.float32)

    def recurrence(
        self,
        mixed: Float[Array, "batch seq channels"],
        b: Float[Array, "batch seq value_heads"],
        a: Float[Array, "batch seq value_heads"],
        context: Context,
        state: Float[Array, "batch value_heads key value"] | None,
    ) -> tuple[Float[Array, "batch seq value_heads value"], Float[Array, "batch value_heads key value"]]:
        """The gated delta rule on the convolution's activations; outputs and state are float32."""
        c, (batch, seq, value_heads), packing = self.config, b.shape, context.packing
        compute = context.compute
        key_dim = value_heads * c.key_dim // c.linear_num_value_heads
        q, k, v = jnp.split(mixed, (key_dim, 2 * key_dim), axis=-1)
        q, k = (y.reshape(batch, seq, -1, c.linear_key_head_dim) for y in (q, k))
        v = v.reshape(batch, seq, value_heads, -1)
        g, beta = self._gates(b, a)
        if packing is not None:  # padding neither decays the state nor writes to it
            g, beta = (jnp.where(packing.real[..., None], y, 0) for y in (g, beta))
        g, beta = (checkpoint_name(y, "delta_gates") for y in (g, beta))
        if state is None:
            shape = (batch, value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
            state = jnp.zeros(shape, jnp.float32)
        resets = None if packing is None else packing.resets

        def rule(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
            q, k = l2_norm(q) * c.linear_key_head_dim**-0.5, l2_norm(k)
            q, k = (checkpoint_name(y, "delta_qk") for y in (q, k))
            v = v.astype(jnp.float32)
            return gated_delta_rule(q, k, v, g, beta, state, resets, chunk_size=compute.chunk_size)

        parts = math.gcd(compute.delta_parts, q.shape[2])
        if parts == 1 or seq == 1:
            return rule(q, k, v, g, beta, state)
        axes = (2, 2, 2, 2, 2, 1)  # of heads
        cut = [_split(x, axis, parts) for x, axis in zip((q, k, v, g, beta, state), axes, strict=True)]
        part = recomputed(rule, prevent_cse=False, policy=compute.remat.jax_policy("linear_attention"))
        out, end = jax.lax.map(lambda heads: part(*heads), cut)
        return _join(out, 2), _join(end, 1)

    def __call__(
        self, x: Float[Array, "batch seq hidden"], context: Context, cache: DeltaNetCache | None
    ) -> tuple[Float[Array, "batch seq hidden"], DeltaNetCache | None, MixerStats]:
        with jax.named_scope("projections"):
            inputs, z, b, a = self._project(x)
        with jax.named_scope("convolution"):
            window = None if cache is None else cache.conv
            mixed, window = short_convolution(inputs, self._own_kernel(), window, context.packing)
            mixed = recomputed(jax.nn.silu)(checkpoint_name(mixed, "conv_out"))
        with jax.named_scope("delta_rule"):
            out, state = self.recurrence(mixed, b, a, context, None if cache is None else cache.state)
        out = checkpoint_name(out.astype(x.dtype), "delta_out")
        out = checkpoint_name(self.norm(out, z), "gated_norm")
        if cache is not None and window is not None:
            cache = DeltaNetCache(window, state)
        g, beta = self._gates(b, a)
        return self.out_proj(out.reshape(*x.shape[:2], -1)), cache, mixer_stats(beta, g, context)
