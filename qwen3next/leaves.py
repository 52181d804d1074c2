"""A model's leaves and the tensors that they are made of: what is wrong, and reading them one leaf at a time.

This is the one place where stacked leaves are joined from tensors, and cut into them.
"""

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from qwen3next.config import StoredDtype
from qwen3next.errors import require
from qwen3next.model import Qwen3Next
from qwen3next.tensor_files import CHUNK, FLOATS, Stored, read
from qwen3next.tree import leaf_path

ShardingRule = Callable[[str, tuple[int, ...]], Sharding | None]
_ALIGNMENT = 64  # bytes; what XLA asks for before it takes host memory as it is
_READERS = 4
_DECAY = ("A_log", "dt_bias")


class Leaf(NamedTuple):
    """One of our arrays: its path, and the names of its tensors in an array of the shape of its leading axes."""

    path: str
    shape: tuple[int, ...]
    tensors: np.ndarray

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return self.shape[self.tensors.ndim :]

    def parts(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Each index of the leading axes with its tensor's name."""
        for at in np.ndindex(self.tensors.shape):
            yield at, str(self.tensors[at])

    def cut(self, whole: Stored) -> Iterator[tuple[str, Stored]]:
        """The name of each tensor, and where it lies in a file that holds the leaf as one."""
        for at, name in self.parts():
            yield name, whole.part(at)


def leaves_by_path(model: Qwen3Next) -> list[Leaf]:
    """Each leaf of the (abstract) model as one tensor that is named by its path: a run's own spelling."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return [Leaf(leaf_path(path), leaf.shape, np.array(leaf_path(path), object)) for path, leaf in leaves]


def find_faults(place: Path, leaves: Iterable[Leaf], tensors: Mapping[str, Stored]) -> list[str]:
    """What keeps the tensors of a file or folder from being the leaves: missing, unknown, of a wrong shape or dtype."""
    faults, known = [], set()
    for leaf in leaves:
        for _, name in leaf.parts():
            known.add(name)
            if name not in tensors:
                faults.append(f"{place}: tensor {name} is missing; the config asks for it")
                continue
            file, inside, kind, shape, *_ = tensors[name]
            if shape != leaf.tensor_shape:
                faults.append(f"{file}: tensor {inside} is {shape}; it must be {leaf.tensor_shape}")
            if kind not in FLOATS:
                faults.append(f"{file}: tensor {inside} is of dtype {kind}; allowed: {', '.join(FLOATS)}")
    if unknown := [name for name in tensors if name not in known]:
        first = tensors[min(unknown)]
        faults.append(f"{first.file}: {len(unknown)} tensors have no place in the model, the first is {first.name}")
    return faults


def require_no(faults: list[str]) -> None:
    """Raises `InputError` with the first fault."""
    require(not faults, "".join(faults[:1]) + (f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""))


def leaf_dtype(leaf: Leaf, tensors: Mapping[str, Stored], dtype: StoredDtype | None = None) -> np.dtype:
    """A leaf's dtype: that asked for, float32 for decay parameters; else its tensors', or float32
    where they differ, which holds them all."""
    if dtype is not None:
        return np.dtype(np.float32 if leaf.path.endswith(_DECAY) else dtype)
    kinds = {tensors[name].kind for _, name in leaf.parts()}
    return FLOATS[kinds.pop()] if len(kinds) == 1 else FLOATS["F32"]


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that a device on the host can take as its own."""
    nbytes = math.prod(shape) * dtype.itemsize
    held = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -held.ctypes.data % _ALIGNMENT
    return held[start : start + nbytes].view(dtype).reshape(shape)


def read_leaf(
    leaf: Leaf, tensors: Mapping[str, Stored], dtype: np.dtype, index: tuple[slice, ...] | None = None, **reading: Any
) -> np.ndarray:
    """The leaf, or `leaf[index]`, joined on the host; `reading` are options of `tensor_files.read`.

    Nothing is read that a cut of the leading axes and of the first axis behind them leaves out.
    """
    full, lead = tuple(slice(n) for n in leaf.shape), leaf.tensors.ndim
    index = tuple(slice(*cut.indices(n)) for cut, n in zip(index or full, leaf.shape, strict=True))
    names, (rows, *rest) = np.asarray(leaf.tensors[index[:lead]]), index[lead:]
    whole = [cut.stop - cut.start for cut in rest] == list(leaf.tensor_shape[1:])
    out = _empty((*names.shape, *(cut.stop - cut.start for cut in (rows, *rest))), dtype)

    def read_part(at: tuple[int, ...]) -> None:
        stored = tensors[str(names[at])].rows(rows.start, rows.stop)
        target = out[at] if whole else np.empty(stored.shape, dtype)
        read(stored, target, **reading)
        if not whole:
            out[at] = target[(slice(None), *rest)]

    if out.nbytes < CHUNK:
        for at in np.ndindex(names.shape):
            read_part(at)
    else:  # copies from the page cache and a disk's queue both gain from company
        with ThreadPoolExecutor(_READERS) as readers:
            collections.deque(readers.map(read_part, np.ndindex(names.shape)), maxlen=0)
    return out


def load_leaves(
    skeleton: Qwen3Next,
    leaves: Iterable[Leaf],
    tensors: Mapping[str, Stored],
    dtype: StoredDtype | None = None,
    sharding: ShardingRule | None = None,
    **reading: Any,
) -> Qwen3Next:
    """The model of `skeleton`'s structure, one leaf at a time on the host; arguments as in `load_pretrained`."""
    arrays = []
    for leaf in leaves:
        kind = leaf_dtype(leaf, tensors, dtype)
        placed = sharding(leaf.path, leaf.shape) if sharding is not None else None
        if placed is None:
            array = jax.device_put(read_leaf(leaf, tensors, kind, **reading))
        else:
            array = _read_shards(leaf, tensors, kind, placed, reading)
        arrays.append(jax.block_until_ready(array))  # the host's copy goes before the next one comes
    return jax.tree.unflatten(jax.tree.structure(skeleton), arrays)


def _read_shards(
    leaf: Leaf, tensors: Mapping[str, Stored], dtype: np.dtype, sharding: Sharding, reading: dict[str, Any]
) -> jax.Array:
    """Each device's part, read once for all devices that hold the same."""
    held: dict[str, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        if str(index) not in held:
            held[str(index)] = read_leaf(leaf, tensors, dtype, index, **reading)
        return held[str(index)]

    return jax.make_array_from_callback(leaf.shape, sharding, part, dtype=dtype)
