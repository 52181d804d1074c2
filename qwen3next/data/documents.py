"""Sources to documents: files of text, records of `.jsonl`, `.parquet` and `.array_record`, and Python's library."""

import dataclasses
import glob
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

from qwen3next.config import DataConfig, OnError
from qwen3next.data.chat import ChatTemplate
from qwen3next.data.docstrings import read_docstrings
from qwen3next.errors import InputError, require

_ALLOWED = (
    "'stdlib', 'docstrings', or a file, folder or glob of text, .jsonl, .parquet, .array_record or .bin token files"
)


class Part(NamedTuple):
    """A stretch of a document's text, and whether it is learnt or only read."""

    text: bytes
    learnt: bool = True


@dataclass(frozen=True)
class Document:
    """The parts of one text, and the name that errors call it by: a file, or `file:line` of a record."""

    name: str
    parts: tuple[Part, ...]

    @property
    def learnt_text(self) -> bytes:
        return b"".join(part.text for part in self.parts if part.learnt)


class LeftOut:
    """Counts what is left out, by why. A fault that is not to be skipped is raised instead."""

    def __init__(self, on_error: OnError):
        self._on_error, self.counts = on_error, Counter[str]()

    def fault(self, why: str, error: InputError) -> None:
        """One document or record that cannot be read."""
        if self._on_error == "fail":
            raise InputError(f"{error} (data.on_error skip leaves such out)") from error
        self.counts[why] += 1

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {why}" for why, count in sorted(self.counts.items()))


class _Fault(InputError):
    """A record that cannot be read: why, in a word or two, and the message."""

    def __init__(self, why: str, message: str):
        super().__init__(message)
        self.why = why


def find_files(source: str) -> list[Path]:
    """The regular files of a source, sorted, whatever the order the file system lists them in.

    In a folder, hidden files and `__pycache__` are left out. Raises `InputError` if something cannot be read or nothing
    is there.
    """
    try:
        found = _found("stdlib" if source == "docstrings" else source)
    except OSError as error:
        raise _unreadable(source, error) from error
    require(bool(found), f"data.source: no text in {source!r}; give {_ALLOWED}")
    return found


def read_documents(source: str, config: DataConfig, left_out: LeftOut) -> Iterator[Document]:
    """The documents of one source, one a file or one a record, in the order of their paths and lines.

    Empty texts are left out and counted. Raises `InputError` if a file or, unless `data.on_error` is `skip`, a record
    cannot be read (the message names file and line), or if nothing is left.
    """
    template = ChatTemplate.beside(config.tokenizer) if config.messages_field else None
    read = _RecordReader(config, template)
    fields, count = [config.text_field, config.prompt_field, config.messages_field, "tools"], 0
    for path in find_files(source):
        try:
            for name, record in _records(path, source == "docstrings", fields):
                try:
                    document = record if isinstance(record, Document) else read(name, record)
                except _Fault as error:
                    left_out.fault(error.why, error)
                    continue
                if document.learnt_text:
                    count += 1
                    yield document
                else:
                    full = any(part.text for part in document.parts)
                    left_out.counts["with nothing to learn" if full else "empty"] += 1
        except OSError as error:
            raise _unreadable(source, error) from error
    told = f" (left out: {left_out})" if left_out.counts else ""
    require(bool(count), f"data.source: no text in {source!r}{told}; give {_ALLOWED}")


def split_documents(documents: Sequence[Document], held_out: float, seed: int) -> tuple[list[Document], list[Document]]:
    """`(train, held out)`: whole documents, drawn by the seed, at least one on each side; each list in the given order.

    A single document is cut in two instead, its tail held out. Raises `InputError` if there is too little to cut.
    """
    require(bool(documents), "data.source: no document to split; at least one is needed")
    if len(documents) == 1:
        (document,) = documents
        require(len(document.parts) == 1, f"data.held_out: {document.name} is the only document; give at least two")
        (part,), cut = document.parts, _tail_start(document, held_out)
        halves = [Part(part.text[:cut]), Part(part.text[cut:])]
        head, tail = (dataclasses.replace(document, parts=(half,)) for half in halves)
        return [head], [tail]
    train, drawn = draw_held_out(len(documents), held_out, seed)
    return [documents[number] for number in train], [documents[number] for number in drawn]


