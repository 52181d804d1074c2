"""What a decoder remembers between calls: one cache type a mixer, and where each row stands."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from qwen3next.config import ModelConfig
from qwen3next.errors import InputError


class DeltaNetCache(eqx.Module):
    """The last inputs of the short convolution, oldest first, and the recurrent state (float32 always)."""

    conv: Float[Array, "batch window channels"]
    state: Float[Array, "batch value_heads key value"]


class AttentionCache(eqx.Module):
    """Keys, normed and rotated, and values; a slot that holds no token is masked by `Cache.documents`."""

    key: Float[Array, "batch kv_heads slot head"]
    value: Float[Array, "batch kv_heads slot head"]


LayerCache = DeltaNetCache | AttentionCache


class Cache(eqx.Module):
    """One entry a layer, in layer order, and the bookkeeping that all of them share.

    A cache that is passed in is continued from. `documents` says which document of its row a slot belongs to, from 1;
    0 is an empty slot or padding. `segment` is the last real token's segment id and `count` the tokens of its
    document so far. Slots `[0, used)` have been written.
    """

    layers: tuple[LayerCache, ...]
    documents: Int[Array, "batch slot"]
    segment: Int[Array, " batch"]
    document: Int[Array, " batch"]
    count: Int[Array, " batch"]
    used: Int[Array, ""]

    def require_room(self, seq: int) -> None:
        """Raises `InputError` if `seq` tokens do not fit. Under `jit` only the capacity itself can be checked."""
        capacity = self.documents.shape[1]
        used = 0 if isinstance(self.used, Tracer) else int(self.used)
        if used + seq > capacity:
            raise InputError(f"{seq} tokens do not fit into the cache: {used} of its {capacity} slots are used")


def empty_cache(config: ModelConfig, batch: int, capacity: int, dtype: jnp.dtype = jnp.dtype("float32")) -> Cache:
    """A cache before the first token, with room for `capacity` tokens, padding included; `dtype`: the activations'."""

    def layer(mixer: str) -> LayerCache:
        if mixer == "linear_attention":
            heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
            return DeltaNetCache(
                conv=jnp.zeros((batch, config.linear_conv_kernel_dim - 1, config.conv_dim), dtype),
                state=jnp.zeros((batch, heads, key, value), jnp.float32),
            )
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        return AttentionCache(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))

    def zeros(*shape: int) -> Array:
        return jnp.zeros(shape, jnp.int32)

    layers = tuple(layer(kind.mixer) for kind in config.layer_kinds)
    with jax.ensure_compile_time_eval():  # that nothing is used yet is known while a program is traced
        used = jnp.int32(0)
    return Cache(layers, zeros(batch, capacity), zeros(batch), zeros(batch), zeros(batch), used)
