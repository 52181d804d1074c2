"""Parameters, optimizer state and batch over one axis of devices (ZeRO, Rajbhandari et al. 2020; FSDP).

Each device holds a slice of every large array and its own rows of the batch. A layer's parameters are gathered where
the layer is computed and its gradients scattered again, so that no device ever holds a second layer's.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from qwen3next.tree import leaf_path, stacked_axes

AXIS = "fsdp"
ROWS, ALIKE = P(AXIS), P()
_SMALLEST = 2**16  # elements of one layer's array below which every device holds all of it


def fsdp_mesh(devices: Sequence[Any]) -> Mesh:
    """All devices along the one axis."""
    return Mesh(np.asarray(devices), (AXIS,), axis_types=(AxisType.Auto,))


def axis_size() -> int:
    """Devices along the axis of the mesh that is set, 1 without one."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(AXIS, 1)


def split_axis(shape: tuple[int, ...], devices: int) -> int | None:
    """The axis of one layer's array that is cut: the first that divides, for its slices stay whole in memory.

    `None` for a small array.
    """
    if math.prod(shape) < _SMALLEST or devices == 1:
        return None
    return next((axis for axis, size in enumerate(shape) if size % devices == 0), None)


def leaf_spec(path: str, shape: tuple[int, ...], devices: int) -> P:
    """How one array of a model or of its optimizer's state is cut."""
    stacked = stacked_axes(path)
    axis = split_axis(shape[stacked:], devices)
    return P() if axis is None else P(*[None] * (stacked + axis), AXIS)


def shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """A sharding for each array (or its shape) of a state."""

    def place(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, leaf_spec(leaf_path(path), leaf.shape, mesh.size))

    return jax.tree_util.tree_map_with_path(place, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over the axis."""
    return NamedSharding(mesh, ROWS)


def shard_rows(x: Array) -> Array:
    """Says that an activation's rows lie along the axis; nothing without a mesh."""
    return x if axis_size() == 1 else jax.lax.with_sharding_constraint(x, ROWS)


def summed(x: PyTree) -> PyTree:
    """A sum over a device's rows as the sum over all rows."""
    return x if axis_size() == 1 else jax.lax.psum(x, AXIS)


def over_rows(
    function: Callable[..., PyTree], module: PyTree, rows: PyTree, dtype: np.dtype, out_specs: PyTree
) -> PyTree:
    """`function(module, *rows)`, each device for its own rows, the module's arrays gathered there.

    Matrices are cast to `dtype` before they travel; their gradients come back as scattered sums. `out_specs` says which
    results are rows (`ROWS`) and which are alike everywhere (`ALIKE`). Without a mesh it is a plain call.
    """
    devices = axis_size()
    if devices == 1:
        return function(module, *rows)
    arrays, static = eqx.partition(module, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    axes = [split_axis(leaf.shape, devices) for leaf in leaves]
    specs = [leaf_spec("", leaf.shape, devices) for leaf in leaves]

    def gather(leaf: Array, axis: int | None) -> Array:
        return leaf if axis is None else jax.lax.all_gather(leaf.astype(dtype), AXIS, axis=axis, tiled=True)

    def local(leaves: list[Array], rows: PyTree) -> PyTree:
        whole = [gather(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]
        return function(eqx.combine(jax.tree.unflatten(structure, whole), static), *rows)

    row_specs = jax.tree.map(lambda leaf: ROWS if leaf.ndim else ALIKE, rows)
    mapped = jax.shard_map(local, in_specs=(specs, row_specs), out_specs=out_specs, check_vma=False)
    return mapped(leaves, rows)
