"""Text to batches: documents, a held-out split, one flat run of tokens, rows of it, and a grain pipeline over the rows.

A document is stored as `[end_of_text] + tokens + [end_of_text]`, so that each of its tokens is predicted once and the
model learns to stop. Rows are cut from the concatenation and overlap by one token: a prediction is in exactly one row.
"""

import dataclasses
import glob
import hashlib
import json
import operator
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex

import grain
import numpy as np
from jaxtyping import Int32, Int64

from qwen3next.config import IGNORED_LABEL, DataConfig
from qwen3next.docstrings import read_docstrings
from qwen3next.errors import InputError
from qwen3next.tokenizer import Tokenizer

# Keys: `input_ids`; `labels` (the next token, or `IGNORED_LABEL`); `segment_ids` (1, 2, .. by document, 0 for padding).
Row = dict[str, Int32[np.ndarray, " seq"]]
Batch = dict[str, Int32[np.ndarray, "batch seq"]]


@dataclass(frozen=True)
class Document:
    """One text and the name that errors call it by: a file, or `file:line` of a JSONL file.

    What stands in `prompt`, before the text, is read and not learnt.
    """

    name: str
    text: bytes
    prompt: bytes = b""


def read_documents(config: DataConfig) -> list[Document]:
    """The documents that `data.source` names, one a file or one a JSONL line, in the order of their paths and lines.

    Empty texts and, in a folder, hidden files and `__pycache__` are left out. Raises `InputError` if a file or a line
    cannot be read (the message names it), or if nothing is left.
    """
    documents: list[Document] = []
    try:
        for path in _find_files("stdlib" if config.source == "docstrings" else config.source):
            if config.source == "docstrings":
                documents += [Document(*fields) for fields in read_docstrings(path)]
            elif path.suffix.lower() == ".jsonl":
                documents += _read_jsonl(path, config.text_field, config.prompt_field)
            else:
                documents.append(Document(str(path), path.read_bytes()))
    except OSError as error:
        raise InputError(f"data.source: cannot read {error.filename or config.source!r}: {error.strerror}") from error
    documents = [document for document in documents if document.text]
    if not documents:
        allowed = "'stdlib', 'docstrings', a file, a folder, or a glob of text or .jsonl files"
        raise InputError(f"data.source: no text in {config.source!r}; give {allowed}")
    return documents


def split_documents(documents: Sequence[Document], held_out: float, seed: int) -> tuple[list[Document], list[Document]]:
    """`(train, held out)`: whole documents, drawn by the seed, at least one on each side; each list in the given order.

    A single document is cut in two instead, its tail held out. Raises `InputError` if `held_out` is not in (0, 1), the
    seed is not a uint32, or there is too little text to cut.
    """
    if not 0 < held_out < 1:
        raise InputError(f"data.held_out: {held_out} is not a share; give a number between 0 and 1")
    _check_range("seed", seed, low=0)
    if not documents:
        raise InputError("data.source: no document to split; at least one is needed")
    if len(documents) == 1:
        (document,) = documents
        cut = _tail_start(document, held_out)
        head, tail = (dataclasses.replace(document, text=text) for text in (document.text[:cut], document.text[cut:]))
        return [head], [tail]
    count = min(max(round(held_out * len(documents)), 1), len(documents) - 1)
    drawn = set(np.random.default_rng(seed).permutation(len(documents))[:count].tolist())
    train = [document for number, document in enumerate(documents) if number not in drawn]
    return train, [documents[number] for number in sorted(drawn)]


@dataclass(frozen=True)
class TokenizedCorpus:
    """All documents as one run of tokens; document d is `tokens[starts[d]:starts[d + 1]]`, ends of text included.

    The first `prompts[d]` tokens of document d are not predicted: its first end of text and, if it has one, its prompt.
    """

    tokens: Int32[np.ndarray, " tokens"]
    starts: Int64[np.ndarray, " documents"]
    end_of_text: int
    text_bytes: int  # of the original text, for bits per byte
    prompts: Int64[np.ndarray, " documents"]

    def fingerprint(self) -> str:
        """SHA-256 of the tokens, of where documents begin and, if there are any, of where prompts end."""
        prompts = self.prompts.tobytes() if (self.prompts > 1).any() else b""
        return hashlib.sha256(self.tokens.tobytes() + self.starts.tobytes() + prompts).hexdigest()

    @property
    def predictions(self) -> int:
        """Tokens that are predicted."""
        return len(self.tokens) - int(self.prompts.sum())


