"""The loss that keeps experts in balance, in float32."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qwen3next.moe import RouterStats


def balance_loss(stats: Sequence[RouterStats | None]) -> Float[Array, ""]:
    """`E * sum_e f_e P_e` over all MoE layers and tokens pooled (Fedus et al. 2021, eqs. 4 to 6, as Hugging Face does).

    f_e is the assignments of expert e a token, P_e its mean probability; at perfect balance the loss is top-k.
    """
    layers = [layer for layer in stats if layer is not None]
    if not layers:
        return jnp.zeros(())
    pooled = jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *layers)
    tokens = jnp.maximum(pooled.tokens, 1)
    return pooled.assigned.shape[-1] * jnp.sum((pooled.assigned / tokens) * (pooled.probability / tokens))
