"""Rows: every prediction in exactly one, none across documents, whatever the packing."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3next.config import IGNORED_LABEL
from qwen3next.data.corpus import tokenize
from qwen3next.data.documents import Document, LeftOut, Part
from qwen3next.data.packing import Rows
from qwen3next.tokenizer import ByteTokenizer

END = ByteTokenizer.end_of_text
PACKINGS = ["split", "first_fit", "best_fit", "none"]


def _documents(lengths):
    """Documents of these lengths, the first third of each only read; neighbours differ at every place."""
    documents = []
    for n, length in enumerate(lengths):
        text = bytes((n * 7 + i * 3) % 251 for i in range(length))
        documents.append(Document(f"d{n}", (Part(text[: length // 3], learnt=False), Part(text[length // 3 :]))))
    return documents


def _corpus(lengths):
    return tokenize(_documents(lengths), ByteTokenizer(), 257, LeftOut("fail"))


def _expected(lengths):
    """For each document its (input, label, whether it is learnt), token by token."""
    expected = []
    for length, document in zip(lengths, _documents(lengths), strict=True):
        text = b"".join(part.text for part in document.parts)
        labels = [*text, END]
        learnt = [place >= length // 3 for place in range(len(labels))]
        expected.append(list(zip([END, *text], labels, learnt, strict=True)))
    return expected


def _segments(rows):
    """All rows' segments, each a list of (input, label or `IGNORED_LABEL`); checks shapes, order and padding."""
    segments = []
    for i in range(len(rows)):
        row = rows[i]
        assert set(row) == {"input_ids", "labels", "segment_ids"}
        assert all(value.dtype == np.int32 and value.shape == (rows.sequence_length,) for value in row.values())
        ids = row["segment_ids"]
        real = int((ids > 0).sum())
        assert (ids[real:] == 0).all() and (row["input_ids"][real:] == END).all()
        assert (row["labels"][real:] == IGNORED_LABEL).all()
        assert real and ids[0] == 1 and set(np.diff(ids[:real]).tolist()) <= {0, 1}
        for segment in range(1, ids.max() + 1):
            here = ids == segment
            segments.append(list(zip(row["input_ids"][here].tolist(), row["labels"][here].tolist(), strict=True)))
    return segments


def _check_rows(lengths, size, packing):
    """The rows' segments, put together again by document, are what each document must predict, once."""
    rows = Rows(_corpus(lengths), size, packing)
    wanted = [[(i, label if learnt else IGNORED_LABEL) for i, label, learnt in one] for one in _expected(lengths)]
    found = _segments(rows)
    pieces, cut = [], 0
    places = np.cumsum([0, *[len(one) for one in wanted]])
    for n, document in enumerate(wanted):
        first = size - places[n] % size if packing == "split" else size
        cuts = [0, *range(first, len(document), size), len(document)]
        pieces += [document[a:b] for a, b in pairwise(cuts)]
        cut += len(cuts) > 2
    assert sorted(found) == sorted(pieces)
    if packing in ("split", "none"):
        assert found == pieces
    if packing == "split":
        assert len(rows) == -(-sum(map(len, wanted)) // size)
    facts = rows.facts
    assert facts.tokens == sum(map(len, wanted)) and facts.lost_tokens == facts.dropped == 0
    assert facts.share == facts.tokens / (len(rows) * size) and facts.documents == len(lengths)
    assert rows.predictions == sum(label != IGNORED_LABEL for piece in pieces for _, label in piece)
    assert facts.cut == cut


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    "lengths", [[0], [1], [2], [6], [7], [0, 0, 0], [1, 0, 2], [6, 6], [7, 1], [5, 0, 30], [8] * 5, [40]]
)
@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_every_prediction_is_in_exactly_one_row(lengths, size, packing):
    _check_rows(lengths, size, packing)


