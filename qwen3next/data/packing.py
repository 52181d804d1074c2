"""Which piece of which document goes into which row: planned once, so that row i is a function of i alone.

Documents of a row do not see each other, so it does not matter which are together: the plan is the same in each epoch,
and an epoch is an order of the rows.
"""

import hashlib
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, SupportsIndex

import grain
import numpy as np
from grain.experimental import BestFitPackIterDataset, FirstFitPackIterDataset
from jaxtyping import Bool, Int32, Int64

from qwen3next.config import IGNORED_LABEL, LongDocuments, PackingKind
from qwen3next.data.corpus import Corpus

# Keys: `input_ids`; `labels` (the next token, or `IGNORED_LABEL`); `segment_ids` (1, 2, .. by document, 0 for padding).
Row = dict[str, Int32[np.ndarray, " seq"]]

_OPEN_TOKENS, _OPEN_ROWS = 2**22, 1024  # rows that are filled side by side: at most so many tokens, so many rows


@dataclass(frozen=True)
class RowFacts:
    """What became of documents: how many there are, were cut into several rows or truncated, were dropped."""

    documents: int
    cut: int
    dropped: int
    tokens: int  # in rows
    lost_tokens: int  # of dropped and truncated documents
    share: float  # of the rows' places that hold a token


class _Pieces(NamedTuple):
    """Documents in pieces: where each lies, whether a document begins with it, and how many documents have several."""

    spans: Int64[np.ndarray, "pieces 2"]
    opens: Bool[np.ndarray, " pieces"]
    cut: int


def _cut(spans: Int64[np.ndarray, "documents 2"], length: int, first: Int64[np.ndarray, " documents"]) -> _Pieces:
    """Pieces of at most `length`; of document d the first has at most `first[d]` tokens."""
    sizes = spans[:, 1] - spans[:, 0]
    counts = 1 + np.maximum(-(-(sizes - first) // length), 0)
    document = np.repeat(np.arange(len(spans)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.where(number == 0, 0, first[document] + (number - 1) * length)
    ends = np.minimum(first[document] + number * length, sizes[document])
    return _Pieces(spans[document, :1] + np.stack([begins, ends], axis=1), number == 0, int((counts > 1).sum()))


def _fit(sizes: Int64[np.ndarray, " pieces"], length: int, packing: PackingKind) -> list[Int64[np.ndarray, " members"]]:
    """The numbers of the pieces in each row, by grain's online packing (about 50 microseconds a piece)."""
    pack = FirstFitPackIterDataset if packing == "first_fit" else BestFitPackIterDataset
    rows = [np.array([piece]) for piece in np.flatnonzero(sizes == length)]
    shorter, filling = np.flatnonzero(sizes < length), np.zeros(length, np.int8)
    if not len(shorter):
        return rows

    def element(number: int) -> dict[str, Any]:
        return {"tokens": filling[: sizes[shorter[number]]], "piece": int(shorter[number])}

    pieces = grain.MapDataset.range(len(shorter)).map(element)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    packed = pack(
        pieces.to_iter_dataset(options),
        length_struct={"tokens": length},
        num_packing_bins=min(max(_OPEN_TOKENS // length, 16), _OPEN_ROWS, len(shorter)),
        shuffle_bins=False,
        meta_features=("piece",),
    )
    return rows + [np.array(row["piece"]) for row in packed]


class Rows(grain.sources.RandomAccessDataSource[Row]):
    """The rows of a corpus, each token of it predicted in exactly one of them, unless it is dropped.

    Where `labels` holds a token, `input_ids` holds the one before it, an end of text for a document's first. A piece of
    a document is a segment of its own; what is left of a row is padding: `end_of_text` in segment 0. Raises
    `IndexError` for a row that is not there.
    """

    def __init__(
        self,
        corpus: Corpus,
        sequence_length: int,
        packing: PackingKind = "split",
        long_documents: LongDocuments = "split",
    ):
        spans, sizes, length, truncated = corpus.spans, corpus.lengths, sequence_length, 0
        if packing == "split":
            places = np.cumsum(sizes) - sizes  # in the concatenation
            pieces, opens, cut = _cut(spans, length, length - places % length)
            ends = np.cumsum(pieces[:, 1] - pieces[:, 0])
            # A row ends with the piece that reaches a multiple of its length, or with the last one.
            rows = np.flatnonzero((ends % length == 0) | (np.arange(len(ends)) == len(ends) - 1)) + 1
        else:
            if long_documents == "drop":
                spans = spans[sizes <= length]
            elif long_documents == "truncate":
                truncated = int((sizes > length).sum())
                spans = np.stack([spans[:, 0], np.minimum(spans[:, 1], spans[:, 0] + length)], axis=1)
            pieces, opens, cut = _cut(spans, length, np.full(len(spans), length))
            rows = np.arange(1, len(pieces) + 1)
            if packing != "none" and len(pieces):
                members = _fit(pieces[:, 1] - pieces[:, 0], length, packing)
                order, rows = np.concatenate(members), np.cumsum([len(row) for row in members])
                pieces, opens = pieces[order], opens[order]
        self.corpus, self.sequence_length = corpus, length
        self._pieces: Int64[np.ndarray, "pieces 2"] = pieces
        self._opens: Bool[np.ndarray, " pieces"] = opens
        self._rows: Int64[np.ndarray, " bounds"] = np.concatenate([[0], rows]).astype(np.int64)
        tokens = int((pieces[:, 1] - pieces[:, 0]).sum())
        self.facts = RowFacts(
            documents=len(corpus),
            cut=cut + truncated,
            dropped=len(corpus) - len(spans),
            tokens=tokens,
            lost_tokens=int(sizes.sum()) - tokens,
            share=tokens / max(len(self) * length, 1),
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that rows are made of: tokens, what of them is learnt, and the plan."""
        plan = self._pieces.tobytes() + self._opens.tobytes() + self._rows.tobytes()
        corpus = f"{self.corpus.digest} {self.corpus.end_of_text} {self.sequence_length} "
        return hashlib.sha256(corpus.encode() + plan).hexdigest()

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, index: SupportsIndex) -> Row:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row, at = self.padding(), 0
        for segment, piece in enumerate(range(self._rows[index], self._rows[index + 1]), start=1):
            begin, end = self._pieces[piece].tolist()
            to, opens = at + end - begin, self._opens[piece]
            row["labels"][at:to] = self.corpus.tokens[begin:end]
            row["input_ids"][at + opens : to] = self.corpus.tokens[begin - 1 + opens : end - 1]
            row["segment_ids"][at:to] = segment
            if self.corpus.learnt is not None:
                row["labels"][at:to][self.corpus.learnt[begin:end] == 0] = IGNORED_LABEL
            at = to
        return row

    def padding(self) -> Row:
        """A row of nothing but padding."""
        filling = {"input_ids": self.corpus.end_of_text, "labels": IGNORED_LABEL, "segment_ids": 0}
        return {key: np.full(self.sequence_length, value, np.int32) for key, value in filling.items()}

    @cached_property
    def predictions(self) -> int:
        """Labels of all rows that count."""
        if self.corpus.learnt is None:
            return self.facts.tokens
        return sum(int(np.count_nonzero(self.corpus.learnt[begin:end])) for begin, end in self._pieces.tolist())
