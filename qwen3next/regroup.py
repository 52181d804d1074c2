"""Stacked arrays moved from one cut of the layers into runs and cycles to another, layer by layer.

The published tensors' names hold a layer's number and nothing of the cut; so do the names used here.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from qwen3next.errors import require

Stacks = dict[str, Any]  # a stack's path to the numbers of its layers, nested lists in the shape of its leading axes


def _layers(path: str, stacks: Stacks) -> list[tuple[tuple[int, ...], str]]:
    """Where each layer lies in the array of this path, with its name; none for an array outside the layers."""
    for stack, numbers in stacks.items():
        before, found, inside = path.partition(f"{stack}.")
        if found:
            return [(at, f"{before}layers.{number}.{inside}") for at, number in np.ndenumerate(np.asarray(numbers))]
    return []


def regroup(
    arrays: Mapping[str, np.ndarray], old: Stacks, new: Stacks, wanted: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Arrays by path under the cut `old` as arrays by path under `new`, in the shapes of `wanted`.

    Raises `InputError` naming a layer's array that is missing or has another shape.
    """
    alone = {name: arrays[path][at] for path in arrays for at, name in _layers(path, old)}
    moved = {}
    for path, like in wanted.items():
        layers = _layers(path, new)
        if not layers:
            require(path in arrays, f"the saved state lacks {path}, which the config asks for")
            moved[path] = arrays[path]
            continue
        dtype = alone[layers[0][1]].dtype if layers[0][1] in alone else np.float32
        out = np.empty(like.shape, dtype)
        for at, name in layers:
            require(name in alone, f"the saved state lacks {name}, which the config asks for")
            shape, must = alone[name].shape, out[at].shape
            require(shape == must, f"the saved {name} is {list(shape)}; it must be {list(must)}")
            out[at] = alone[name]
        moved[path] = out
    return moved
