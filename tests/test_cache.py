"""Any way of cutting, padding and packing gives what each document gives alone and in one call. All with slow decay."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import tiny_config, tiny_model, tokens

from qwen3next.cache import AttentionCache, Cache, DeltaNetCache, empty_cache
from qwen3next.config import Compute
from qwen3next.errors import InputError
from qwen3next.loss import balance_loss
from qwen3next.model import Qwen3Next

LINEAR, FULL = "linear_attention", "full_attention"


@functools.cache
def _model() -> Qwen3Next:
    """Both mixers, and a run of two; dense, since experts see each token by itself."""
    return tiny_model(num_hidden_layers=3, layer_types=(LINEAR, LINEAR, FULL), num_experts=0)


@eqx.filter_jit
def _call(model: Qwen3Next, ids: jax.Array, segment_ids: jax.Array | None, cache: Cache | None) -> tuple[Any, Any]:
    hidden = model.hidden(ids, segment_ids, cache)
    return model.logits(hidden.states), hidden.cache


def _run(ids: Any, segment_ids: Any = None, cache: Cache | None = None) -> tuple[np.ndarray, Any]:
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    logits, cache = _call(_model(), jnp.asarray(ids, jnp.int32), segment_ids, cache)
    return np.asarray(logits), cache


def _empty(batch: int, capacity: int) -> Cache:
    return empty_cache(_model().config, batch, capacity)


def _close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * max(1.0, np.max(np.abs(expected))))


def _remembered(cache: Any, row: int) -> list[np.ndarray]:
    """What a row's cache holds of its last document, wherever the slots of its tokens lie."""
    held = np.asarray(cache.documents)[row]
    slots, found = (held == held.max()) & (held > 0), []
    for entry in cache.layers:
        if isinstance(entry, DeltaNetCache):
            found += [np.asarray(entry.state)[row], np.asarray(entry.conv)[row]]
        else:
            found += [np.asarray(entry.key)[row][:, slots], np.asarray(entry.value)[row][:, slots]]
    return found


def _same(cache: Any, row: int, other: Any, other_row: int = 0) -> None:
    for actual, expected in zip(_remembered(cache, row), _remembered(other, other_row), strict=True):
        _close(actual, expected)
    assert np.asarray(cache.count)[row] == np.asarray(other.count)[other_row]


# --- The cache itself


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_empty(dtype):
    config = tiny_config(num_hidden_layers=6, linear_conv_kernel_dim=5)
    cache = empty_cache(config, 3, 7, jnp.dtype(dtype))
    kinds = [DeltaNetCache] * 3 + [AttentionCache] + [DeltaNetCache] * 2
    assert [type(entry) for entry in cache.layers] == kinds
    for entry in cache.layers:
        shapes = {name: (leaf.shape, leaf.dtype.name) for name, leaf in vars(entry).items()}
        if isinstance(entry, DeltaNetCache):
            assert shapes == {"conv": ((3, 4, 2 * 16 + 64), dtype), "state": ((3, 4, 8, 16), "float32")}
        else:
            assert shapes == {name: ((3, 2, 7, 12), dtype) for name in ("key", "value")}
    rest = (cache.documents, cache.segment, cache.document, cache.count, cache.used)
    assert [leaf.shape for leaf in rest] == [(3, 7), (3,), (3,), (3,), ()]
    assert all(not leaf.any() for leaf in jax.tree.leaves(cache))


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_hidden_layers=6),
        dict(num_hidden_layers=5, layer_types=(FULL, LINEAR, FULL, LINEAR, FULL), mlp_only_layers=(0,), num_experts=4),
    ],
)
def test_each_entry_stays_with_its_layer(changes):
    """A call of nothing but padding, over a cache in which every layer has a value of its own."""
    model = tiny_model(**({"num_experts": 0} | changes))
    empty, numbers = empty_cache(model.config, 2, 9), jnp.array([5, 6], jnp.int32)
    marked = tuple(jax.tree.map(lambda leaf, i=i: leaf + (i + 1), entry) for i, entry in enumerate(empty.layers))
    cache = Cache(marked, empty.documents, segment=numbers, document=numbers, count=numbers, used=jnp.int32(3))
    _, after = _call(model, tokens(2, 4), jnp.zeros((2, 4), jnp.int32), cache)
    assert int(after.used) == 7 and not after.documents.any()
    for leaf in (after.segment, after.document, after.count):
        np.testing.assert_array_equal(leaf, numbers)
    for old, new in zip(marked, after.layers, strict=True):
        assert type(old) is type(new)
        for name, leaf in vars(new).items():
            leaf, before = np.asarray(leaf), np.asarray(getattr(old, name))
            if isinstance(new, AttentionCache):  # the padding's own slots are written, and masked for good
                leaf, before = (np.delete(y, range(3, 7), axis=2) for y in (leaf, before))
            np.testing.assert_array_equal(leaf, before)