def draw_held_out(count: int, held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """The numbers of the documents on each side, of two or more; each in order, at least one a side."""
    drawn = np.random.default_rng(seed).permutation(count)[: min(max(round(held_out * count), 1), count - 1)]
    kept = np.ones(count, bool)
    kept[drawn] = False
    return np.flatnonzero(kept).tolist(), np.flatnonzero(~kept).tolist()


def _unreadable(source: str, error: OSError) -> InputError:
    return InputError(f"data.source: cannot read {str(error.filename or source)!r}: {error.strerror or error}")


def _found(source: str) -> list[Path]:
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


def _records(path: Path, docstrings: bool, fields: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Each record of a file and its name: a `Document`, the `fields` of a row, or JSON that has not been read."""
    kind = path.suffix.lower()
    if docstrings:
        for name, completion, prompt in read_docstrings(path):
            yield name, Document(name, (Part(prompt, learnt=False), Part(completion)))
    elif kind == ".jsonl":
        with path.open("rb") as lines:
            yield from ((f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip())
    elif kind == ".parquet":
        yield from _parquet_rows(path, fields)
    elif kind == ".array_record":
        try:
            source = grain.sources.ArrayRecordDataSource(str(path))
            count = len(source)  # pyright: ignore[reportArgumentType] # it has a length, said in no stub
            yield from ((f"{path}:{number + 1}", source[number]) for number in range(count))
        except (ValueError, RuntimeError) as error:
            raise InputError(f"data.source: {path} is not an array_record file ({error})") from error
    else:
        yield str(path), Document(str(path), (Part(path.read_bytes()),))


def _parquet_rows(path: Path, fields: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise InputError(f'data.source: {path} needs the extra parquet: pip install "qwen3next[parquet]"') from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=[name for name in file.schema_arrow.names if name in fields]):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                for row in range(batch.num_rows):
                    number += 1
                    yield f"{path}:{number}", {name: _cell(column[row]) for name, column in columns.items()}
    except arrow.ArrowException as error:
        raise InputError(f"data.source: {path} is not a readable parquet file ({error})") from error


def _cell(value: Any) -> Any:
    """The Python value of a parquet cell; `None` if there is none, such as for a string that is not UTF-8."""
    try:
        return value.as_py()
    except (ValueError, OverflowError):
        return None


class _RecordReader:
    """Records to documents, by the fields that the config names."""

    def __init__(self, config: DataConfig, template: ChatTemplate | None):
        self._config, self._template = config, template

    def __call__(self, name: str, record: bytes | dict[str, Any]) -> Document:
        if isinstance(record, bytes):
            try:
                record = json.loads(record)
            except (ValueError, RecursionError) as error:
                raise _Fault("not JSON", f"data.source: {name} is not JSON; each must be one JSON object") from error
        if self._template is not None:
            return Document(name, self._conversation(name, record, self._template))
        text = Part(self._text(name, record, "text_field"))
        if not self._config.prompt_field:
            return Document(name, (text,))
        return Document(name, (Part(self._text(name, record, "prompt_field"), learnt=False), text))

    def _text(self, name: str, record: Any, setting: str) -> bytes:
        field = getattr(self._config, setting)
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            message = f"data.{setting}: {name} has no string {field!r}; each must be an object with one"
            raise _Fault("without the field", message)
        return _encoded(record[field], f"data.{setting}: {name} has a lone surrogate in {field!r}; give Unicode")

    def _conversation(self, name: str, record: Any, template: ChatTemplate) -> tuple[Part, ...]:
        field = self._config.messages_field
        messages = record.get(field) if isinstance(record, dict) else None
        fit = isinstance(messages, list) and all(
            isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
        )
        if not fit or not messages:
            message = f"data.messages_field: {name} has no list {field!r} of messages, each an object with a role"
            raise _Fault("without the field", message)
        try:
            parts = template.parts(messages, self._config.roles, record.get("tools"))
        except InputError as error:
            raise _Fault("refused by the chat template", f"data.messages_field: {name}: {error}") from error
        lone = f"data.messages_field: {name} has a lone surrogate; give Unicode"
        return tuple(Part(_encoded(text, lone), learnt) for text, learnt in parts)


def _encoded(text: str, message: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _Fault("not Unicode", message) from error


def _tail_start(document: Document, held_out: float) -> int:
    """Where to cut one document: at a line end before the share asked for, if one is near; never inside a character."""
    text = document.learnt_text
    if len(text) < 2:
        raise InputError(f"data.held_out: {document.name} is the only document and has under two bytes; give more text")
    cut = min(max(len(text) - round(held_out * len(text)), 1), len(text) - 1)
    if line := text.rfind(b"\n", cut // 2, cut) + 1:
        return line
    near = range(cut, max(cut - 4, 0), -1)
    return next((place for place in near if not 0x80 <= text[place] < 0xC0), cut)  # not at a UTF-8 continuation byte
