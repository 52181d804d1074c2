"""Experts block by block: assignments sorted by expert fill blocks of rows, and each block meets its one expert.

What a block needs, its rows, its expert's matrices and what is between them, is small enough for a core's cache. No
array of all blocks' weights is made, and the gradient of an expert's matrices adds up where they are. The derivative is
written by hand for that; it computes a block's forward pass again, whatever the choice of remat.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

_LARGEST = 128  # rows of a block

Apply = Callable[[Any, Array, Array], Array]  # (one expert, rows [size, hidden], their shares [size, 1])


class Blocks(NamedTuple):
    """Which assignment stands where. `source` is past the last assignment for a place that none fills."""

    source: Int[Array, "blocks size"]
    place: Int[Array, "tokens top_k"]
    owner: Int[Array, " blocks"]


def _size(assignments: int, experts: int) -> int:
    """Rows of a block: about an expert's share, so that little is padding, as a power of two."""
    share = max(assignments // experts, 1)
    return min(_LARGEST, 1 << (share - 1).bit_length())


def plan(chosen: Int[Array, "tokens top_k"], experts: int) -> Blocks:
    """As many blocks as the assignments need at most, however they are spread over the experts."""
    assignments = chosen.size
    size = _size(assignments, experts)
    blocks = (assignments + min(experts, assignments) * (size - 1)) // size
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.bincount(flat, length=experts)
    ends = jnp.cumsum(-(-counts // size))
    before = (ends - -(-counts // size)) * size - (jnp.cumsum(counts) - counts)
    places = (jnp.arange(assignments) + before[flat[order]]).astype(jnp.int32)
    place = jnp.zeros(assignments, jnp.int32).at[order].set(places, unique_indices=True)
    empty = jnp.full(blocks * size, assignments, jnp.int32)
    source = empty.at[place].set(jnp.arange(assignments, dtype=jnp.int32), unique_indices=True)
    owner = jnp.minimum(jnp.searchsorted(ends, jnp.arange(blocks), side="right"), experts - 1)
    return Blocks(source.reshape(blocks, size), place.reshape(chosen.shape), owner)


def _at(source: Array, *values: Array) -> list[Array]:
    """Of each array, what a block's places hold; 0 where nothing does."""
    return [value.at[source].get(mode="fill", fill_value=0) for value in values]


def _expert(experts: PyTree, owner: Array, number: Array) -> PyTree:
    """One of the experts. A random key is all experts': each block gets one of its own."""

    def one(leaf: Array) -> Array:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(leaf, number) if is_key else leaf[owner]

    return jax.tree.map(one, experts)


def _gathered(y: Float[Array, "blocks size hidden"], place: Int[Array, "tokens top_k"]) -> Array:
    """Each token the sum of its assignments' rows."""
    flat = y.reshape(-1, y.shape[-1])
    return sum((flat[place[:, k]] for k in range(1, place.shape[1])), start=flat[place[:, 0]])


@eqx.filter_custom_vjp
def _apply(moving: tuple[PyTree, Array, Array], blocks: Blocks, apply: Apply) -> Float[Array, "tokens hidden"]:
    experts, x, shares = moving
    experts, static = eqx.partition(experts, eqx.is_array)
    top_k = blocks.place.shape[1]

    def one(_: None, step: tuple[Array, Array, Array]) -> tuple[None, Array]:
        source, owner, number = step
        (rows,), (share,) = _at(source // top_k, x), _at(source, shares.reshape(-1, 1))
        return None, apply(eqx.combine(_expert(experts, owner, number), static), rows, share)

    steps = (blocks.source, blocks.owner, jnp.arange(blocks.owner.size))
    return _gathered(jax.lax.scan(one, None, steps)[1], blocks.place)


@_apply.def_fwd
def _forward(perturbed: Any, moving: Any, blocks: Blocks, apply: Apply) -> tuple[Array, None]:
    return _apply(moving, blocks, apply), None


@_apply.def_bwd
def _backward(
    _: None, cotangent: Array, perturbed: Any, moving: Any, blocks: Blocks, apply: Apply
) -> tuple[PyTree, Array, Array]:
    experts, x, shares = moving
    experts, static = eqx.partition(experts, eqx.is_array)
    trained, rest = eqx.partition(experts, perturbed[0])
    top_k = blocks.place.shape[1]

    def one(total: PyTree, step: tuple[Array, Array, Array]) -> tuple[PyTree, tuple[Array, Array]]:
        source, owner, number = step
        (rows, slopes), (share,) = _at(source // top_k, x, cotangent), _at(source, shares.reshape(-1, 1))
        fixed = eqx.combine(_expert(rest, owner, number), static)

        def applied(expert: PyTree, rows: Array, share: Array) -> Array:
            return apply(eqx.combine(expert, fixed), rows, share)

        def add(total: Array, slope: Array) -> Array:
            return total.at[owner].add(slope.astype(jnp.float32))

        d_expert, d_rows, d_share = jax.vjp(applied, _expert(trained, owner, number), rows, share)[1](slopes)
        return jax.tree.map(add, total, d_expert), (d_rows, d_share)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
    steps = (blocks.source, blocks.owner, jnp.arange(blocks.owner.size))
    total, (d_rows, d_shares) = jax.lax.scan(one, zeros, steps)
    d_trained = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), total, trained)
    return d_trained, _gathered(d_rows, blocks.place), d_shares.reshape(-1)[blocks.place]


def in_blocks(
    apply: Apply,
    experts: PyTree,
    x: Float[Array, "tokens hidden"],
    shares: Float[Array, "tokens top_k"],
    chosen: Int[Array, "tokens top_k"],
    count: int,
) -> Float[Array, "tokens hidden"]:
    """`sum_k apply(expert_{chosen[t, k]}, x_t, shares[t, k])`; `experts` are `count`, stacked in every array."""
    return _apply((experts, x, shares), plan(chosen, count), apply)
