"""Rotary position embedding on a leading part of each head, with every `rope_type` that checkpoints use.

Half-split form: dimension i pairs with i + len(frequencies). Angles are float32. Sources: RoFormer (Su et al. 2021),
YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024), Llama 3.1's frequency blend.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from qwen3next.config import ModelConfig


def _powers(theta: Float[Array, "*batch 1"] | float, dim: int) -> Float[Array, "*batch freq"]:
    """theta^(2i/dim) for each rotated pair i."""
    return theta ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)


def _yarn(config: ModelConfig) -> tuple[Array, float]:
    rope, dim = config.rope_parameters, config.rotary_dim
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    factor = rope.factor or config.max_position_embeddings / original

    def correction(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = correction(rope.beta_fast or 32.0), correction(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = jnp.clip((jnp.arange(config.rotary_frequencies, dtype=jnp.float32) - low) / (high - low), 0, 1)
    powers = _powers(rope.rope_theta, dim)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    scaling = rope.attention_factor
    if scaling is None and rope.mscale and rope.mscale_all_dim:
        scaling = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return ramp / (factor * powers) + (1 - ramp) / powers, magnitude(1.0) if scaling is None else scaling


def _longrope(config: ModelConfig, length: Int[Array, " batch"]) -> tuple[Array, float]:
    rope = config.rope_parameters
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    factor = rope.factor or config.max_position_embeddings / original
    short, long = (jnp.asarray(np.array(f, np.float32)) for f in (rope.short_factor, rope.long_factor))
    scaling = rope.attention_factor
    if scaling is None:
        scaling = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    chosen = jnp.where(length[:, None] > original, long, short)
    return 1 / (chosen * _powers(rope.rope_theta, config.rotary_dim)), scaling


def _llama3(config: ModelConfig) -> Array:
    rope = config.rope_parameters
    assert rope.factor and rope.low_freq_factor is not None and rope.high_freq_factor is not None
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    frequencies = 1 / _powers(rope.rope_theta, config.rotary_dim)
    turns = original * frequencies / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return frequencies * ((1 - jnp.clip(smooth, 0, 1)) / rope.factor + jnp.clip(smooth, 0, 1))


def frequencies(config: ModelConfig, length: Int[Array, " batch"]) -> tuple[Float[Array, "#batch freq"], float]:
    """Angular frequencies of each row, radians a token, and the factor on cos and sin.

    `length` is the number of positions that a row has seen; only `dynamic` and `longrope` look at it.
    """
    rope, dim = config.rope_parameters, config.rotary_dim
    scaling = 1.0
    match rope.rope_type:
        case "default":
            freq = 1 / _powers(rope.rope_theta, dim)
        case "linear":
            assert rope.factor
            freq = 1 / (_powers(rope.rope_theta, dim) * rope.factor)
        case "dynamic":
            assert rope.factor
            seen = jnp.maximum(length, config.max_position_embeddings)[:, None].astype(jnp.float32)
            growth = rope.factor * seen / config.max_position_embeddings - (rope.factor - 1)
            freq = 1 / _powers(rope.rope_theta * growth ** (dim / (dim - 2)), dim)
        case "yarn":
            freq, scaling = _yarn(config)
        case "longrope":
            freq, scaling = _longrope(config, length)
        case "llama3":
            freq = _llama3(config)
    return freq[None] if freq.ndim == 1 else freq, scaling


def rotary_tables(
    config: ModelConfig, positions: Int[Array, "batch seq"], dtype: jnp.dtype
) -> tuple[Float[Array, "batch seq 1 freq"], Float[Array, "batch seq 1 freq"]]:
    """cos and sin of every position, ready to broadcast over heads."""
    freq, scaling = frequencies(config, jnp.max(positions, axis=1) + 1)
    angles = (positions[:, :, None].astype(jnp.float32) * freq[:, None, :])[:, :, None, :]
    return (jnp.cos(angles) * scaling).astype(dtype), (jnp.sin(angles) * scaling).astype(dtype)


def rotate(
    x: Float[Array, "batch seq heads head"],
    cos: Float[Array, "batch seq 1 freq"],
    sin: Float[Array, "batch seq 1 freq"],
) -> Float[Array, "batch seq heads head"]:
    """Rotates the first 2*freq dimensions of each head; the rest passes unchanged."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
