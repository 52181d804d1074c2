"""Routed experts: the three ways in which tokens meet them. All compute every assignment; none drops a token."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from qwen3next.config import Dispatch, ModelConfig
from qwen3next.linear import normal

_LARGEST_BLOCK = 128


@jax.custom_vjp
def _send(
    x: Float[Array, "tokens hidden"], source: Int[Array, " places"], place: Int[Array, "tokens top_k"]
) -> Float[Array, "places hidden"]:
    """Each place its assignment's token, 0 where `source` is past the last assignment; `place` is the inverse.

    Knowing both directions makes the gradient a gather too: scattered additions are slow.
    """
    return x.at[source // place.shape[1]].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _collect(
    y: Float[Array, "places hidden"], source: Int[Array, " places"], place: Int[Array, "tokens top_k"]
) -> Float[Array, "tokens top_k hidden"]:
    """Each assignment what its place holds: the way back."""
    return y[place]


def _send_backward(indices: tuple[Array, Array], cotangent: Array) -> tuple[Array, None, None]:
    return jnp.sum(_collect(cotangent, *indices), axis=1), None, None


def _collect_backward(indices: tuple[Array, Array], cotangent: Array) -> tuple[Array, None, None]:
    flat = cotangent.reshape(-1, cotangent.shape[-1])
    return flat.at[indices[0]].get(mode="fill", fill_value=0), None, None


_send.defvjp(lambda x, source, place: (_send(x, source, place), (source, place)), _send_backward)
_collect.defvjp(lambda y, source, place: (_collect(y, source, place), (source, place)), _collect_backward)


def _block_size(assignments: int, experts: int) -> int:
    """Rows of a block: about an expert's share, so that little is padding, as a power of two."""
    share = max(assignments // experts, 1)
    return min(_LARGEST_BLOCK, 1 << (share - 1).bit_length())


# Rows [places, in] in groups, with a group's [out, in]: the published layout, which needs no transposed copy.
_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def _grouped_product(
    rows: Float[Array, "places in"], weight: Float[Array, "experts out in"], sizes: Int[Array, " experts"]
) -> Float[Array, "places out"]:
    return jax.lax.ragged_dot_general(rows, weight, sizes, _BY_GROUP)


def _swiglu(gate: Float[Array, "*rows expert"], up: Float[Array, "*rows expert"]) -> Float[Array, "*rows expert"]:
    gate, up = (checkpoint_name(y, "expert_hidden") for y in (gate, up))
    return jax.nn.silu(gate) * up


class Experts(eqx.Module):
    """`num_experts` SwiGLU experts of width `moe_intermediate_size`, stacked."""

    gate_proj: Float[Array, "experts expert hidden"]
    up_proj: Float[Array, "experts expert hidden"]
    down_proj: Float[Array, "experts hidden expert"]

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        c, std, dtype = config, config.initializer_range, jnp.dtype(config.dtype)
        gate_key, up_key, down_key = jax.random.split(key, 3)
        shape = (c.num_experts, c.moe_intermediate_size, c.hidden_size)
        self.gate_proj = normal(gate_key, shape, std, dtype)
        self.up_proj = normal(up_key, shape, std, dtype)
        self.down_proj = normal(down_key, (c.num_experts, c.hidden_size, c.moe_intermediate_size), std, dtype)

    def _dense(self, x: Array, weights: Array, chosen: Array) -> Array:
        """Every expert on every token: the reference."""
        gate, up, down = (w.astype(x.dtype) for w in (self.gate_proj, self.up_proj, self.down_proj))
        inner = _swiglu(jnp.einsum("th,eih->tei", x, gate), jnp.einsum("th,eih->tei", x, up))
        one_hot = jax.nn.one_hot(chosen, gate.shape[0], dtype=x.dtype)
        share = jnp.einsum("tk,tke->te", weights, one_hot)
        return jnp.einsum("tei,ehi,te->th", inner, down, share)

    def _ragged(self, x: Array, weights: Array, chosen: Array) -> Array:
        """Assignments sorted by expert, and a grouped product over them."""
        gate, up, down = (w.astype(x.dtype) for w in (self.gate_proj, self.up_proj, self.down_proj))
        source = jnp.argsort(chosen.reshape(-1), stable=True)
        place = jnp.argsort(source).reshape(chosen.shape)
        sizes = jnp.bincount(chosen.reshape(-1), length=gate.shape[0]).astype(jnp.int32)
        rows = checkpoint_name(_send(x, source, place), "expert_rows")
        inner = _swiglu(_grouped_product(rows, gate, sizes), _grouped_product(rows, up, sizes))
        out = checkpoint_name(_grouped_product(inner, down, sizes), "expert_out")
        return jnp.einsum("tk,tkh->th", weights, _collect(out, source, place))

    def _blocks(self, x: Array, weights: Array, chosen: Array) -> Array:
        """Assignments sorted by expert, each expert's filled up to whole blocks, and one batched product of blocks."""
        experts, assignments = self.gate_proj.shape[0], chosen.size
        size = _block_size(assignments, experts)
        blocks = (assignments + min(experts, assignments) * (size - 1)) // size
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        counts = jnp.bincount(flat, length=experts)
        block_ends = jnp.cumsum(-(-counts // size))
        before = (block_ends - -(-counts // size)) * size - (jnp.cumsum(counts) - counts)
        places = jnp.arange(assignments) + before[flat[order]]
        place = jnp.zeros(assignments, jnp.int32).at[order].set(places.astype(jnp.int32), unique_indices=True)
        empty = jnp.full(blocks * size, assignments, jnp.int32)
        source = empty.at[place].set(jnp.arange(assignments, dtype=jnp.int32), unique_indices=True)
        owner = jnp.minimum(jnp.searchsorted(block_ends, jnp.arange(blocks), side="right"), experts - 1)
        gate, up, down = (w[owner].astype(x.dtype) for w in (self.gate_proj, self.up_proj, self.down_proj))
        place = place.reshape(chosen.shape)
        rows = checkpoint_name(_send(x, source, place), "expert_rows").reshape(blocks, size, -1)
        inner = _swiglu(jnp.einsum("nbh,nih->nbi", rows, gate), jnp.einsum("nbh,nih->nbi", rows, up))
        out = checkpoint_name(jnp.einsum("nbi,nhi->nbh", inner, down), "expert_out").reshape(blocks * size, -1)
        return jnp.einsum("tk,tkh->th", weights, _collect(out, source, place))

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        weights: Float[Array, "tokens top_k"],
        chosen: Int[Array, "tokens top_k"],
        dispatch: Dispatch,
    ) -> Float[Array, "tokens hidden"]:
        """`sum_k weights[t, k] * expert_{chosen[t, k]}(x_t)`."""
        if dispatch == "auto":
            dispatch = "blocks" if jax.default_backend() == "cpu" else "ragged"
        apply = {"dense": self._dense, "ragged": self._ragged, "blocks": self._blocks}[dispatch]
        return apply(x, weights, chosen)
