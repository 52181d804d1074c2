"""One decoder layer: mixer and MLP, each normed before and added after."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from qwen3next.attention import GatedAttention
from qwen3next.cache import LayerCache
from qwen3next.config import LayerKind, ModelConfig
from qwen3next.context import Context
from qwen3next.deltanet import GatedDeltaNet
from qwen3next.mixer import AbstractMixer
from qwen3next.mlp import MLP
from qwen3next.moe import MoE, RouterStats
from qwen3next.norms import RMSNorm


class Layer(eqx.Module):
    """`a = h + mixer(norm(h)); h' = a + mlp(norm(a))`."""

    input_layernorm: RMSNorm
    mixer: AbstractMixer[Any]
    post_attention_layernorm: RMSNorm
    mlp: MoE | MLP

    def __init__(self, config: ModelConfig, kind: LayerKind, *, key: PRNGKeyArray):
        dtype = jnp.dtype(config.dtype)
        mixer_key, mlp_key = jax.random.split(key)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        mixer = GatedDeltaNet if kind.mixer == "linear_attention" else GatedAttention
        self.mixer = mixer(config, key=mixer_key)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if kind.mlp == "moe":
            self.mlp = MoE(config, key=mlp_key)
        else:
            self.mlp = MLP(config, config.intermediate_size, key=mlp_key)

    def __call__(
        self, h: Float[Array, "batch seq hidden"], context: Context, cache: LayerCache | None
    ) -> tuple[Float[Array, "batch seq hidden"], LayerCache | None, RouterStats | None]:
        """Residual stream, cache moved past the call, and the router's sums (`None` in a dense layer)."""
        mixed, cache = self.mixer(self.input_layernorm(h), context, cache)
        h = h + mixed
        x = self.post_attention_layernorm(h)
        if isinstance(self.mlp, MoE):
            out, stats = self.mlp(x, context)
        else:
            out, stats = self.mlp(x), None
        return h + out, cache, stats
