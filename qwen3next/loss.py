"""Losses, in float32."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen3next.config import IGNORED_LABEL
from qwen3next.moe import RouterStats


def cross_entropy_sum(
    logits: Float[Array, "batch seq vocab"], labels: Int[Array, "batch seq"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of -log p(label), in nats, and the number of labels; a label of -100 does not count.

    `labels[t]` is what `logits[t]` predicts: the shift has been made by whoever made the labels.
    """
    logits = logits.astype(jnp.float32)
    counted = labels != IGNORED_LABEL
    picked = jnp.take_along_axis(logits, jnp.where(counted, labels, 0)[..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.sum(jnp.where(counted, nats, 0)), jnp.sum(counted, dtype=jnp.float32)


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
