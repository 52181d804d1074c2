"""Flat files of tokens, `.bin`: read without loading them, and made from text by a command that can be interrupted.

A file is uint16 or uint32 numbers and nothing else, each document followed by an end of text. Beside one that was made
here stand `NAME.bin.json`, what it is; `NAME.bin.documents`, int64 pairs, where each document ends and how many bytes
of learnt text it has; and, if some tokens are only read, `NAME.bin.learnt`, a byte a token.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from qwen3next.config import DataConfig
from qwen3next.data.corpus import Corpus, Encoded, encode
from qwen3next.data.documents import Document, LeftOut, find_files, read_documents
from qwen3next.errors import InputError, require
from qwen3next.progress import transfer
from qwen3next.structure import read_json
from qwen3next.tensor_writer import new_file
from qwen3next.tokenizer import Tokenizer

SETTINGS, DOCUMENTS, LEARNT, JOURNAL, PARTIAL = ".json", ".documents", ".learnt", ".journal", ".partial"
_SCANNED = 2**24  # tokens looked at together
_COMMITTED = 2**22  # tokens between two entries of the journal


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


class FileTokens:
    """Flat files as one array, opened where it is used: another process gets their names."""

    def __init__(self, paths: Sequence[Path], dtypes: Sequence[str]):
        self._paths, self._dtypes = list(paths), list(dtypes)
        sizes = [path.stat().st_size // np.dtype(dtype).itemsize for path, dtype in zip(paths, dtypes, strict=True)]
        self._bounds = [0, *np.cumsum(sizes).tolist()]
        self._open()

    def _open(self) -> None:
        self._arrays = [np.memmap(p, dtype=d, mode="r") for p, d in zip(self._paths, self._dtypes, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_arrays"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return self._bounds[-1]

    def __getitem__(self, where: slice) -> Integer[np.ndarray, " tokens"]:
        begin, end = where.start, where.stop
        pieces = [
            array[max(begin - low, 0) : end - low]
            for array, low, high in zip(self._arrays, self._bounds, self._bounds[1:], strict=False)
            if begin < high and end > low
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.int64), *pieces])


@dataclasses.dataclass(frozen=True)
class _File:
    """What one file holds."""

    dtype: str
    spans: Int64[np.ndarray, "documents 2"]
    text_bytes: Int64[np.ndarray, " documents"] | None
    learnt: bool
    digest: str
    left_out: int


def token_files(source: str) -> list[Path]:
    """The `.bin` files of a source, none if it has none. Raises `InputError` if it has other files, too."""
    if source in ("stdlib", "docstrings"):
        return []
    files = find_files(source)
    found = [path for path in files if path.suffix.lower() == ".bin"]
    ours = {_beside(path, suffix) for path in found for suffix in (SETTINGS, DOCUMENTS, LEARNT)}
    others = [path for path in files if path not in ours and path not in found]
    require(not found or not others, f"data.source: {source!r} has .bin files and {others[:1]}; give one kind")
    return found


def read_token_files(
    paths: Sequence[Path], config: DataConfig, tokenizer: Tokenizer, vocab_size: int, left_out: LeftOut
) -> Corpus:
    """The corpus of these files, left where they are. Documents without a token are left out and counted.

    A file that says nothing of itself is taken to be `data.token_dtype`, of this tokenizer, its documents to end in
    the tokenizer's end of text. Raises `InputError`, naming the file, for an id that is not below `vocab_size`, and if
    a file is empty, was made with another tokenizer, or does not agree with what stands beside it.
    """
    files, place = [_read_file(path, config, tokenizer, vocab_size) for path in paths], 0
    spans = []
    for path, file in zip(paths, files, strict=True):
        spans.append(file.spans + place)
        place += path.stat().st_size // np.dtype(file.dtype).itemsize
        if file.left_out:
            left_out.counts["empty"] += file.left_out
    learnt, text_bytes = None, None
    if any(file.learnt for file in files):
        require(all(file.learnt for file in files), f"data.source: of {paths} only some have a {LEARNT} file; give one")
        learnt = FileTokens([_beside(path, LEARNT) for path in paths], ["uint8"] * len(paths))
    known = [file.text_bytes for file in files if file.text_bytes is not None]
    if len(known) == len(files):
        text_bytes = np.concatenate(known)
    digest = hashlib.sha256("".join(file.digest for file in files).encode()).hexdigest()
    tokens = FileTokens(paths, [file.dtype for file in files])
    joined = np.concatenate(spans)
    require(bool(len(joined)), f"data.source: {paths[0]} has no document; at least one is needed")
    return Corpus(tokens, joined, learnt, text_bytes, tokenizer.end_of_text, digest)


def _read_file(path: Path, config: DataConfig, tokenizer: Tokenizer, vocab_size: int) -> _File:
    settings: dict[str, Any] = {}
    if _beside(path, SETTINGS).is_file():
        settings = read_json(_beside(path, SETTINGS))
        other = settings.get("tokenizer") != tokenizer.fingerprint
        require(not other, f"data.tokenizer: {path} was made with another than {config.tokenizer!r}; give that one")
    dtype = settings.get("dtype", config.token_dtype)
    require(dtype in ("uint16", "uint32"), f"{_beside(path, SETTINGS)}: dtype is {dtype!r}; allowed: uint16, uint32")
    try:
        size, item = path.stat().st_size, np.dtype(dtype).itemsize
        require(size > 0, f"data.source: {path} is empty; it must hold tokens")
        require(size % item == 0, f"data.source: {path} has {size} bytes; {dtype} tokens have {item} each")
        tokens = np.memmap(path, dtype=dtype, mode="r")
        digest, ends = hashlib.sha256(), []
        for at in range(0, len(tokens), _SCANNED):
            part = tokens[at : at + _SCANNED]
            digest.update(part.data)
            if (largest := int(part.max())) >= vocab_size:
                raise InputError(f"data.source: {path} has id {largest}; the vocabulary has {vocab_size} ids")
            if not settings:
                ends.append(at + 1 + np.flatnonzero(part == tokenizer.end_of_text))
        text_bytes = None
        if settings:
            documents = np.fromfile(_beside(path, DOCUMENTS), np.int64).reshape(-1, 2)
            ends, text_bytes = documents[:, 0], documents[:, 1]
        else:
            ends = np.unique(np.concatenate([*ends, [len(tokens)]])).astype(np.int64)
        fit = len(ends) and ends[-1] == len(tokens) and (np.diff(ends, prepend=0) > 0).all()
        require(bool(fit), f"data.source: {path} has {len(tokens)} tokens; {_beside(path, DOCUMENTS)} tells of others")
        learnt = bool(settings.get("learnt"))
        if learnt:
            flags = np.fromfile(_beside(path, LEARNT), np.uint8)
            require(len(flags) == len(tokens), f"data.source: {_beside(path, LEARNT)} does not belong to {path}")
            digest.update(flags.data)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"data.source: {path} cannot be read ({error})") from error
    spans = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
    empty = np.zeros(len(spans), bool)
    if not settings:  # an end of text right after another
        single = np.flatnonzero(spans[:, 1] - spans[:, 0] == 1)
        empty[single] = tokens[spans[single, 0]] == tokenizer.end_of_text
    return _File(dtype, spans[~empty], text_bytes, learnt, digest.hexdigest(), int(empty.sum()))


@dataclasses.dataclass
class _Progress:
    """How far the writing of a file has come: all that is before this is on disk."""

    settings: dict[str, Any]
    read: int = 0  # documents of the source, those left out among them
    documents: int = 0
    tokens: int = 0
    unreadable: dict[str, int] = dataclasses.field(default_factory=dict)  # of these, what the tokenizer cannot read


def write_token_file(
    source: str, path: Path, config: DataConfig, tokenizer: Tokenizer, *, overwrite: bool = False
) -> dict[str, Any]:
    """Tokenizes a source into `path` and what stands beside it; returns what `NAME.bin.json` says.

    A run that was interrupted is gone on with by the same call. Raises `InputError` if the file is there already, the
    source or a setting is another than that of the interrupted run, or a document cannot be read.
    """
    require(path.suffix == ".bin", f"{path} must end in .bin")
    require(not path.exists() or overwrite, f"{path} is there already; allowed: another name, or --overwrite")
    require(not token_files(source), f"{source!r} holds token files already; give text")
    files = find_files(source)
    total = sum(file.stat().st_size for file in files)
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    reading = {name: getattr(config, name) for name in ("text_field", "prompt_field", "messages_field", "on_error")}
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    settings = {
        "dtype": dtype,
        "tokenizer": tokenizer.fingerprint,
        "source": source,
        "files": hashlib.sha256(json.dumps(state).encode()).hexdigest(),
        **reading,
        "roles": list(config.roles),
    }
    journal, done = _beside(path, JOURNAL), _Progress(settings)
    if journal.is_file() and not overwrite:
        done = _Progress(**read_json(journal))
        changed = [name for name in settings if done.settings.get(name) != settings[name]]
        told = f"{journal} tells of an interrupted run with another {', '.join(changed)}"
        require(not changed, f"{told}; allowed: the same, or to begin anew with --overwrite")
    left_out, unreadable = LeftOut(config.on_error), LeftOut(config.on_error)
    unreadable.counts.update(done.unreadable)
    try:
        with _Writer(path, done) as writer, transfer(f"tokenized {source}", total, summary=True) as advance:
            documents = _skipping(read_documents(source, config, left_out), done.read, advance)
            for one in encode(documents, tokenizer, tokenizer.vocab_size, unreadable):
                writer.add(one)
                if writer.waiting >= _COMMITTED:
                    writer.commit(unreadable)
            writer.commit(unreadable)
        require(done.documents > 0, f"{source!r} holds no document that can be read (left out: {unreadable})")
        return _finish(path, done, tokenizer, dict(left_out.counts + unreadable.counts))
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error})") from error


def _skipping(documents: Iterator[Document], count: int, advance: Callable[[int], None]) -> Iterator[Document]:
    for number, document in enumerate(documents):
        advance(sum(len(part.text) for part in document.parts))
        if number >= count:
            yield document


class _Writer:
    """Appends to the files of one run. They stay behind if it is interrupted, unless nothing has been committed."""

    def __init__(self, path: Path, done: _Progress):
        self._done, self._path = done, path
        parts = {suffix: _beside(path, suffix + PARTIAL) for suffix in ("", DOCUMENTS, LEARNT)}
        there = all(part.is_file() and part.stat().st_size >= size for part, size in self._sizes(parts))
        if not there:  # interrupted while they were put in place
            done.read = done.documents = done.tokens = 0
            done.unreadable = {}
        self._parts = parts
        self._files = {suffix: part.open("ab") for suffix, part in parts.items()}
        for file, size in self._sizes(self._files):
            file.truncate(size)
        self._read, self._added, self.waiting = 0, list[Encoded](), 0

    def _sizes(self, parts: dict[str, Any]) -> list[tuple[Any, int]]:
        """Each part and how many bytes of it are committed."""
        tokens, item = self._done.tokens, np.dtype(self._done.settings["dtype"]).itemsize
        sizes = {"": tokens * item, DOCUMENTS: self._done.documents * 16, LEARNT: tokens}
        return [(part, sizes[suffix]) for suffix, part in parts.items()]

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        if not self._done.read:
            for part in (*self._parts.values(), _beside(self._path, JOURNAL)):
                part.unlink(missing_ok=True)

    def add(self, one: Encoded | None) -> None:
        """Takes the source's next document, `None` for one that is left out."""
        self._read += 1
        if one is not None:
            self._added.append(one)
            self.waiting += len(one.tokens)

    def commit(self, unreadable: LeftOut) -> None:
        """Writes what was added, and then that it is written."""
        end = self._done.tokens
        for tokens, learnt, text_bytes in self._added:
            end += len(tokens)
            self._files[""].write(tokens.astype(self._done.settings["dtype"]).tobytes())
            self._files[DOCUMENTS].write(np.array([end, text_bytes], np.int64).tobytes())
            flags = np.ones(len(tokens), np.uint8) if learnt is None else learnt.astype(np.uint8)
            self._files[LEARNT].write(flags.tobytes())
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._done.read += self._read
        self._done.documents += len(self._added)
        self._done.tokens = end
        self._done.unreadable = dict(unreadable.counts)
        self._read, self._added, self.waiting = 0, [], 0
        with new_file(_beside(self._path, JOURNAL)) as partial:
            partial.write_text(json.dumps(dataclasses.asdict(self._done)))


def _finish(path: Path, done: _Progress, tokenizer: Tokenizer, left_out: dict[str, int]) -> dict[str, Any]:
    """Puts the finished files in place, the tokens last."""
    learnt = _beside(path, LEARNT + PARTIAL)
    partly = not all(np.fromfile(learnt, np.uint8, _SCANNED, offset=at).all() for at in range(0, done.tokens, _SCANNED))
    facts = {"documents": done.documents, "tokens": done.tokens, "learnt": partly, "left_out": left_out}
    facts = done.settings | {"vocab_size": tokenizer.vocab_size, "end_of_text": tokenizer.end_of_text} | facts
    if partly:
        learnt.replace(_beside(path, LEARNT))
    else:
        learnt.unlink()
        _beside(path, LEARNT).unlink(missing_ok=True)
    _beside(path, DOCUMENTS + PARTIAL).replace(_beside(path, DOCUMENTS))
    with new_file(_beside(path, SETTINGS)) as partial:
        partial.write_text(json.dumps(facts, indent=2) + "\n")
    _beside(path, PARTIAL).replace(path)
    _beside(path, JOURNAL).unlink()
    return facts