def test_an_empty_cache_changes_nothing():
    ids = tokens(1, 37)
    _close(_run(ids, None, _empty(1, 40))[0], _run(ids)[0])


def test_overflow():
    ids, cache = tokens(1, 3), _empty(1, 5)
    with pytest.raises(InputError, match="6 tokens do not fit into the cache: 0 of its 5 slots are used"):
        _run(tokens(1, 6), None, cache)  # known from the shapes, even under jit
    logits, cache = _run(ids, None, cache)
    assert np.isfinite(logits).all()
    with pytest.raises(InputError, match="3 tokens do not fit into the cache: 3 of its 5 slots are used"):
        _model().hidden(ids, None, cache)
    logits, _ = _run(ids, None, cache)
    assert np.isnan(logits).all()


# --- Pieces of a prompt

PROMPT = tokens(1, 37)


@functools.cache
def _whole() -> tuple[np.ndarray, Any]:
    return _run(PROMPT, None, _empty(1, 40))


def _in_pieces(pieces: list[int]) -> tuple[np.ndarray, Any]:
    cache, start, logits = _empty(1, 40), 0, []
    for length in pieces:
        out, cache = _run(PROMPT[:, start : start + length], None, cache)
        logits.append(out)
        start += length
    assert start == 37
    return np.concatenate(logits, axis=1), cache


@pytest.mark.parametrize(
    "pieces",
    [
        *([split, 37 - split] for split in (1, 2, 3, 16, 21, 34, 35, 36)),
        [1] * 37,
        [2] * 18 + [1],
        [3] * 12 + [1],
        [1, 2, 34],
        [34, 1, 2],
        [16, 3, 2, 16],
        [1, 1, 1, 34],
        [3, 2, 1, 1, 2, 3, 21, 3, 1],
    ],
    ids=lambda pieces: "+".join(map(str, pieces[:4])),
)
def test_pieces_equal_the_whole(pieces):
    """Also shorter than the convolution: one to three tokens."""
    logits, cache = _in_pieces(pieces)
    _close(logits, _whole()[0])
    _same(cache, 0, _whole()[1])


@pytest.mark.parametrize("sides", [("right", "left"), ("left", "right")])
@pytest.mark.parametrize("length", [37, 130])
def test_every_split(length, sides):
    """All places at once, a row each, both pieces padded to one width."""
    ids, width = np.asarray(tokens(1, length))[0], length + 3
    splits = range(1, length)
    logits, cache = _run(ids[None], None, _empty(1, length))
    both, after = [], _empty(len(splits), 2 * width)
    for piece, side in enumerate(sides):
        padded, real = np.full((2, len(splits), width), 0, np.int32)
        for row, split in enumerate(splits):
            part = ids[split:] if piece else ids[:split]
            at = slice(0, len(part)) if side == "right" else slice(width - len(part), width)
            padded[row, at], real[row, at] = part, 1
        out, after = _run(padded, real, after)
        both.append([out[row][real[row] > 0] for row in range(len(splits))])
    for row, split in enumerate(splits):
        _close(np.concatenate([both[0][row], both[1][row]]), logits[0])
        assert len(both[0][row]) == split
        _same(after, row, cache)


@pytest.mark.parametrize("length", [63, 64, 65, 129])
def test_lengths_at_the_edge_of_a_chunk(length):
    """One row and all, against the same tokens at the head of a longer, padded row."""
    ids = np.asarray(tokens(1, 130))
    logits, cache = _run(ids[:, :length], None, _empty(1, 130))
    longer, other = _run(np.pad(ids[:, :length], ((0, 0), (3, 130 - length))), _head(length), _empty(1, 133))
    _close(logits[0], longer[0, 3 : 3 + length])
    _same(cache, 0, other)


def _head(length: int) -> np.ndarray:
    return np.pad(np.ones((1, length), np.int32), ((0, 0), (3, 130 - length)))


# --- Padding

PADS = [0, 1, 3, 4, 5, 2]  # before a prompt of 21 tokens; a last row is nothing but padding


