"""Writing safetensors files a tensor at a time, and folders that appear whole or not at all.

The library's own writer takes all tensors of a file at once. Here the plan is the header: it says where each tensor
will lie, the files get their final size, and then tensors come in any order.
"""

import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwen3next.errors import InputError, require
from qwen3next.tensor_files import INDEX, SINGLE, Stored, kind_of, read

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(size: int | str) -> int:
    """Bytes of a size like `5GB`, `500MB` or `2GiB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)", str(size).strip().upper())
    known = match is not None and match[2] in _UNITS
    number = int(float(match[1]) * _UNITS[match[2]]) if match is not None and known else 0
    require(number > 0, f"max_shard_size is {size!r}; it must be a size above 0 like 5GB, 500MB or 2GiB")
    return number


class Spec(NamedTuple):
    """A tensor to be written: its dtype as files spell it, its shape and its size in bytes."""

    kind: str
    shape: tuple[int, ...]
    nbytes: int


def kind_spec(dtype: Any, shape: tuple[int, ...]) -> Spec:
    """The `Spec` of a float tensor; `InputError` for a dtype that is none of float32, bfloat16 and float16."""
    return Spec(kind_of(dtype), shape, math.prod(shape) * np.dtype(dtype).itemsize)


class Layout(NamedTuple):
    """Where each tensor will lie, by name; and each file's beginning, header included, and size."""

    tensors: dict[str, Stored]
    files: dict[Path, tuple[bytes, int]]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(stored.nbytes for stored in self.tensors.values())

    def create(self) -> None:
        """Makes the files at their full size, so that a disk without room for them is found out at once."""
        for file, (beginning, size) in self.files.items():
            with file.open("xb") as stream:
                stream.write(beginning)
                stream.flush()
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(stream.fileno(), 0, size)
                stream.truncate(size)


def _natural(name: str) -> list[str | int]:
    """Sorts layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def lay_out_file(file: Path, tensors: Mapping[str, Spec], metadata: dict[str, str]) -> Layout:
    """One file: widest dtypes first, so that every tensor is aligned to its elements; then in natural order."""
    width = {name: spec.nbytes // max(math.prod(spec.shape), 1) for name, spec in tensors.items()}
    names, header, end = sorted(tensors, key=lambda name: (-width[name], _natural(name))), {}, 0
    for name in names:
        kind, shape, nbytes = tensors[name]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beginning = len(text).to_bytes(8, "little") + text
    at = {name: len(beginning) + header[name]["data_offsets"][0] for name in names}
    stored = {name: Stored(file, name, *tensors[name][:2], at[name], tensors[name].nbytes) for name in names}
    return Layout(stored, {file: (beginning, len(beginning) + end)})


def lay_out_folder(folder: Path, tensors: Mapping[str, Spec], max_shard_size: int) -> Layout:
    """`model.safetensors` if all fits into `max_shard_size`, else shards in natural order of the names."""
    shards: list[dict[str, Spec]] = [{}]
    filled = 0
    for name in sorted(tensors, key=_natural):
        if shards[-1] and filled + tensors[name].nbytes > max_shard_size:
            shards.append({})
            filled = 0
        shards[-1][name] = tensors[name]
        filled += tensors[name].nbytes
    layout, total = Layout({}, {}), len(shards)
    for number, shard in enumerate(shards, 1):
        name = SINGLE if total == 1 else f"model-{number:05}-of-{total:05}.safetensors"
        one = lay_out_file(folder / name, shard, {"format": "pt"})
        layout.tensors.update(one.tensors)
        layout.files.update(one.files)
    return layout


def write_index(folder: Path, layout: Layout) -> None:
    """The index of a layout with more than one file."""
    if len(layout.files) > 1:
        weight_map = {name: layout.tensors[name].file.name for name in sorted(layout.tensors, key=_natural)}
        index = {"metadata": {"total_size": layout.nbytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write(stored: Stored, array: np.ndarray) -> None:
    """Writes a tensor, of any strides, to its place in a file that `Layout.create` has made."""
    assert array.size == stored.size and array.dtype == stored.dtype
    view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    with stored.file.open("r+b", buffering=0) as stream:
        stream.seek(stored.offset)
        while view:
            view = view[stream.write(view) :]


def copy(source: Stored, target: Stored, **reading: Any) -> None:
    """From one place to another, cast if the dtypes differ; `reading` are options of `tensor_files.read`."""
    for here, there in zip(source.chunks(), target.chunks(), strict=True):
        chunk = np.empty(there.shape, there.dtype)
        read(here, chunk, **reading)
        write(there, chunk)


@contextmanager
def new_file(file: Path) -> Iterator[Path]:
    """A temporary name beside `file`, which becomes it if the block ends well. `InputError` if it cannot be written."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        yield partial
        partial.replace(file)
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror or error})") from error
    finally:
        partial.unlink(missing_ok=True)


def check_new_folder(folder: Path, overwrite: bool) -> None:
    """Raises `InputError` unless the folder is new, empty, or a checkpoint or run that may be replaced."""
    require(not folder.exists() or folder.is_dir(), f"{folder} is a file; it must be a folder or a new name")
    held = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    require(not held or overwrite, f"{folder} is not empty; allowed: another folder, or to overwrite it (--overwrite)")
    ours = not held or {"config.json", "config.toml"} & set(held)
    require(bool(ours), f"{folder} holds no checkpoint but {held[:1]}; only a checkpoint is replaced")


@contextmanager
def new_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary sibling to be filled, which becomes `folder` if the block ends well and else is removed.

    `InputError` if a file cannot be written; what stood there before is replaced by a rename at the very end.
    """
    folder = folder.resolve()
    check_new_folder(folder, overwrite)
    mark = uuid.uuid4().hex[:8]
    partial, old = (folder.with_name(f"{folder.name}.{word}-{mark}") for word in ("partial", "old"))
    try:
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror or error})") from error
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
