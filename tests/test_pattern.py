"""The cut of a layer order into prefix, cycle and remainder: nothing lost, nothing moved, the least to compile."""

from itertools import pairwise

import numpy as np
import pytest
from common import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3next.config import LayerKind, ModelConfig
from qwen3next.pattern import Pattern, Run, find_pattern

LINEAR, FULL = LayerKind("linear_attention", "moe"), LayerKind("full_attention", "moe")
LINEAR_DENSE, FULL_DENSE = LayerKind("linear_attention", "dense"), LayerKind("full_attention", "dense")
ORDERS = st.lists(st.sampled_from([LINEAR, FULL, LINEAR_DENSE, FULL_DENSE]), min_size=1, max_size=12)
# Few kinds, so that repetitions are common.
REPETITIVE = st.lists(st.sampled_from([LINEAR, FULL]), min_size=1, max_size=12)


def _kinds(pattern: Pattern) -> list[LayerKind]:
    """The layers that a pattern stands for, from its fields alone."""
    runs = (*pattern.prefix, *pattern.cycle * pattern.repeats, *pattern.remainder)
    return [run.kind for run in runs for _ in range(run.length)]


@given(ORDERS | REPETITIVE)
def test_nothing_is_dropped_or_moved(kinds):
    pattern = find_pattern(kinds)
    assert _kinds(pattern) == kinds
    assert pattern.cycle and pattern.repeats >= 1
    for runs in (pattern.prefix, pattern.cycle, pattern.remainder):
        assert all(run.length >= 1 for run in runs)
        assert all(one.kind != other.kind for one, other in pairwise(runs))


@given(ORDERS | REPETITIVE)
def test_the_cut_compiles_the_fewest_runs(kinds):
    """No cycle, whatever its place and length, leaves fewer runs: counted by trying them all."""

    def runs(part: list[LayerKind]) -> int:
        return sum(i == 0 or part[i] != part[i - 1] for i in range(len(part)))

    pattern, fewest = find_pattern(kinds), len(kinds)
    for start in range(len(kinds)):
        for size in range(1, len(kinds) - start + 1):
            end = start + size
            while kinds[end : end + size] == kinds[start : start + size]:
                end += size
            fewest = min(fewest, runs(kinds[:start]) + runs(kinds[start : start + size]) + runs(kinds[end:]))
    assert len(pattern.prefix) + len(pattern.cycle) + len(pattern.remainder) == fewest


@settings(deadline=None, max_examples=50)  # the first examples of a size compile
@given(ORDERS | REPETITIVE)
def test_group_and_flatten(kinds):
    """Each layer's value is where the scans will look for it, and comes back in its place."""
    pattern = find_pattern(kinds)
    # A tree a layer, as a cache or the parameters of one are: its structure depends on the kind.
    values = [{"index": np.int32(i), kind.mixer: np.full(2, i, np.float32)} for i, kind in enumerate(kinds)]
    grouped = pattern.group(values)
    flat = pattern.flatten(grouped)
    assert [int(value["index"]) for value in flat] == list(range(len(kinds)))
    assert [value.keys() for value in flat] == [value.keys() for value in values]
    assert all((value[kind.mixer] == i).all() for i, (value, kind) in enumerate(zip(flat, kinds, strict=True)))

    at = 0
    for runs, stacked in ((pattern.prefix, grouped.prefix), (pattern.remainder, grouped.remainder)):
        at = len(kinds) - sum(run.length for run in runs) if runs is pattern.remainder else 0
        for run, value in zip(runs, stacked, strict=True):
            assert value["index"].tolist() == list(range(at, at + run.length))
            at += run.length
    at = sum(run.length for run in pattern.prefix)
    size = sum(run.length for run in pattern.cycle)
    for run, value in zip(pattern.cycle, grouped.cycle, strict=True):
        assert value["index"].tolist() == [
            list(range(at + block * size, at + block * size + run.length)) for block in range(pattern.repeats)
        ]
        at += run.length


def test_published():
    pattern = find_pattern(ModelConfig().layer_kinds)
    assert pattern == Pattern((), (Run(LINEAR, 3), Run(FULL, 1)), 12, ())


@pytest.mark.parametrize(("layers", "repeats", "remainder"), [(4, 1, 0), (5, 1, 1), (6, 1, 2), (7, 1, 3), (10, 2, 2)])
def test_layers_that_do_not_fill_a_cycle_are_a_remainder(layers, repeats, remainder):
    pattern = find_pattern(tiny_config(num_hidden_layers=layers).layer_kinds)
    rest = (Run(LINEAR, remainder),) if remainder else ()
    assert pattern == Pattern((), (Run(LINEAR, 3), Run(FULL, 1)), repeats, rest)


def test_a_dense_first_layer_is_a_prefix():
    pattern = find_pattern(tiny_config(num_hidden_layers=9, mlp_only_layers=(0,)).layer_kinds)
    assert pattern.prefix[0] == Run(LINEAR_DENSE, 1)
    assert pattern.repeats == 2
    assert _kinds(pattern)[:5] == [LINEAR_DENSE, LINEAR, LINEAR, FULL, LINEAR]


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        (dict(full_attention_interval=2), [LINEAR, FULL, LINEAR, FULL]),
        (dict(full_attention_interval=1), [FULL] * 4),
        (dict(num_experts=0), [LINEAR_DENSE] * 3 + [FULL_DENSE]),
        (dict(decoder_sparse_step=2), [LINEAR_DENSE, LINEAR, LINEAR_DENSE, FULL]),
        (dict(mlp_only_layers=(1, 3)), [LINEAR, LINEAR_DENSE, LINEAR, FULL_DENSE]),
        (dict(layer_types=("full_attention", "linear_attention") * 2), [FULL, LINEAR] * 2),
        (dict(decoder_sparse_step=2, mlp_only_layers=(1,)), [LINEAR_DENSE, LINEAR_DENSE, LINEAR_DENSE, FULL]),
    ],
)
def test_layer_kinds(changes, kinds):
    assert list(tiny_config(**changes).layer_kinds) == kinds
