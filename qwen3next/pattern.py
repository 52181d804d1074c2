"""The order of layer kinds, cut into a prefix, a repeated cycle and a remainder, and each of these into runs."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from qwen3next.config import LayerKind


class Run(NamedTuple):
    """`length` neighbouring layers of one kind."""

    kind: LayerKind
    length: int


class Grouped(NamedTuple):
    """A value for each layer, stacked as the decoder scans: by run, and the cycle's runs by block as well."""

    prefix: tuple[PyTree, ...]
    cycle: tuple[PyTree, ...]
    remainder: tuple[PyTree, ...]


def _runs(kinds: Sequence[LayerKind]) -> tuple[Run, ...]:
    return tuple(Run(kind, len(list(group))) for kind, group in groupby(kinds))


def _stack(values: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)


def _stack_runs(runs: tuple[Run, ...], values: Sequence[PyTree]) -> tuple[PyTree, ...]:
    values, stacked = list(values), []
    for run in runs:
        stacked.append(_stack(values[: run.length]))
        del values[: run.length]
    return tuple(stacked)


def _unstack(value: PyTree, length: int) -> list[PyTree]:
    return [jax.tree.map(lambda leaf, i=i: leaf[i], value) for i in range(length)]


def _unstack_runs(runs: tuple[Run, ...], values: tuple[PyTree, ...]) -> list[Any]:
    return [item for run, value in zip(runs, values, strict=True) for item in _unstack(value, run.length)]


class Pattern(NamedTuple):
    """`prefix`, then `repeats` times `cycle`, then `remainder`. The published model: 12 x [3 deltanet, 1 attention]."""

    prefix: tuple[Run, ...]
    cycle: tuple[Run, ...]
    repeats: int
    remainder: tuple[Run, ...]

    def group(self, values: Sequence[PyTree]) -> Grouped:
        """One value a layer, in layer order, to the form that the scans take."""
        before, size = (sum(run.length for run in runs) for runs in (self.prefix, self.cycle))
        end = before + self.repeats * size
        blocks = [_stack_runs(self.cycle, values[at : at + size]) for at in range(before, end, size)]
        return Grouped(
            _stack_runs(self.prefix, values[:before]), _stack(blocks), _stack_runs(self.remainder, values[end:])
        )

    def flatten(self, grouped: Grouped) -> list[Any]:
        """The inverse of `group`."""
        blocks = _unstack(grouped.cycle, self.repeats)
        cycle = [item for block in blocks for item in _unstack_runs(self.cycle, block)]
        return [
            *_unstack_runs(self.prefix, grouped.prefix),
            *cycle,
            *_unstack_runs(self.remainder, grouped.remainder),
        ]

    def layer_numbers(self) -> dict[str, Any]:
        """Which layers each stack of a model holds: its path, and nested lists in the shape of its leading axes."""
        cycle = sum(run.length for run in self.cycle)
        outside = sum(run.length for run in (*self.prefix, *self.remainder))
        with jax.ensure_compile_time_eval():  # these are numbers, also while a program is traced
            grouped = self.group([np.int32(number) for number in range(outside + self.repeats * cycle)])
        places = {"prefix": grouped.prefix, "cycles.modules": grouped.cycle, "remainder": grouped.remainder}
        return {
            f"decoder.{place}.runs.{number}.modules": np.asarray(layers).tolist()
            for place, runs in places.items()
            for number, layers in enumerate(runs)
        }


def find_pattern(kinds: Sequence[LayerKind]) -> Pattern:
    """The cut with the fewest runs to compile: no order is refused, no layer moved.

    Among equals the earliest cycle wins, then one whose remainder begins another cycle, then the shortest.
    """
    total = len(kinds)
    best: tuple[tuple[int, int, bool, int], Pattern] | None = None
    for start in range(total):
        for size in range(1, total - start + 1):
            cycle = tuple(kinds[start : start + size])
            repeats = 1
            while tuple(kinds[start + repeats * size : start + (repeats + 1) * size]) == cycle:
                repeats += 1
            rest = tuple(kinds[start + repeats * size :])
            pattern = Pattern(_runs(kinds[:start]), _runs(cycle), repeats, _runs(rest))
            runs = len(pattern.prefix) + len(pattern.cycle) + len(pattern.remainder)
            rank = (runs, start, rest != cycle[: len(rest)], size)
            if best is None or rank < best[0]:
                best = (rank, pattern)
    assert best is not None
    return best[1]