def _padded(pad_id: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids, and 1 at a real token; what is missing to the width of 26 is padding on the right as well."""
    ids, real = np.full((len(PADS) + 1, 26), pad_id), np.zeros((len(PADS) + 1, 26), int)
    for row, before in enumerate(PADS):
        ids[row, before : before + 21], real[row, before : before + 21] = PROMPT[0, :21], 1
    return ids, real


def test_padding_changes_nothing_and_rows_go_on_alike():
    bare, bare_cache = _run(PROMPT[:, :21], None, _empty(1, 40))
    ids, real = _padded()
    logits, cache = _run(ids, real, _empty(len(ids), 40))
    for row in range(len(PADS)):
        _close(logits[row][real[row] > 0], bare[0])
        _same(cache, row, bare_cache)
    # With and without segment ids, and left-padded anew: the rest of the same document.
    following = np.asarray(PROMPT[:, 21:24])
    expected, expected_cache = _run(following, None, bare_cache)
    rows = len(ids)
    padded = np.pad(np.repeat(following, rows, 0), ((0, 0), (23, 0)))
    for more, segments in (
        (np.repeat(following, rows, 0), None),
        (padded, np.pad(np.ones((rows, 3)), ((0, 0), (23, 0)))),
    ):
        out, after = _run(more, segments, _with_room(cache))
        for row in range(len(PADS)):
            _close(out[row, -3:], expected[0])
            _same(after, row, expected_cache)
        alone, alone_cache = _run(following, None, _empty(1, 40))
        _close(out[-1, -3:], alone[0])  # the row of padding alone begins here
        _same(after, rows - 1, alone_cache)


def _with_room(cache: Any) -> Any:
    """The same with as many slots again."""

    def wider(leaf: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(leaf, [(0, size if at == axis else 0) for at, size in enumerate(leaf.shape)])

    layers = [
        jax.tree.map(lambda leaf: wider(leaf, 2), entry) if isinstance(entry, AttentionCache) else entry
        for entry in cache.layers
    ]
    return eqx.tree_at(lambda c: (c.layers, c.documents), cache, (tuple(layers), wider(cache.documents, 1)))


def test_the_padding_token_does_not_matter():
    """Not in a bit of a real token's logits, nor of what is remembered."""
    (ids, real), (others, _) = _padded(0), _padded(63)
    first, second = _run(ids, real, _empty(len(ids), 40)), _run(others, real, _empty(len(ids), 40))
    np.testing.assert_array_equal(first[0][real > 0], second[0][real > 0])
    for row in range(len(PADS)):
        for one, other in zip(_remembered(first[1], row), _remembered(second[1], row), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_row_of_padding_is_finite_and_leaves_no_trace():
    ids, real = _padded()
    logits, cache = _run(ids, real, _empty(len(ids), 40))
    assert np.isfinite(logits).all()
    assert not real[-1].any() and not cache.documents[-1].any() and not cache.count[-1]
    for entry in cache.layers:
        if isinstance(entry, DeltaNetCache):
            assert not entry.state[-1].any() and not entry.conv[-1].any()


# --- Packing

DOCUMENTS = [37, 51, 40]
# Boundaries at the edge of a chunk of 64, next to it, and documents of one and two tokens.
PACKED = [
    DOCUMENTS,
    [63, 65],
    [64, 64],
    [65, 63],
    [62, 1, 65],
    [63, 1, 1, 63],
    [62, 2, 64],
    [127, 1],
    [1, 127],
    [2, 1, 125],
    [64, 1, 63],
    [3, 5, 120],
]


def _segments(lengths: list[int]) -> np.ndarray:
    """Neighbours differ; ids come back later in the row, as they may."""
    return np.concatenate([np.full(length, 1 + place % 2) for place, length in enumerate(lengths)])


def _rows(ids: np.ndarray, segments: np.ndarray) -> tuple[np.ndarray, Any]:
    """A call of rows of 128, filled up to 16 with padding: one shape to compile."""
    missing = ((0, 16 - len(ids)), (0, 0))
    return _run(np.pad(ids, missing), np.pad(segments, missing), _empty(16, 128))


def test_packed_documents_equal_separate_ones():
    ids = np.asarray(tokens(len(PACKED), 128, seed=3))
    logits, cache = _rows(ids, np.stack([_segments(lengths) for lengths in PACKED]))
    single = [(row, start, stop) for row, lengths in enumerate(PACKED) for start, stop in _spans(lengths)]
    for first in range(0, len(single), 16):
        alone, real = np.zeros((2, 16, 128), int)
        for place, (row, start, stop) in enumerate(single[first : first + 16]):
            alone[place, : stop - start], real[place, : stop - start] = ids[row, start:stop], 7
        expected, expected_cache = _rows(alone, real)
        for place, (row, start, stop) in enumerate(single[first : first + 16]):
            _close(logits[row, start:stop], expected[place, : stop - start])
            if stop == 128:
                _same(cache, row, expected_cache, place)


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    ends = np.cumsum(lengths).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def test_a_document_does_not_see_the_one_before_in_any_bit():
    ids, segments = np.asarray(tokens(1, 128, seed=3)), _segments(DOCUMENTS)[None]
    changed = ids.copy()
    changed[0, 36] = (changed[0, 36] + 1) % 64
    (before, old), (after, new) = _rows(ids, segments), _rows(changed, segments)
    np.testing.assert_array_equal(before[0, :36], after[0, :36])
    assert np.abs(before[0, 36] - after[0, 36]).max() > 0.1
    np.testing.assert_array_equal(before[0, 37:], after[0, 37:])
    for one, other in zip(_remembered(old, 0), _remembered(new, 0), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("width", [16, 21])
def test_packed_rows_in_pieces(width):
    """Pieces end inside documents, at their ends, and after one or two of their tokens."""
    ids = np.asarray(tokens(len(PACKED), 128, seed=3))
    segments = np.stack([_segments(lengths) for lengths in PACKED])
    expected, expected_cache = _rows(ids, segments)
    cache, parts = _empty(16, 147), []
    for start in range(0, 128, width):
        piece = np.zeros((2, 16, width), int)
        piece[0, :12, : min(width, 128 - start)] = ids[:, start : start + width]
        piece[1, :12, : min(width, 128 - start)] = segments[:, start : start + width]
        out, cache = _run(piece[0], piece[1], cache)
        parts.append(out)
    logits = np.concatenate(parts, axis=1)
    for row, lengths in enumerate(PACKED):
        _close(logits[row, :128], expected[row])
        _same(cache, row, expected_cache, row)
        assert np.asarray(cache.count)[row] == lengths[-1]


@pytest.mark.parametrize("last", [1, 2, 3, 20])
def test_going_on_after_packed_documents(last):
    """Without segment ids the tokens belong to the last document, and see nothing of the one before it."""
    ids = np.asarray(PROMPT)
    segments = np.repeat([[1, 2]], [21 - last, last], axis=1)
    logits, cache = _run(ids[:, :21], segments, _empty(1, 40))
    more = ids[:, 21:24]
    out, _ = _run(more, None, cache)
    alone = np.pad(ids[:, 21 - last : 21], ((0, 0), (0, 21 - last)))
    expected, alone_cache = _run(alone, np.pad(np.ones((1, last)), ((0, 0), (0, 21 - last))), _empty(1, 40))
    _close(logits[:, 21 - last :], expected[:, :last])
    _close(out, _run(more, None, alone_cache)[0])


# --- Gradients


@pytest.fixture(scope="module")
def slopes():
    """Gradient of what chosen tokens predict, for the documents [37, 51, 40], a left-padded row and one of padding.

    Each document and the padding have ids of their own, so that a row of the embedding's gradient is theirs alone.
    """
    model = tiny_model(num_hidden_layers=2, layer_types=(LINEAR, FULL))
    ids = np.full((3, 128), 63)
    ids[0] = np.concatenate([15 * place + np.arange(length) % 15 for place, length in enumerate(DOCUMENTS)])
    ids[1, 5:] = 45 + np.arange(123) % 15
    segments = np.stack([np.repeat([1, 2, 3], DOCUMENTS), np.arange(128) >= 5, np.zeros(128)]).astype(np.int32)
    arrays = jnp.asarray(ids, jnp.int32), jnp.asarray(segments)

    @jax.jit
    def gradient(weights: jax.Array, balance: jax.Array) -> Qwen3Next:
        def loss(model: Qwen3Next) -> jax.Array:
            hidden = model.hidden(*arrays, compute=Compute(dispatch="dense"))
            predicted = jnp.sum(weights[..., None] * jnp.sin(model.logits(hidden.states)))
            return predicted + balance * balance_loss(hidden.router)

        return jax.grad(loss)(model)

    return lambda chosen, balance: gradient(jnp.asarray(chosen & (segments > 0), jnp.float32), jnp.float32(balance))


def test_padding_has_no_gradient(slopes):
    gradient = slopes(np.ones((3, 128), bool), 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    embedding, head = np.asarray(gradient.embed_tokens.weight), np.asarray(gradient.lm_head.weight)
    assert not embedding[60:].any()
    assert embedding[:60].any(axis=1).all() and head.any(axis=1).all()


def test_a_documents_loss_has_no_gradient_at_another(slopes):
    third = np.zeros((3, 128), bool)
    third[0, 88:] = True
    gradient = np.asarray(slopes(third, 0).embed_tokens.weight)
    assert gradient[30:45].any(axis=1).all()  # its own
    assert not gradient[:30].any() and not gradient[45:].any()
