"""Dense SwiGLU: the dense layers' MLP, and the shared expert's."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from qwen3next.config import ModelConfig
from qwen3next.linear import AbstractLinear, Linear
from qwen3next.remat import recomputed


@recomputed
def swiglu(gate: Array, up: Array, share: Array | float = 1.0) -> Array:
    """`silu(gate) * up * share`."""
    return jax.nn.silu(gate) * up * share


class MLP(eqx.Module):
    """`down(silu(gate x) * up x)` (Shazeer 2020, "GLU variants improve Transformer")."""

    gate_proj: AbstractLinear
    up_proj: AbstractLinear
    down_proj: AbstractLinear

    def __init__(self, config: ModelConfig, width: int, *, key: PRNGKeyArray):
        hidden, std, dtype = config.hidden_size, config.initializer_range, jnp.dtype(config.dtype)
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate_proj = Linear(hidden, width, std, dtype, key=gate_key)
        self.up_proj = Linear(hidden, width, std, dtype, key=up_key)
        self.down_proj = Linear(width, hidden, std, dtype, key=down_key)

    def __call__(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        gate, up = (checkpoint_name(project(x), "mlp_hidden") for project in (self.gate_proj, self.up_proj))
        return checkpoint_name(self.down_proj(swiglu(gate, up)), "mlp_out")
