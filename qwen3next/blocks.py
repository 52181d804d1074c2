"""Which rows each expert meets: its first ones side by side with all others', what goes beyond them block by block.

Assignments sorted by expert stand in a table with `room` rows for each, a little more than an even share: one product
over all experts, which every core takes part in. Where an expert is given more, blocks of rows meet their one expert
one after another, as many as there are. With few tokens there is no table: only experts that are chosen are read.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

_SPARE = 1.25  # room for each expert, by its even share: trained and fresh routers mostly stay below it
_FEWEST = 16  # of an even share, below which there is no table
_LARGEST = 128  # rows of a block

Apply = Callable[[Any, Array, Array], Array]  # (one expert, rows [size, hidden], their shares [size, 1])


class Places(NamedTuple):
    """`source` is each place's assignment, past the last one where none stands; `place` is the inverse."""

    source: Int[Array, " places"]
    place: Int[Array, "tokens top_k"]


class Plan(NamedTuple):
    """Where each assignment stands: in the table [experts, room], or in the first `used` blocks."""

    table: Places
    blocks: Places
    owner: Int[Array, " blocks"]
    used: Int[Array, ""]


def plan(chosen: Int[Array, "tokens top_k"], experts: int) -> Plan:
    """Places for all, however the assignments are spread over the experts."""
    assignments = chosen.size
    share = assignments // experts
    room = 8 * -(-int(_SPARE * share) // 8) if share >= _FEWEST else 0
    size = min(_LARGEST, 1 << (max(share // 8 if room else share, 1) - 1).bit_length())
    blocks = (max(assignments - room, 0) + min(experts, assignments) * (size - 1)) // size
    blocks = 0 if room >= chosen.shape[0] else blocks  # a token chooses an expert once

    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    owner, counts = flat[order], jnp.bincount(flat, length=experts)
    rank = jnp.arange(assignments) - (jnp.cumsum(counts) - counts)[owner]  # among its expert's assignments
    needed = -(-jnp.maximum(counts - room, 0) // size)
    ends = jnp.cumsum(needed)

    def stand(places: Array, total: int) -> Places:
        places = places.astype(jnp.int32)
        place = jnp.zeros(assignments, jnp.int32).at[order].set(places, unique_indices=True)
        source = jnp.full(total, assignments, jnp.int32).at[places].set(order, mode="drop")
        return Places(source, place.reshape(chosen.shape))

    table = jnp.where(rank < room, owner * room + rank, experts * room)
    beyond = jnp.where(rank < room, blocks * size, (ends - needed)[owner] * size + rank - room)
    owners = jnp.minimum(jnp.searchsorted(ends, jnp.arange(blocks), side="right"), experts - 1)
    return Plan(stand(table, experts * room), stand(beyond, blocks * size), owners, ends[-1])


def _expert(experts: PyTree, owner: Array, number: Array) -> PyTree:
    """One of the experts. A random key is all experts': each block gets one of its own."""

    def one(leaf: Array) -> Array:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(leaf, number) if is_key else leaf[owner]

    return jax.tree.map(one, experts)


def filled(values: Array, at: Array) -> Array:
    """What stands at these places of the first axis; 0 past its end."""
    return values.at[at].get(mode="fill", fill_value=0)


def gathered(y: Float[Array, "places hidden"], place: Int[Array, "tokens top_k"]) -> Float[Array, "tokens hidden"]:
    """Each token the sum of its assignments' rows, in float32; addition by addition, which fuses with what follows."""
    first, *others = (filled(y, place[:, k]).astype(jnp.float32) for k in range(place.shape[1]))
    return sum(others, start=first).astype(y.dtype)


def _if_any(plan: Plan, loop: Callable[[], PyTree]) -> PyTree:
    """`loop()`, or zeros at once where there are no blocks. Without a table there always are."""
    if not plan.table.source.size:
        return loop()
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(loop))
    return jax.lax.cond(plan.used > 0, loop, lambda: zeros)


@eqx.filter_custom_vjp
def _beyond(moving: tuple[PyTree, Array, Array], plan: Plan, apply: Apply) -> Float[Array, "tokens hidden"]:
    experts, x, shares = moving
    experts, static = eqx.partition(experts, eqx.is_array)
    top_k, source = shares.shape[1], plan.blocks.source.reshape(plan.owner.size, -1)

    def one(number: Array, y: Array) -> Array:
        rows, share = filled(x, source[number] // top_k), filled(shares.reshape(-1, 1), source[number])
        expert = eqx.combine(_expert(experts, plan.owner[number], number), static)
        return y.at[number].set(apply(expert, rows, share))

    def loop() -> Array:
        y = jax.lax.fori_loop(0, plan.used, one, jnp.zeros((*source.shape, x.shape[1]), x.dtype))
        return gathered(y.reshape(-1, x.shape[1]), plan.blocks.place)

    return _if_any(plan, loop)


@_beyond.def_fwd
def _forward(perturbed: Any, moving: Any, plan: Plan, apply: Apply) -> tuple[Array, None]:
    return _beyond(moving, plan, apply), None


@_beyond.def_bwd
def _backward(
    _: None, cotangent: Array, perturbed: Any, moving: Any, plan: Plan, apply: Apply
) -> tuple[PyTree, Array, Array]:
    experts, x, shares = moving
    experts, static = eqx.partition(experts, eqx.is_array)
    trained, rest = eqx.partition(experts, perturbed[0])
    top_k, source = shares.shape[1], plan.blocks.source.reshape(plan.owner.size, -1)

    def one(number: Array, sums: tuple[PyTree, Array, Array]) -> tuple[PyTree, Array, Array]:
        total, d_rows, d_shares = sums
        owner, tokens = plan.owner[number], source[number] // top_k
        fixed = eqx.combine(_expert(rest, owner, number), static)

        def applied(expert: PyTree, rows: Array, share: Array) -> Array:
            return apply(eqx.combine(expert, fixed), rows, share)

        def add(total: Array, slope: Array) -> Array:
            return total.at[owner].add(slope.astype(jnp.float32))

        at = _expert(trained, owner, number), filled(x, tokens), filled(shares.reshape(-1, 1), source[number])
        d_expert, d_row, d_share = jax.vjp(applied, *at)[1](filled(cotangent, tokens))
        return jax.tree.map(add, total, d_expert), d_rows.at[number].set(d_row), d_shares.at[number].set(d_share)

    def loop() -> tuple[PyTree, Array, Array]:
        total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
        zeros = jnp.zeros((*source.shape, x.shape[1]), x.dtype), jnp.zeros((*source.shape, 1), shares.dtype)
        total, d_rows, d_shares = jax.lax.fori_loop(0, plan.used, one, (total, *zeros))
        d_trained = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), total, trained)
        d_x = gathered(d_rows.reshape(-1, x.shape[1]), plan.blocks.place)
        return d_trained, d_x, filled(d_shares.reshape(-1), plan.blocks.place)

    return _if_any(plan, loop)


def beyond(
    apply: Apply, experts: PyTree, x: Float[Array, "tokens hidden"], shares: Float[Array, "tokens top_k"], plan: Plan
) -> Float[Array, "tokens hidden"]:
    """`sum_k apply(expert_{chosen[t, k]}, x_t, shares[t, k])` of the assignments that stand in blocks.

    `experts` are stacked in every array. What is between a block's rows and its result is small enough for a core's
    cache; the derivative, written by hand, computes it again whatever the choice of remat.
    """
    return _beyond((experts, x, shares), plan, apply)