def tokenize(documents: Sequence[Document], tokenizer: Tokenizer, vocab_size: int | None = None) -> TokenizedCorpus:
    """The corpus of these documents. Raises `InputError`, naming the document, for text that the tokenizer cannot read
    and for an id that is not below `vocab_size` (the model's; the tokenizer's if `None`)."""
    if not documents:
        raise InputError("data.source: no document to tokenize; at least one is needed")
    vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
    end_of_text = np.array([tokenizer.end_of_text], np.int32)
    pieces, prompts = [], []
    for document in documents:
        try:
            prompt = tokenizer.encode(document.prompt) if document.prompt else end_of_text[:0]
            tokens = tokenizer.encode(document.text)
        except InputError as error:
            raise InputError(f"data.source: {document.name}: {error}") from error
        pieces.append(np.concatenate([end_of_text, prompt, tokens, end_of_text]))
        prompts.append(1 + len(prompt))
        if (largest := pieces[-1].max()) >= vocab_size:
            raise InputError(f"data.tokenizer: {document.name} has id {largest}; the vocabulary has {vocab_size} ids")
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    return TokenizedCorpus(
        tokens=np.concatenate(pieces),
        starts=np.cumsum(lengths) - lengths,
        end_of_text=tokenizer.end_of_text,
        text_bytes=sum(len(document.text) for document in documents),
        prompts=np.array(prompts, np.int64),
    )