@given(
    st.lists(st.integers(0, 3) | st.integers(0, 40), min_size=1, max_size=12),
    st.integers(1, 20),
    st.sampled_from(PACKINGS),
)
def test_every_prediction_is_in_exactly_one_row_of_any_corpus(lengths, size, packing):
    _check_rows(lengths, size, packing)


def _naive(sizes, room, best):
    """First-fit or best-fit, document by document."""
    rows = []
    for size in sizes:
        fit = [row for row in rows if sum(row) + size <= room]
        if not fit:
            rows.append([size])
        else:
            (max(fit, key=sum) if best else fit[0]).append(size)
    return sorted(map(sorted, rows))


@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
def test_documents_go_where_first_fit_and_best_fit_put_them(packing):
    lengths = np.random.default_rng(0).integers(0, 30, 200).tolist()
    rows = Rows(_corpus(lengths), 32, packing)
    found = [np.bincount(rows[i]["segment_ids"])[1:] for i in range(len(rows))]
    padded = [row[row > 0].tolist() for row in found]
    assert sorted(map(sorted, padded)) == _naive([n + 1 for n in lengths], 32, packing == "best_fit")
    assert rows.facts.share > 0.9 > Rows(_corpus(lengths), 32, "none").facts.share


@pytest.mark.parametrize("packing", ["first_fit", "best_fit", "none"])
def test_long_documents_are_cut_truncated_or_dropped_and_counted(packing):
    lengths = [3, 20, 7, 8, 30]  # 4, 21, 8, 9 and 31 tokens
    corpus, size = _corpus(lengths), 8
    facts = {long: Rows(corpus, size, packing, long).facts for long in ("split", "truncate", "drop")}
    assert [(f.cut, f.dropped, f.lost_tokens) for f in facts.values()] == [(3, 0, 0), (3, 0, 37), (0, 3, 61)]
    first = {label for segment in _segments(Rows(corpus, size, packing, "truncate")) for _, label in segment[:1]}
    assert first <= {IGNORED_LABEL, *[one[0][1] for one in _expected(lengths)]}
    kept = Rows(corpus, size, packing, "drop")
    assert sorted(map(len, _segments(kept))) == [4, 8]
    assert len(Rows(_corpus([20]), size, packing, "drop")) == 0


def test_rows_of_some_of_the_documents():
    lengths = [5, 9, 2, 14]
    some = _corpus(lengths).select([1, 3])
    whole = _segments(Rows(_corpus(lengths), 64, "none"))
    assert _segments(Rows(some, 64, "none")) == [whole[1], whole[3]]
    assert [place for segment in _segments(Rows(some, 6)) for place in segment] == whole[1] + whole[3]


def test_a_fingerprint_tells_all_that_rows_are_made_of():
    corpus, other = _corpus([5, 9, 2, 14]), _corpus([5, 9, 2, 14])
    plans = [Rows(corpus, 8, packing, long) for packing, long in (("split", "split"), ("best_fit", "split"))]
    plans += [Rows(corpus, 8, "best_fit", "drop"), Rows(corpus, 9), Rows(corpus.select([0, 1, 2]), 8)]
    plans += [Rows(dataclasses.replace(corpus, end_of_text=3), 8), Rows(_corpus([5, 9, 2, 13]), 8)]
    assert len({rows.fingerprint for rows in plans}) == len(plans)
    assert Rows(other, 8).fingerprint == plans[0].fingerprint


def test_rows_that_are_not_there():
    rows = Rows(_corpus([10]), 4)
    assert len(rows) == 3
    for index in (-1, 3):
        with pytest.raises(IndexError):
            rows[index]
    assert rows[np.int64(2)]["segment_ids"].tolist() == [1, 1, 1, 0]


def test_more_documents_than_rows_are_filled_side_by_side(monkeypatch):
    monkeypatch.setattr("qwen3next.data.packing._OPEN_ROWS", 4)
    lengths = np.random.default_rng(1).integers(0, 16, 300).tolist()
    _check_rows(lengths, 16, "best_fit")
    assert Rows(_corpus(lengths), 16, "best_fit").facts.share > 0.8
