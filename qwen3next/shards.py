"""A function on what each device holds of a module and of the rows, and what it says to the other devices.

`jax.shard_map` with every axis manual: nothing is left to a partitioner, and each collective stands where it is called.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from qwen3next.mesh import ALIKE, ROW_AXES, ROWS, Cuts, axis_sizes, is_expert, leaf_cuts, row_shards
from qwen3next.tree import leaf_path


def summed(x: PyTree) -> PyTree:
    """A sum over a device's rows as the sum over all rows."""
    return x if row_shards(axis_sizes()) == 1 else jax.lax.psum(x, ROW_AXES)


def whole(x: Array) -> Array:
    """A partial result, of this device's heads or widths, as the sum over all of them."""
    return x if axis_sizes()["tensor"] == 1 else jax.lax.psum(x, "tensor")


def own_part(x: Array, axis: int) -> Array:
    """This device's part of an axis of heads (or of channels that are theirs) that it holds whole."""
    parts = axis_sizes()["tensor"]
    if parts == 1:
        return x
    size = x.shape[axis] // parts
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("tensor") * size, size, axis)


def _own_key(leaf: Array) -> Array:
    """A random key as one for this device's rows; any other array as it is."""
    return (
        jax.random.fold_in(leaf, jax.lax.axis_index(ROW_AXES))
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
    )


@jax.custom_vjp
def _apart(leaf: Array, anchor: Array) -> Array:
    """One layer's array, which no cast of all layers' can be merged with, and its gradient in the array's own layout.

    A compiler that chooses another one copies all layers' gradients at once.
    """
    return leaf * jnp.where(anchor == anchor, 1, jnp.nan).astype(leaf.dtype)


def _apart_backward(_: None, cotangent: Array) -> tuple[Array, None]:
    return with_layout_constraint(jax.lax.optimization_barrier(cotangent), Layout(tuple(range(cotangent.ndim)))), None


_apart.defvjp(lambda leaf, anchor: (_apart(leaf, anchor), None), _apart_backward)


@dataclass(frozen=True)
class Shards:
    """A module with this device's shards for its arrays, and how each is cut; `None` without a mesh."""

    module: PyTree
    cuts: list[Cuts] | None

    def gather(self, dtype: np.dtype, anchor: Array | None = None, stay: Collection[str] = ()) -> PyTree:
        """The module, its arrays gathered but along `tensor` and, of routed experts, the axes that `stay`.

        What travels is cast to `dtype` before, if that is narrower, and its gradient comes back as a scattered sum.
        `anchor`, an activation of the loop that this stands in, keeps what is done with the arrays inside the loop.
        """
        if self.cuts is None:
            return self.module
        arrays, static = eqx.partition(self.module, eqx.is_array)
        paths, structure = jax.tree_util.tree_flatten_with_path(arrays)
        tied = jnp.float32(0) if anchor is None else jax.lax.stop_gradient(anchor.reshape(-1)[0])

        def gathered(path: str, leaf: Array, cuts: Cuts) -> Array:
            kept = ("tensor", *(stay if is_expert(path) else ()))
            if any(cuts):
                leaf = _apart(leaf, tied)
            for axis, names in enumerate(cuts):
                travel = tuple(name for name in names if name not in kept)
                if travel:
                    leaf = leaf.astype(dtype) if leaf.dtype.itemsize > dtype.itemsize else leaf
                for one in reversed(travel):  # large groups a TPU's compiler serves by sums of whole arrays
                    leaf = jax.lax.all_gather(leaf, one, axis=axis, tiled=True)
            return leaf

        leaves = [gathered(leaf_path(path), leaf, cuts) for (path, leaf), cuts in zip(paths, self.cuts, strict=True)]
        return eqx.combine(jax.tree.unflatten(structure, leaves), static)


def on_devices(function: Callable[..., PyTree], module: PyTree, name: str, rows: PyTree, out_specs: PyTree) -> PyTree:
    """`function(shards, *rows)` on each device, with its `Shards` of the module and its own rows.

    `name` is what the paths of the module's leaves begin with. `out_specs` says which results are rows (`ROWS`) and
    which are one value a head (`HEADS`) or alike everywhere (`ALIKE`); rows are the first axis of all that has one.
    Without a mesh it is a plain call.
    """
    sizes = axis_sizes()
    if math.prod(sizes.values()) == 1:
        return function(Shards(module, None), *rows)
    arrays, static = eqx.partition(module, eqx.is_array)
    paths, structure = jax.tree_util.tree_flatten_with_path(arrays)
    cuts = [leaf_cuts(f"{name}.{leaf_path(path)}", leaf.shape, sizes) for path, leaf in paths]

    def local(leaves: list[Array], rows: PyTree) -> PyTree:
        leaves = [_own_key(leaf) for leaf in leaves]
        own = eqx.combine(jax.tree.unflatten(structure, leaves), static)
        return function(Shards(own, cuts), *rows)

    specs = [P(*(names or None for names in one)) for one in cuts]
    row_specs = jax.tree.map(lambda leaf: ROWS if leaf.ndim else ALIKE, rows)
    mapped = jax.shard_map(local, in_specs=(specs, row_specs), out_specs=out_specs, check_vma=False)
    return mapped([leaf for _, leaf in paths], rows)
