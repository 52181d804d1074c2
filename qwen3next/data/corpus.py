"""The tokens of documents, one after another, and which of them are learnt."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from qwen3next.data.documents import Document, LeftOut
from qwen3next.errors import InputError, require
from qwen3next.tokenizer import Tokenizer

_TOGETHER = 1024  # documents tokenized together, on all cores


@runtime_checkable
class TokenArray(Protocol):
    """Tokens in memory or in files: what a NumPy array of one axis can do with a slice."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> Integer[np.ndarray, " tokens"]: ...


@dataclass(frozen=True)
class Corpus:
    """Document d is `tokens[spans[d, 0]:spans[d, 1]]`: what is to be predicted, its end of text included.

    A document's first token is predicted from an end of text, each other from the one before. `learnt` says for each
    token whether it counts (all do if `None`), `text_bytes` how many bytes of learnt text a document has (`None` if
    unknown), `digest` is a fingerprint of tokens and `learnt`.
    """

    tokens: TokenArray
    spans: Int64[np.ndarray, "documents 2"]
    learnt: TokenArray | None
    text_bytes: Int64[np.ndarray, " documents"] | None
    end_of_text: int
    digest: str

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def lengths(self) -> Int64[np.ndarray, " documents"]:
        """Tokens of each document."""
        return self.spans[:, 1] - self.spans[:, 0]

    def select(self, numbers: Sequence[int]) -> "Corpus":
        """The documents of these numbers; nothing is copied."""
        text_bytes = None if self.text_bytes is None else self.text_bytes[numbers]
        return dataclasses.replace(self, spans=self.spans[numbers], text_bytes=text_bytes)

    def cut(self, held_out: float) -> tuple["Corpus", "Corpus"]:
        """A single document in two, the second with the share asked for; how many bytes each has is then unknown."""
        ((begin, end),) = self.spans.tolist()
        require(end - begin >= 2, "data.held_out: the only document has one token; give more text")
        at = end - min(max(round(held_out * (end - begin)), 1), end - begin - 1)

        def part(*span: int) -> Corpus:
            return dataclasses.replace(self, spans=np.array([span], np.int64), text_bytes=None)

        return part(begin, at), part(at, end)


class Encoded(NamedTuple):
    """One document's tokens, end of text included; whether each is learnt, `None` if all are; bytes of learnt text."""

    tokens: Int32[np.ndarray, " tokens"]
    learnt: Bool[np.ndarray, " tokens"] | None
    text_bytes: int


def encode(
    documents: Iterable[Document], tokenizer: Tokenizer, vocab_size: int, left_out: LeftOut
) -> Iterator[Encoded | None]:
    """Each document as tokens, in order, read as they are asked for; `None` for one that is left out.

    Parts are tokenized by themselves, as a prompt is when it is given alone. Raises `InputError`, naming the document,
    for an id that is not below `vocab_size` and, unless such are left out, for text that the tokenizer cannot read.
    """
    documents = iter(documents)
    while group := list(islice(documents, _TOGETHER)):
        texts = [part.text for document in group for part in document.parts]
        try:
            encoded = iter(tokenizer.encode_batch(texts))
        except InputError:  # one of them: find out which
            encoded = None
        for document in group:
            try:
                tokens = [tokenizer.encode(part.text) if encoded is None else next(encoded) for part in document.parts]
            except InputError as error:
                left_out.fault("not UTF-8", InputError(f"data.source: {document.name}: {error}"))
                yield None
                continue
            yield _join(document, tokens, tokenizer.end_of_text, vocab_size)


def _join(document: Document, parts: list[np.ndarray], end_of_text: int, vocab_size: int) -> Encoded:
    tokens = np.concatenate([*parts, np.array([end_of_text], np.int32)])
    if (largest := int(tokens.max())) >= vocab_size:
        raise InputError(f"data.tokenizer: {document.name} has id {largest}; the vocabulary has {vocab_size} ids")
    learnt = None
    if not all(part.learnt for part in document.parts):
        flags = [np.full(len(part), of.learnt) for part, of in zip(parts, document.parts, strict=True)]
        flags.append(np.array([document.parts[-1].learnt]))  # the end of text goes with what it ends
        learnt = np.concatenate(flags)
    return Encoded(tokens, learnt, len(document.learnt_text))


def tokenize(documents: Sequence[Document], tokenizer: Tokenizer, vocab_size: int, left_out: LeftOut) -> Corpus:
    """The corpus of these documents, in memory. Raises `InputError` as `encode` does, or if none is left."""
    encoded = [one for one in encode(documents, tokenizer, vocab_size, left_out) if one is not None]
    require(bool(encoded), f"data.source: no document can be read (left out: {left_out}); at least one is needed")
    tokens, ends = np.concatenate([one.tokens for one in encoded]), np.cumsum([len(one.tokens) for one in encoded])
    learnt = None
    if any(one.learnt is not None for one in encoded):
        learnt = np.concatenate([np.full(len(t), True) if flags is None else flags for t, flags, _ in encoded])
    starts = np.concatenate([[0], ends[:-1]])
    spans = np.stack([starts, ends], axis=1).astype(np.int64)
    digest = hashlib.sha256(tokens.tobytes() + (b"" if learnt is None else learnt.tobytes())).hexdigest()
    text_bytes = np.array([one.text_bytes for one in encoded], np.int64)
    return Corpus(tokens, spans, learnt, text_bytes, tokenizer.end_of_text, digest)
