"""Text to a flat file of tokens, on all cores; an interrupted run goes on where it stopped.

While a run is under way its files end in `.partial`. They are appended to, and `NAME.bin.journal` says how much of them
counts: what comes after that is cut off by the run that goes on.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qwen3next.config import DataConfig
from qwen3next.data.corpus import Encoded, encode
from qwen3next.data.documents import Document, LeftOut, find_files, read_documents
from qwen3next.data.token_files import DOCUMENTS, LEARNT, SETTINGS, beside, token_files
from qwen3next.errors import InputError, require
from qwen3next.progress import transfer
from qwen3next.structure import read_json, structure
from qwen3next.tensor_writer import new_file
from qwen3next.tokenizer import Tokenizer

JOURNAL, PARTIAL = ".journal", ".partial"
_COMMITTED = 2**22  # tokens between two entries of the journal
_READING = ("text_field", "prompt_field", "messages_field", "on_error")


@dataclasses.dataclass
class _Progress:
    """How far a run has come. `settings` are those of text and tokenizer, as JSON."""

    settings: str
    read: int = 0  # documents of the source, those left out among them
    documents: int = 0
    tokens: int = 0
    unreadable: dict[str, int] = dataclasses.field(default_factory=dict)  # documents that the tokenizer cannot read


def write_token_file(
    source: str, path: Path, config: DataConfig, tokenizer: Tokenizer, *, overwrite: bool = False
) -> dict[str, Any]:
    """Tokenizes a source into `path` and what stands beside it; returns what `NAME.bin.json` says.

    A run that was interrupted is gone on with by the same call. Raises `InputError` if the file is there or the source
    or a setting is another than the interrupted run's, unless `overwrite`, and if a document cannot be read.
    """
    require(path.suffix == ".bin" and not path.is_dir(), f"{path} must end in .bin and be no folder")
    require(not token_files(source), f"{source!r} holds token files already; give text")
    sizes = {file: file.stat().st_size for file in find_files(source)}
    settings = _settings(source, sizes, config, tokenizer)
    done, journal = _Progress(json.dumps(settings)), beside(path, JOURNAL)
    if journal.is_file():
        try:
            begun = structure(read_json(journal), _Progress)
            old = json.loads(begun.settings)
            require(isinstance(old, dict), "its settings are no object")
        except ValueError as error:
            raise InputError(f"{journal} is damaged ({error}); remove it to begin anew") from error
        changed = [name for name in settings if old.get(name) != settings[name]]
        told = f"{journal} tells of an interrupted run with another {', '.join(changed)}"
        require(overwrite or not changed, f"{told}; allowed: the same, or to begin anew with --overwrite")
        done = done if changed else begun
    else:
        require(overwrite or not path.exists(), f"{path} is there already; allowed: another name, or --overwrite")
    left_out, unreadable = LeftOut(config.on_error), LeftOut(config.on_error)
    unreadable.counts.update(done.unreadable)
    try:
        with (
            _Writer(path, done, settings) as writer,
            transfer(f"tokenized {source}", sum(sizes.values()), summary=True) as advance,
        ):
            documents = _skipping(read_documents(source, config, left_out), done.read, advance)
            for one in encode(documents, tokenizer, tokenizer.vocab_size, unreadable):
                writer.add(one)
                if writer.waiting >= _COMMITTED:
                    writer.commit(unreadable)
            writer.commit(unreadable)
            require(done.documents > 0, f"{source!r} holds no document that can be read (left out: {unreadable})")
            return writer.finish(left_out.counts + unreadable.counts)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error})") from error


def _settings(source: str, sizes: dict[Path, int], config: DataConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the file will hold depends on these alone. `sizes`: the source's files and how many bytes each has."""
    files = [(str(file), size, file.stat().st_mtime_ns) for file, size in sizes.items()]
    return {
        "dtype": "uint16" if tokenizer.vocab_size <= 2**16 else "uint32",
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "source": source,
        "files": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        **{name: getattr(config, name) for name in _READING},
        "roles": list(config.roles),
        "learnt": bool(config.prompt_field or config.messages_field or source == "docstrings"),
    }


def _skipping(documents: Iterator[Document], count: int, advance: Callable[[int], None]) -> Iterator[Document]:
    for number, document in enumerate(documents):
        advance(sum(len(part.text) for part in document.parts))
        if number >= count:
            yield document


class _Writer:
    """Appends to the files of one run; they stay behind if it is interrupted, unless they hold nothing.

    Raises `InputError` if another process is writing them.
    """

    def __init__(self, path: Path, done: _Progress, settings: dict[str, Any]):
        self._done, self._path, self._settings = done, path, settings
        suffixes = ["", DOCUMENTS] + ([LEARNT] if settings["learnt"] else [])
        self._parts = {suffix: beside(path, suffix + PARTIAL) for suffix in suffixes}
        self._files = {suffix: part.open("ab") for suffix, part in self._parts.items()}
        self._read, self._added, self.waiting = 0, list[Encoded](), 0

    def __enter__(self) -> "_Writer":
        done, item = self._done, np.dtype(self._settings["dtype"]).itemsize
        try:
            fcntl.flock(self._files[""], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            for file in self._files.values():
                file.close()
            raise InputError(f"{self._path} is being written by another process; allowed: another name") from error
        if any(file.tell() < size for file, size in self._sizes(item)):  # interrupted while they were put in place
            done.read, done.documents, done.tokens, done.unreadable = 0, 0, 0, {}
        for file, size in self._sizes(item):
            file.truncate(size)
        return self

    def _sizes(self, item: int) -> list[tuple[Any, int]]:
        """Each file and how many bytes of it count."""
        sizes = {"": self._done.tokens * item, DOCUMENTS: self._done.documents * 16, LEARNT: self._done.tokens}
        return [(file, sizes[suffix]) for suffix, file in self._files.items()]

    def __exit__(self, *_: object) -> None:
        if not self._done.documents:
            for part in (*self._parts.values(), beside(self._path, JOURNAL)):
                part.unlink(missing_ok=True)
        for file in self._files.values():
            file.close()

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
            self._files[""].write(tokens.astype(self._settings["dtype"]).tobytes())
            self._files[DOCUMENTS].write(np.array([end, text_bytes], np.int64).tobytes())
            if LEARNT in self._files:
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
        with new_file(beside(self._path, JOURNAL)) as partial:
            partial.write_text(json.dumps(dataclasses.asdict(self._done)))

    def finish(self, left_out: Counter[str]) -> dict[str, Any]:
        """Puts the files in place, the tokens last; returns what is written about them."""
        counts = {"documents": self._done.documents, "tokens": self._done.tokens, "left_out": dict(left_out)}
        facts = self._settings | counts
        for suffix in (DOCUMENTS, LEARNT):
            if suffix in self._parts:
                self._parts[suffix].replace(beside(self._path, suffix))
            else:
                beside(self._path, suffix).unlink(missing_ok=True)
        with new_file(beside(self._path, SETTINGS)) as partial:
            partial.write_text(json.dumps(facts, indent=2) + "\n")
        self._parts[""].replace(self._path)
        beside(self._path, JOURNAL).unlink()
        return facts
