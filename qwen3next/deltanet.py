"""Gated DeltaNet, the linear mixer: projections, a short convolution, the gated delta rule, a gated norm."""

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
from qwen3next.mixer import AbstractMixer
from qwen3next.norms import GatedRMSNorm, l2_norm


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
    y = history[:, taps - 1 :] * kernel[taps - 1]
    for back in range(1, taps):
        past = history[:, taps - 1 - back : taps - 1 - back + seq]
        if packing is not None:
            past = jnp.where((packing.age >= back)[..., None], past, 0)
        y = y + past * kernel[taps - 1 - back]
    return y, after


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
        qkvz = checkpoint_name(self.in_proj_qkvz(x), "qkvz_proj").reshape(*shape, c.linear_num_key_heads, -1)
        *qkv, z = jnp.split(qkvz, (key, 2 * key, 2 * key + repeats * value), axis=-1)
        ba = checkpoint_name(self.in_proj_ba(x), "ba_proj").reshape(*shape, c.linear_num_key_heads, 2 * repeats)
        b, a = (part.reshape(*shape, -1) for part in jnp.split(ba, 2, axis=-1))
        flat = jnp.concatenate([part.reshape(*shape, -1) for part in qkv], axis=-1)
        return flat, z.reshape(*shape, -1, value), b, a

    def recurrence(
        self,
        mixed: Float[Array, "batch seq channels"],
        b: Float[Array, "batch seq value_heads"],
        a: Float[Array, "batch seq value_heads"],
        context: Context,
        state: Float[Array, "batch value_heads key value"] | None,
    ) -> tuple[Float[Array, "batch seq value_heads value"], Float[Array, "batch value_heads key value"]]:
        """The gated delta rule on the convolution's activations; outputs and state are float32."""
        c, (batch, seq, _), packing = self.config, mixed.shape, context.packing
        q, k, v = jnp.split(mixed, (c.key_dim, 2 * c.key_dim), axis=-1)
        heads = (batch, seq, c.linear_num_key_heads, c.linear_key_head_dim)
        q = l2_norm(q.reshape(heads)) * c.linear_key_head_dim**-0.5
        k = l2_norm(k.reshape(heads))
        q, k = (checkpoint_name(y, "delta_qk") for y in (q, k))
        v = v.reshape(batch, seq, c.linear_num_value_heads, -1).astype(jnp.float32)
        beta = jax.nn.sigmoid(b).astype(jnp.float32)
        rate = jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias.astype(jnp.float32))
        g = -jnp.exp(self.A_log.astype(jnp.float32)) * rate
        if packing is not None:  # padding neither decays the state nor writes to it
            g, beta = (jnp.where(packing.real[..., None], y, 0) for y in (g, beta))
        g, beta = (checkpoint_name(y, "delta_gates") for y in (g, beta))
        if state is None:
            shape = (batch, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
            state = jnp.zeros(shape, jnp.float32)
        resets = None if packing is None else packing.resets
        return gated_delta_rule(q, k, v, g, beta, state, resets, chunk_size=context.compute.chunk_size)

    def __call__(
        self, x: Float[Array, "batch seq hidden"], context: Context, cache: DeltaNetCache | None
    ) -> tuple[Float[Array, "batch seq hidden"], DeltaNetCache | None]:
        with jax.named_scope("projections"):
            inputs, z, b, a = self._project(x)
        with jax.named_scope("convolution"):
            window = None if cache is None else cache.conv
            mixed, window = short_convolution(inputs, self.conv1d, window, context.packing)
            mixed = jax.nn.silu(checkpoint_name(mixed, "conv_out"))
        with jax.named_scope("delta_rule"):
            out, state = self.recurrence(mixed, b, a, context, None if cache is None else cache.state)
        out = checkpoint_name(out.astype(x.dtype), "delta_out")
        out = checkpoint_name(self.norm(out, z), "gated_norm")
        if cache is not None and window is not None:
            cache = DeltaNetCache(window, state)
        return self.out_proj(out.reshape(*x.shape[:2], -1)), cache
