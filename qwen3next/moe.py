"""Mixture of experts: router, routed experts, and a gated shared expert."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from qwen3next.config import ModelConfig
from qwen3next.context import Context
from qwen3next.experts import Experts
from qwen3next.linear import AbstractLinear, Linear
from qwen3next.mlp import MLP
from qwen3next.shards import summed


class RouterStats(eqx.Module):
    """Sums over the real tokens of a call, from which the balance loss is made; float32.

    `assigned` counts top-k assignments and carries no gradient; `probability` sums the router's softmax. `overflow`
    counts assignments for which a device's first pass had no room.
    """

    assigned: Float[Array, "*layers experts"]
    probability: Float[Array, "*layers experts"]
    tokens: Float[Array, "*layers"]
    overflow: Float[Array, "*layers"]


class MoE(eqx.Module):
    """`sum of the top-k experts, by router weight, + sigmoid(gate x) * shared expert`."""

    gate: AbstractLinear
    experts: Experts
    shared_expert: MLP
    shared_expert_gate: AbstractLinear
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        c, std, dtype = config, config.initializer_range, jnp.dtype(config.dtype)
        router_key, experts_key, shared_key, gate_key = jax.random.split(key, 4)
        self.gate = Linear(c.hidden_size, c.num_experts, std, dtype, key=router_key)
        self.experts = Experts(c, key=experts_key)
        self.shared_expert = MLP(c, c.shared_expert_intermediate_size, key=shared_key)
        self.shared_expert_gate = Linear(c.hidden_size, 1, std, dtype, key=gate_key)
        self.config = c

    def __call__(
        self, x: Float[Array, "batch seq hidden"], context: Context
    ) -> tuple[Float[Array, "batch seq hidden"], RouterStats]:
        c = self.config
        flat = x.reshape(-1, x.shape[-1])
        with jax.named_scope("router"):
            logits = checkpoint_name(self.gate(flat), "router_logits")
            probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
            weights, chosen = jax.lax.top_k(probability, c.num_experts_per_tok)
            if c.norm_topk_prob:
                weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        is_real = None if context.packing is None else context.packing.real.reshape(-1)
        with jax.named_scope("experts"):
            routed, overflow = self.experts(flat, weights.astype(x.dtype), chosen, context.compute, is_real)
        with jax.named_scope("shared_expert"):
            shared = jax.nn.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        real = jnp.ones(flat.shape[0]) if is_real is None else is_real.astype(jnp.float32)
        assigned = jnp.zeros(c.num_experts).at[chosen].add(real[:, None])
        stats = RouterStats(jax.lax.stop_gradient(assigned), real @ probability, jnp.sum(real), overflow)
        return (routed + shared).reshape(x.shape), summed(stats)