class RowSource(grain.sources.RandomAccessDataSource[Row]):
    """Row i holds the inputs `tokens[i * n : (i + 1) * n]`, n = `sequence_length`, and their labels.

    A label is `IGNORED_LABEL` where the next token belongs to a prompt or another document, or there is none. Past the
    end of the corpus the inputs are `end_of_text` in segment 0. Raises `InputError` for a length below 1, `IndexError`
    for a row that is not there.
    """

    def __init__(self, corpus: TokenizedCorpus, sequence_length: int) -> None:
        _check_range("data.sequence_length", sequence_length, low=1)
        self.corpus = corpus
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return -(-(len(self.corpus.tokens) - 1) // self.sequence_length)

    def __getitem__(self, index: SupportsIndex) -> Row:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        first = index * self.sequence_length
        tokens = self.corpus.tokens[first : first + self.sequence_length + 1]
        low, high = np.searchsorted(self.corpus.starts, [first + 1, first + len(tokens)])
        starts = self.corpus.starts[low:high] - first  # of the documents that begin in this row, after its first token
        held = range(max(low - 1, 0), high)  # all documents in it
        is_start = np.zeros(len(tokens), np.int32)
        is_start[starts] = 1
        real = min(len(tokens), self.sequence_length)
        row = self.padding()
        row["input_ids"][:real] = tokens[:real]
        row["labels"][: len(tokens) - 1] = tokens[1:]
        for document in held:
            begin = int(self.corpus.starts[document]) - first
            row["labels"][max(begin - 1, 0) : max(begin - 1 + int(self.corpus.prompts[document]), 0)] = IGNORED_LABEL
        row["segment_ids"][:real] = 1 + np.cumsum(is_start)[:real]
        return row

    def padding(self) -> Row:
        """A row of nothing but padding."""
        filling = {"input_ids": self.corpus.end_of_text, "labels": IGNORED_LABEL, "segment_ids": 0}
        return {key: np.full(self.sequence_length, value, np.int32) for key, value in filling.items()}


def train_batches(corpus: TokenizedCorpus, config: DataConfig, seed: int) -> grain.IterDataset:
    """Endless batches (`Batch`, `data.batch_size` rows), every row once an epoch, each epoch in an order of its own.

    A batch may straddle two epochs. The iterator's `get_state` and `set_state` hold the position for resuming. Raises
    `InputError` if there are fewer rows than one batch takes, or the seed is not a uint32.
    """
    rows = RowSource(corpus, config.sequence_length)
    _check_range("seed", seed, low=0)
    if len(rows) < config.batch_size:
        raise InputError(
            f"data.batch_size: {config.batch_size} rows a batch, but the training text has only {len(rows)} rows of"
            f" data.sequence_length {config.sequence_length}; give more text, a smaller batch or a shorter sequence"
        )
    dataset = grain.MapDataset.source(rows).shuffle(seed=seed).repeat()
    # No reading threads: the rows are in memory, and the default buffers 500 batches ahead.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return dataset.batch(config.batch_size, drop_remainder=True).to_iter_dataset(options)


def eval_batches(corpus: TokenizedCorpus, batch_size: int, sequence_length: int) -> Iterator[Batch]:
    """Every row once, in order. The last batch is filled up with rows of padding, so that all have one shape."""
    rows = RowSource(corpus, sequence_length)
    _check_range("data.batch_size", batch_size, low=1)

    def batch(first: int) -> Batch:
        numbers = range(first, first + batch_size)
        members = [rows[number] if number < len(rows) else rows.padding() for number in numbers]
        return {key: np.stack([member[key] for member in members]) for key in members[0]}

    return (batch(first) for first in range(0, len(rows), batch_size))


def _find_files(source: str) -> list[Path]:
    """The regular files of a source, sorted, whatever the order the file system lists them in."""
    if source == "stdlib":
        # Tests are not part of every installation, and half of the bytes where they are.
        skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
        return _walk(Path(sysconfig.get_paths()["stdlib"]), "*.py", lambda name: name in skipped)
    if not source or "\0" in source:
        return []
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        return _walk(path, "*", lambda name: name.startswith(".") or name == "__pycache__")
    found = [path] if path.exists() else {Path(name) for name in glob.glob(str(path), recursive=True)}
    return sorted(file for file in found if file.is_file())


def _walk(root: Path, pattern: str, skip: Callable[[str], bool]) -> list[Path]:
    """The regular files under a folder, links to folders not followed, without those that have a skipped name."""

    def fail(error: OSError) -> None:  # the default leaves out folders that cannot be read
        raise error

    found = []
    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not skip(name)]
        found += [Path(folder, name) for name in files if not skip(name)]
    return sorted(path for path in found if path.match(pattern) and path.is_file())


def _read_jsonl(path: Path, text_field: str, prompt_field: str) -> list[Document]:
    lines = enumerate(path.read_bytes().split(b"\n"), start=1)
    return [_read_record(f"{path}:{number}", line, text_field, prompt_field) for number, line in lines if line.strip()]


def _read_record(name: str, line: bytes, text_field: str, prompt_field: str) -> Document:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"data.source: {name} is not JSON; each line must be one JSON object") from error
    texts = []
    for key, field in (("text", text_field), ("prompt", prompt_field)):
        if not field:
            continue
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise InputError(f"data.{key}_field: {name} has no string {field!r}; each line must be an object with one")
        try:
            texts.append(record[field].encode())
        except UnicodeEncodeError as error:
            raise InputError(f"data.{key}_field: {name} has a lone surrogate in {field!r}; give Unicode") from error
    return Document(name, *texts)


def _tail_start(document: Document, held_out: float) -> int:
    """Where to cut one document: at a line end before the share asked for, if one is near; never inside a character."""
    text = document.text
    if len(text) < 2:
        raise InputError(f"data.held_out: {document.name} is the only document and has under two bytes; give more text")
    cut = min(max(len(text) - round(held_out * len(text)), 1), len(text) - 1)
    if line := text.rfind(b"\n", cut // 2, cut) + 1:
        return line
    near = range(cut, max(cut - 4, 0), -1)
    return next((place for place in near if not 0x80 <= text[place] < 0xC0), cut)  # not at a UTF-8 continuation byte


def _check_range(flag: str, value: int, low: int) -> None:
    if not low <= value < 2**32:
        raise InputError(f"{flag}: {value} is out of range; give an integer from {low} to {2**32 - 1}")
