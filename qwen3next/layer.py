"""One decoder layer: mixer and MLP, each normed before and added after."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from qwen3next.attention import GatedAttention
from qwen3next.cache import LayerCache
from qwen3next.config import LayerKind, ModelConfig
from qwen3next.context import Context
from qwen3next.deltanet import GatedDeltaNet
from qwen3next.mixer import AbstractMixer, MixerStats
from qwen3next.mlp import MLP
from qwen3next.moe import MoE, RouterStats
from qwen3next.norms import RMSNorm
from qwen3next.shards import whole


class LayerStats(NamedTuple):
    """Sums over the tokens of a call: the router's, `None` in a dense layer, and the mixer's."""

    router: RouterStats | None
    mixer: MixerStats


class Layer(eqx.Module):
    """`a = h + mixer(norm(h)); h' = a + mlp(norm(a))`."""

    input_layernorm: RMSNorm
    mixer: AbstractMixer[Any]
    post_attention_layernorm: RMSNorm
    mlp: MoE | MLP
    kind: LayerKind = eqx.field(static=True)

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
        self.kind = kind

    def __call__(
        self, h: Float[Array, "batch seq hidden"], context: Context, cache: LayerCache | None
    ) -> tuple[Float[Array, "batch seq hidden"], LayerCache | None, LayerStats]:
        """Residual stream, cache moved past the call, and sums over the tokens."""
        compute = context.compute

        def apply_mlp(mlp: MoE | MLP, x: Array, context: Context) -> tuple[Array, RouterStats | None]:
            return mlp(x, context) if isinstance(mlp, MoE) else (mlp(x), None)

        x = checkpoint_name(self.input_layernorm(h), "mixer_norm")
        mixed, cache, mixer = self.mixer(x, context, cache)
        h = h + checkpoint_name(whole(mixed), "mixer_out")
        x = checkpoint_name(self.post_attention_layernorm(h), "mlp_norm")
        out, router = compute.remat.wrap_mlp(apply_mlp, *self.kind, straight=compute.unroll)(self.mlp, x, context)
        return h + whole(out), cache, LayerStats(router, mixer)
