"""The vocabulary in pieces: no device holds all of a large table, nor all logits, for a lookup or a cross-entropy.

A device holds some rows of the table; a piece joins a share of each device's. Pieces come one after another, each
gathered when its turn comes and forgotten, also by the backward pass, which gathers it again and scatters its gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from qwen3next.config import IGNORED_LABEL
from qwen3next.linear import AbstractEmbedding, AbstractLinear, product
from qwen3next.mesh import ALIKE, ROWS, axis_sizes, leaf_cuts, tensor_axis
from qwen3next.remat import recomputed
from qwen3next.shards import Shards, on_devices, summed, whole
from qwen3next.tree import leaf_path

Table = AbstractEmbedding | AbstractLinear
_LARGEST = 2**24  # elements of a piece: of its logits, or of its rows


class Losses(NamedTuple):
    """Sums over the labels of a batch, float32: nats, squared logsumexp, and how many labels there are."""

    nats: Float[Array, ""]
    z: Float[Array, ""]
    labels: Float[Array, ""]


@dataclass(frozen=True)
class Pieces:
    """How a vocabulary is cut: `held` rows lie on a device, `joined` devices make a piece, and there are `count`.

    `parts` devices of the axis `tensor` each go through rows of their own.
    """

    held: int
    joined: tuple[str, ...]
    count: int
    parts: int

    @classmethod
    def plan(cls, vocab_size: int, tokens: int, width: int = 0) -> "Pieces":
        """As few as keep a piece's logits for so many tokens, and its rows if they are gathered, below a bound."""
        sizes = axis_sizes()
        (cuts, _) = leaf_cuts("lm_head.weight", (vocab_size, 1), sizes)
        joined = tuple(name for name in cuts if name != "tensor")
        held = vocab_size // math.prod(sizes[name] for name in cuts)
        rows = held * math.prod(sizes[name] for name in joined)
        columns = max(tokens, width) if joined else tokens
        size = held // min(-(-rows * columns // _LARGEST), held)
        count = -(-held // max(size, 1))
        count = next((more for more in range(count, 2 * count) if held % more == 0), count)  # cut evenly it is no copy
        return cls(held, joined, count, sizes["tensor"] if "tensor" in cuts else 1)

    @property
    def size(self) -> int:
        """Rows of a piece that one device gives."""
        return -(-self.held // self.count)

    def cut(self, x: Array, axis: int) -> Array:
        """[.., held, ..] -> [count, .., size, ..]; what is missing at the end is 0."""
        axis %= x.ndim
        x = jnp.pad(x, [(0, self.count * self.size - self.held if at == axis else 0) for at in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], self.count, self.size, *x.shape[axis + 1 :]), axis, 0)

    def real(self, number: Any) -> Bool[Array, " rows"]:
        """Which rows of a piece are rows of the vocabulary."""
        devices = math.prod(axis_sizes()[name] for name in self.joined)
        return jnp.tile(number * self.size + jnp.arange(self.size) < self.held, devices)

    def find(self, ids: Int[Array, "*batch"], number: Any) -> tuple[Int[Array, "*batch"], Bool[Array, "*batch"]]:
        """Where the rows of these ids lie in a piece, and whether they do."""
        devices = math.prod(axis_sizes()[name] for name in self.joined)
        device, row = ids // self.held, ids % self.held
        here = row // self.size == number
        if self.parts > 1:
            here &= device // devices == jax.lax.axis_index("tensor")
        return jnp.where(here, device % devices * self.size + row % self.size, 0), here

    def scan(
        self, one: Callable[[Any, Any, Any], tuple[Any, PyTree]], start: Any, table: Shards, name: str, dtype: Any
    ) -> tuple[Any, PyTree]:
        """`carry, y = one(carry, piece, number)` for each piece, a table; the last carry, and the ys, stacked."""
        if self.count == 1:
            carry, y = one(start, table.gather(dtype), 0)
            return carry, jax.tree.map(lambda y: y[None], y)
        arrays, static = eqx.partition(table.module, eqx.is_array)
        paths, structure = jax.tree_util.tree_flatten_with_path(arrays)
        axes = [tensor_axis(f"{name}.{leaf_path(path)}") for path, _ in paths]
        cut = [self.cut(leaf, axis) for (_, leaf), axis in zip(paths, axes, strict=True) if axis is not None]

        def step(carry: Any, given: tuple[list[Array], Array]) -> tuple[Any, PyTree]:
            rows, number = iter(given[0]), given[1]
            leaves = [leaf if axis is None else next(rows) for (_, leaf), axis in zip(paths, axes, strict=True)]
            module = eqx.combine(jax.tree.unflatten(structure, leaves), static)
            return one(carry, Shards(module, table.cuts).gather(dtype), number)

        return jax.lax.scan(recomputed(step), start, (cut, jnp.arange(self.count)))


@jax.custom_vjp
def _wide_product(x: Float[Array, "*batch in"], weight: Float[Array, "out in"]) -> Float[Array, "*batch out"]:
    """`product`, for far more outputs than inputs: nothing as large as the outputs is transposed for the gradient."""
    return product(x, weight)


def _wide_product_backward(kept: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, weight = kept
    rows, slopes = x.reshape(-1, x.shape[-1]), cotangent.reshape(-1, cotangent.shape[-1])
    d_weight = jnp.einsum("ti,to->io", rows, slopes)
    # Without a factor between them, XLA makes product and transpose one product, of the slopes transposed.
    one = jnp.where(rows[0, 0] == rows[0, 0], 1, jnp.nan).astype(d_weight.dtype)
    return jnp.einsum("...o,oi->...i", cotangent, weight.astype(x.dtype)), (d_weight * one).T.astype(weight.dtype)


_wide_product.defvjp(lambda x, weight: (product(x, weight), (x, weight)), _wide_product_backward)


@jax.custom_vjp
def _picked(logits: Float[Array, "*batch vocab"], place: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Each row's logit at its place. JAX's own derivative scatters into zeros as many as the logits."""
    return jnp.take_along_axis(logits, place[..., None], axis=-1)[..., 0]


def _picked_backward(kept: tuple[int, Array], cotangent: Array) -> tuple[Array, None]:
    size, place = kept
    return jnp.where(place[..., None] == jnp.arange(size), cotangent[..., None], 0), None


_picked.defvjp(lambda logits, place: (_picked(logits, place), (logits.shape[-1], place)), _picked_backward)


def _logits(table: Table, states: Array) -> Array:
    if isinstance(table, AbstractEmbedding):
        return table.logits(states, _wide_product)
    return table(states, _wide_product)


def embed(
    table: AbstractEmbedding, ids: Int[Array, "batch seq"], shape: tuple[int, int], dtype: jnp.dtype
) -> Float[Array, "batch seq hidden"]:
    """Each token's row of a table of this shape, [vocabulary, hidden]."""
    vocab_size, width = shape

    def local(table: Shards, ids: Array) -> Array:
        pieces = Pieces.plan(vocab_size, width)
        if table.cuts is None or (not pieces.joined and pieces.parts == 1):
            return table.gather(dtype)(ids, dtype)

        def one(rows: Array, piece: AbstractEmbedding, number: Any) -> tuple[Array, None]:
            place, here = pieces.find(ids, number)
            return jnp.where(here[..., None], piece(place, dtype), rows), None

        start = jnp.zeros((*ids.shape, width), dtype)
        rows = pieces.scan(one, start, table, "embed_tokens", dtype)[0]
        return whole(rows) if pieces.parts > 1 else rows

    return on_devices(local, table, "embed_tokens", (ids,), ROWS)


def cross_entropy(
    table: Table, states: Float[Array, "batch seq hidden"], labels: Int[Array, "batch seq"], vocab_size: int
) -> Losses:
    """Cross-entropy of the logits that `table`, the head or the tied embedding, gives of final-normed states.

    `labels[t]` is what `states[t]` predicts: the shift has been made by whoever made the labels. -100 does not count.
    """
    name = "embed_tokens" if isinstance(table, AbstractEmbedding) else "lm_head"

    def local(table: Shards, states: Array, labels: Array) -> Losses:
        counted = labels != IGNORED_LABEL
        wanted, pieces = jnp.where(counted, labels, 0), Pieces.plan(vocab_size, labels.size, states.shape[-1])
        wide = states.astype(jnp.float32)  # its gradient is a sum over pieces, in this dtype

        def one(_: None, piece: Table, number: Any) -> tuple[None, tuple[Array, Array]]:
            logits = _logits(piece, wide.astype(states.dtype)).astype(jnp.float32)
            if pieces.held % pieces.count:
                logits = jnp.where(pieces.real(number), logits, -jnp.inf)
            place, here = pieces.find(wanted, number)
            return None, (jax.nn.logsumexp(logits, axis=-1), jnp.where(here, _picked(logits, place), 0))

        _, (parts, picked) = pieces.scan(one, None, table, name, states.dtype)
        picked = jnp.sum(picked, axis=0)
        if pieces.parts > 1:
            parts, picked = jax.lax.all_gather(parts, "tensor", tiled=True), whole(picked)
        total = jax.nn.logsumexp(parts, axis=0)
        nats, z = (jnp.sum(jnp.where(counted, y, 0)) for y in (total - picked, jnp.square(total)))
        return summed(Losses(nats, z, jnp.sum(counted, dtype=jnp.float32)))

    return on_devices(local, table, name, (states, labels), ALIKE)
