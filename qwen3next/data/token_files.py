"""Flat files of tokens, `.bin`, read without loading them.

A file is uint16 or uint32 numbers and nothing else, each document followed by an end of text. Beside one that was made
here stand `NAME.bin.json`, what it is; `NAME.bin.documents`, int64 pairs, where each document ends and how many bytes
of learnt text it has; and, if some tokens are only read, `NAME.bin.learnt`, a byte a token.
"""

import dataclasses
import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from qwen3next.config import DataConfig
from qwen3next.data.corpus import Corpus
from qwen3next.data.documents import LeftOut, find_files
from qwen3next.errors import InputError, require
from qwen3next.structure import read_json
from qwen3next.tokenizer import Tokenizer

SETTINGS, DOCUMENTS, LEARNT = ".json", ".documents", ".learnt"
_SCANNED = 2**24  # tokens looked at together


def beside(path: Path, suffix: str) -> Path:
    """The name of what stands beside a file."""
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
        begin, end, pieces = where.start, where.stop, []
        for file in range(max(bisect_right(self._bounds, begin) - 1, 0), len(self._arrays)):
            low, high = self._bounds[file], self._bounds[file + 1]
            if low >= end:
                break
            pieces.append(self._arrays[file][max(begin, low) - low : min(end, high) - low])
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint16), *pieces])


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
    ours = {beside(path, suffix) for path in found for suffix in (SETTINGS, DOCUMENTS, LEARNT)}
    others = [path for path in files if path not in ours and path not in found]
    require(
        not found or not others, f"data.source: {source!r} has .bin files and {next(iter(others), '')}; give one kind"
    )
    return found


def read_token_files(
    paths: Sequence[Path], config: DataConfig, tokenizer: Tokenizer, vocab_size: int, left_out: LeftOut
) -> Corpus:
    """The corpus of these files, left where they are. Documents without a token are left out and counted.

    A file that says nothing of itself is taken to be `data.token_dtype`, of this tokenizer, its documents to end in
    the tokenizer's end of text. Raises `InputError`, naming the file, for an id that is not below `vocab_size`, and if
    a file is empty, was made with another tokenizer, or does not agree with what stands beside it.
    """
    paths = [path.resolve() for path in paths]  # what stands beside a file stands beside what a link names
    files, place = [_read_file(path, config, tokenizer, vocab_size) for path in paths], 0
    spans = []
    for path, file in zip(paths, files, strict=True):
        spans.append(file.spans + place)
        place += path.stat().st_size // np.dtype(file.dtype).itemsize
        if file.left_out:
            left_out.counts["empty"] += file.left_out
    learnt, text_bytes = None, None
    if any(file.learnt for file in files):
        require(
            all(file.learnt for file in files),
            f"data.source: in {paths[0].parent} only some files have a {LEARNT} beside them",
        )
        learnt = FileTokens([beside(path, LEARNT) for path in paths], ["uint8"] * len(paths))
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
    left = [name for name in (DOCUMENTS, LEARNT) if beside(path, name).exists()]
    if left or beside(path, SETTINGS).exists():
        settings = read_json(beside(path, SETTINGS))
        other = settings.get("tokenizer") != tokenizer.fingerprint
        require(not other, f"data.tokenizer: {path} was made with another than {config.tokenizer!r}; give that one")
    dtype = settings.get("dtype", config.token_dtype)
    require(dtype in ("uint16", "uint32"), f"{beside(path, SETTINGS)}: dtype is {dtype!r}; allowed: uint16, uint32")
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
            documents = np.fromfile(beside(path, DOCUMENTS), np.int64).reshape(-1, 2)
            ends, text_bytes = documents[:, 0], documents[:, 1]
        else:
            ends = np.unique(np.concatenate([*ends, [len(tokens)]])).astype(np.int64)
        fit = len(ends) and ends[-1] == len(tokens) and (np.diff(ends, prepend=0) > 0).all()
        require(bool(fit), f"data.source: {path} has {len(tokens)} tokens; {beside(path, DOCUMENTS)} tells of others")
        learnt = bool(settings.get("learnt"))
        if learnt:
            flags = np.memmap(beside(path, LEARNT), dtype="uint8", mode="r")
            require(len(flags) == len(tokens), f"data.source: {beside(path, LEARNT)} does not belong to {path}")
            for at in range(0, len(flags), _SCANNED):
                digest.update(flags[at : at + _SCANNED].data)
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
