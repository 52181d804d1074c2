"""Gated full attention, the softmax mixer."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from qwen3next.cache import AttentionCache
from qwen3next.config import ModelConfig
from qwen3next.context import Context
from qwen3next.linear import AbstractLinear, Linear
from qwen3next.mixer import AbstractMixer, MixerStats, mixer_stats
from qwen3next.norms import RMSNorm
from qwen3next.remat import recomputed
from qwen3next.rotary import rotate
from qwen3next.softmax import attend


@recomputed
def _gated(out: Array, gate: Array) -> Array:
    return out * jax.nn.sigmoid(gate)


class GatedAttention(AbstractMixer[AttentionCache]):
    """Grouped-query attention with normed queries and keys, partial rotary and an output gate.

    `q_proj` gives each head [query | gate]; the output is `o_proj(attention * sigmoid(gate))`.
    """

    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    q_norm: RMSNorm
    k_norm: RMSNorm
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        c, dtype, std = config, jnp.dtype(config.dtype), config.initializer_range
        heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        self.q_proj = Linear(c.hidden_size, 2 * heads, std, dtype, bias=c.attention_bias, key=q_key)
        self.k_proj = Linear(c.hidden_size, kv_heads, std, dtype, bias=c.attention_bias, key=k_key)
        self.v_proj = Linear(c.hidden_size, kv_heads, std, dtype, bias=c.attention_bias, key=v_key)
        self.o_proj = Linear(heads, c.hidden_size, std, dtype, bias=c.attention_bias, key=o_key)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype)
        self.config = config

    def __call__(
        self, x: Float[Array, "batch seq hidden"], context: Context, cache: AttentionCache | None
    ) -> tuple[Float[Array, "batch seq hidden"], AttentionCache | None, MixerStats]:
        c, (batch, seq, _) = self.config, x.shape
        heads, kv_heads = (batch, seq, -1, 2 * c.head_dim), (batch, seq, -1, c.head_dim)  # as many as this device has
        with jax.named_scope("projections"):
            q, gate = jnp.split(checkpoint_name(self.q_proj(x), "q_proj").reshape(*heads), 2, axis=-1)
            k = checkpoint_name(self.k_proj(x), "k_proj").reshape(*kv_heads)
            v = checkpoint_name(self.v_proj(x), "v_proj").reshape(*kv_heads)
            q = rotate(self.q_norm(q), context.cos, context.sin)
            k = rotate(self.k_norm(k), context.cos, context.sin)
            q, k = (checkpoint_name(y, "attention_qk") for y in (q, k))
        if cache is not None and context.slots is not None:
            at = (0, 0, context.slots.offset, 0)
            new = (jnp.moveaxis(y, 1, 2) for y in (k, v))
            held = map(jax.lax.dynamic_update_slice, (cache.key, cache.value), new, (at, at))
            cache = AttentionCache(*held)
            if not context.keys_are_own:
                k, v = (jnp.moveaxis(y, 1, 2) for y in (cache.key, cache.value))
        with jax.named_scope("attention"):
            out = attend(q, k, v, context)
        stats = mixer_stats(jnp.mean(jax.nn.sigmoid(gate), axis=-1), None, context)
        return self.o_proj(_gated(out, gate).reshape(batch, seq, -1)), cache, stats
