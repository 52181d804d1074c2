"""Routed experts, and the ways in which tokens meet them. All compute every assignment, but a capacity that drops."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from qwen3next.blocks import beyond, filled, gathered, plan
from qwen3next.config import Compute, ModelConfig
from qwen3next.exchange import Exchange, over_devices
from qwen3next.linear import AbstractLinear, Linear, Product, product
from qwen3next.mesh import axis_sizes, tokens_travel
from qwen3next.mlp import swiglu


@jax.custom_vjp
def _send(
    x: Float[Array, "tokens hidden"], source: Int[Array, " places"], place: Int[Array, "tokens top_k"]
) -> Float[Array, "places hidden"]:
    """Each place its assignment's token, 0 where `source` is past the last assignment; `place` is the inverse.

    Knowing both directions makes the gradient a gather too: scattered additions are slow.
    """
    return filled(x, source // place.shape[1])


@jax.custom_vjp
def _collect(
    y: Float[Array, "places hidden"], source: Int[Array, " places"], place: Int[Array, "tokens top_k"]
) -> Float[Array, "tokens hidden"]:
    """Each token the sum of what its assignments' places hold, 0 where one stands elsewhere: the way back."""
    return gathered(y, place)


# Each is the other's transpose.
_send.defvjp(lambda x, *at: (_send(x, *at), at), lambda at, cotangent: (_collect(cotangent, *at), None, None))
_collect.defvjp(lambda y, *at: (_collect(y, *at), at), lambda at, cotangent: (_send(cotangent, *at), None, None))


# Rows [places, in] in groups, with a group's [out, in]: the published layout, which needs no transposed copy.
_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


_by_expert = jax.vmap(product)  # rows [experts, rows, in] with [experts, out, in]


class Experts(eqx.Module):
    """`num_experts` SwiGLU experts of width `moe_intermediate_size`, stacked."""

    gate_proj: AbstractLinear
    up_proj: AbstractLinear
    down_proj: AbstractLinear
    num_experts: int = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        c, std, dtype = config, config.initializer_range, jnp.dtype(config.dtype)
        hidden, width, experts = c.hidden_size, c.moe_intermediate_size, c.num_experts
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate_proj = Linear(hidden, width, std, dtype, experts=experts, key=gate_key)
        self.up_proj = Linear(hidden, width, std, dtype, experts=experts, key=up_key)
        self.down_proj = Linear(width, hidden, std, dtype, experts=experts, key=down_key)
        self.num_experts = experts

    @property
    def held(self) -> int:
        """Experts whose weights are here: all, or those of one device."""
        return jax.tree.leaves(self.gate_proj)[0].shape[0]

    def _swiglu(
        self, rows: Float[Array, "*rows hidden"], product: Product, share: Array | float = 1.0
    ) -> Float[Array, "*rows hidden"]:
        rows = checkpoint_name(rows, "expert_rows")
        gate, up = (checkpoint_name(y(rows, product), "expert_hidden") for y in (self.gate_proj, self.up_proj))
        return checkpoint_name(self.down_proj(swiglu(gate, up, share), product), "expert_out")

    def _dense(self, x: Array, weights: Array, chosen: Array) -> Array:
        """Every expert on every token: the reference."""
        rows = jnp.broadcast_to(x, (self.held, *x.shape))
        share = jnp.einsum("tk,tke->et", weights, jax.nn.one_hot(chosen, self.held, dtype=x.dtype))
        return jnp.sum(self._swiglu(rows, _by_expert, share[..., None]), axis=0)

    def _ragged(self, x: Array, weights: Array, chosen: Array) -> Array:
        """Assignments sorted by expert, and a grouped product over them."""
        source = jnp.argsort(chosen.reshape(-1), stable=True)
        place = jnp.argsort(source).reshape(chosen.shape)
        sizes = jnp.bincount(chosen.reshape(-1), length=self.held).astype(jnp.int32)

        def by_group(rows: Array, weight: Array) -> Array:
            return jax.lax.ragged_dot_general(rows, weight.astype(rows.dtype), sizes, _BY_GROUP)

        share = _send(weights.reshape(-1, 1), source, place.reshape(-1, 1))
        return _collect(self._swiglu(_send(x, source, place), by_group, share), source, place)

    def _blocks(self, x: Array, weights: Array, chosen: Array) -> Array:
        """Each expert's first rows in one product over all experts, what it has beyond them block by block."""
        placed = plan(chosen, self.held)

        def apply(expert: "Experts", rows: Array, share: Array) -> Array:
            return expert._swiglu(rows, product, share)

        source, place = placed.table
        if not source.size:
            return beyond(apply, self, x, weights, placed)
        rows = _send(x, source, place).reshape(self.held, -1, x.shape[1])
        share = _send(weights.reshape(-1, 1), source, place.reshape(-1, 1)).reshape(self.held, -1, 1)
        table = self._swiglu(rows, _by_expert, share).reshape(-1, x.shape[1])
        out = _collect(table, source, place)
        return out + beyond(apply, self, x, weights, placed) if placed.owner.size else out

    def _here(self, x: Array, weights: Array, chosen: Array, compute: Compute) -> Array:
        dispatch = compute.dispatch
        if dispatch in ("auto", "all_to_all"):
            dispatch = "blocks" if compute.target == "cpu" else "ragged"
        apply = {"dense": self._dense, "ragged": self._ragged, "blocks": self._blocks}[dispatch]
        return apply(x, weights, chosen)

    def _there(self, x: Array, weights: Array, chosen: Array, compute: Compute) -> tuple[Array, Array]:
        """On the devices of the `expert` axis, of whose experts this module holds this device's."""
        parts = compute.expert_chunks
        exchange = Exchange.plan(chosen.size // parts, self.num_experts, compute.capacity_factor, compute.on_overflow)

        def apply(experts: "Experts", rows: Array, owner: Array) -> Array:
            return experts._here(rows, jnp.ones((rows.shape[0], 1), rows.dtype), owner[:, None], compute)

        if parts == 1:
            return over_devices(apply, self, x, weights, chosen, exchange=exchange)
        chunks = [y.reshape(parts, -1, y.shape[-1]) for y in (x, weights, chosen)]
        out, overflow = jax.lax.map(lambda chunk: over_devices(apply, self, *chunk, exchange=exchange), chunks)
        return out.reshape(x.shape), jnp.sum(overflow)

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        weights: Float[Array, "tokens top_k"],
        chosen: Int[Array, "tokens top_k"],
        compute: Compute,
        real: Bool[Array, " tokens"] | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], Float[Array, ""]]:
        """`sum_k weights[t, k] * expert_{chosen[t, k]}(x_t)`, and how many assignments of `real` tokens exceeded a
        capacity. What is not real may give anything."""
        if tokens_travel(compute, axis_sizes()):
            if real is not None:  # padding is all alike: sent, it would all go to the same experts
                chosen = jnp.where(real[:, None], chosen, self.num_experts)
            return self._there(x, weights, chosen, compute)
        return self._here(x, weights, chosen, compute), jnp.zeros(())
