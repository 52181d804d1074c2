"""Tensors in safetensors files: where each one lies, and reading it from there.

Files are read, never mapped: mapped pages would count as this process's memory, and be copied a second time.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from qwen3next.errors import InputError, require
from qwen3next.structure import read_json

FLOATS = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CHUNK = 1 << 23  # bytes read at a time: what is read is checked while the processor's cache still holds it
_LONGEST_HEADER = 100_000_000  # the format's limit
_EXPONENTS = {"F32": (np.int32, 0x7F800000), "BF16": (np.int16, 0x7F80), "F16": (np.int16, 0x7C00)}


class Stored(NamedTuple):
    """Where a tensor lies. `kind` is its dtype as files spell it; `offset` and `nbytes` count bytes of the file."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8) if self.kind == "U8" else FLOATS[self.kind]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def _cut(self, start: int, shape: tuple[int, ...]) -> "Stored":
        """`shape` elements from element `start` on."""
        width = self.nbytes // max(self.size, 1)
        return self._replace(shape=shape, offset=self.offset + start * width, nbytes=math.prod(shape) * width)

    def part(self, at: tuple[int, ...]) -> "Stored":
        """`tensor[at]`, for indices of leading axes."""
        rest = self.shape[len(at) :]
        start = int(np.ravel_multi_index(at, self.shape[: len(at)])) if at else 0
        return self._cut(start * math.prod(rest), rest)

    def rows(self, start: int, stop: int) -> "Stored":
        """`tensor[start:stop]`."""
        rest = self.shape[1:]
        return self._cut(start * math.prod(rest), (stop - start, *rest))

    def chunks(self) -> Iterator["Stored"]:
        """The elements in order, flat, a few megabytes at a time."""
        step = CHUNK // 4
        for start in range(0, self.size, step):
            yield self._cut(start, (min(step, self.size - start),))

    def raw(self) -> "Stored":
        """Its bytes, whatever they mean."""
        return self._replace(kind="U8", shape=(self.nbytes,))


def kind_of(dtype: Any) -> str:
    """How files spell a dtype; `InputError` if it is none of float32, bfloat16 and float16."""
    kind = next((kind for kind, known in FLOATS.items() if known == np.dtype(dtype)), None)
    if kind is None:
        raise InputError(f"dtype {np.dtype(dtype)} cannot be stored; allowed: float32, bfloat16, float16")
    return kind


def read_header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """A file's tensors by name, and its metadata.

    `InputError` for a file that is missing, cut short or no safetensors file, and for a name that stands in it twice.
    """
    repeated: list[str] = []

    def note_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            repeated.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return values

    entries: dict[str, Any] = {}
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            text = stream.read(length) if length <= _LONGEST_HEADER else b""
        with suppress(ValueError):  # the library says below what is wrong
            entries = json.loads(text, object_pairs_hook=note_repeated)
        require(not repeated, f"{file}: tensor {min(repeated, default='')} stands in the header twice")
        with safe_open(file, framework="numpy"):
            pass  # lengths, dtypes, shapes and offsets agree with each other and with the file
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file}: not a readable safetensors file ({error})") from error
    metadata, start, tensors = entries.pop("__metadata__", None) or {}, 8 + length, {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        tensors[name] = Stored(file, name, entry["dtype"], tuple(entry["shape"]), start + begin, end - begin)
    return tensors, metadata


def read_folder(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder with one `model.safetensors`, or with an index and the shards that it names.

    `InputError` names file and tensor for a shard that is missing or damaged, and for an index that is wrong about
    what a file holds or points out of the folder.
    """
    require(folder.is_dir(), f"{folder} is not a folder; it must be one with a checkpoint in it")
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        require(single.is_file(), f"{folder} holds no checkpoint; needed: {SINGLE} or {INDEX}")
        return read_header(single)[0]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{index}: must hold a 'weight_map' from tensor to file")
    for name, file in weight_map.items():
        plain = isinstance(file, str) and file not in ("", "..") and Path(file).name == file and "\0" not in file
        require(plain, f"{index}: the file of tensor {name} is {file!r}; it must be a name of a file beside the index")
    require(
        not single.is_file() or SINGLE in weight_map.values(),
        f"{folder} holds both {SINGLE} and {INDEX}, which does not name it; one of the two must go",
    )
    tensors: dict[str, Stored] = {}
    for file in sorted(set(weight_map.values())):
        held, _ = read_header(folder / file)
        if twice := held.keys() & tensors.keys():
            name = min(twice)
            raise InputError(f"{tensors[name].file} and {folder / file} both hold tensor {name}; one must not")
        if unlisted := held.keys() - weight_map.keys():
            raise InputError(f"{folder / file} holds tensor {min(unlisted)}, which {index} does not list")
        tensors |= held
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            elsewhere = f"; {tensors[name].file.name} holds it" if name in tensors else ""
            raise InputError(f"{folder / file} lacks tensor {name}, which {index} says it holds{elsewhere}")
    return tensors


def _all_finite(values: np.ndarray, kind: str) -> bool:
    """Infinities and NaNs have the largest exponent: as integers they exceed every finite number of their sign.

    Two integer maxima take a fifth of the time of `np.isfinite`, and need no memory.
    """
    signed, limit = _EXPONENTS[kind]
    bits = values.view(signed)
    sign = 1 << (8 * bits.itemsize - 1)
    return int(bits.max()) < limit and int(bits.view(f"u{bits.itemsize}").max()) < limit | sign


def read(
    stored: Stored,
    out: np.ndarray,
    *,
    allow_nonfinite: bool = False,
    advance: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Fills `out` (C-contiguous, of the tensor's size) with the tensor, cast to the dtype of `out`.

    Where the dtypes agree the bytes go straight into `out`. `advance` is told of the bytes read. `InputError` for a
    file that ends too early, and, unless allowed, for NaN or infinity, whether stored or made by the cast.
    """
    flat, direct = out.reshape(-1), out.dtype == stored.dtype
    assert out.flags.c_contiguous and flat.size == stored.size
    step = CHUNK // stored.dtype.itemsize
    spare = None if direct else np.empty(min(step, flat.size), stored.dtype)
    try:
        with stored.file.open("rb", buffering=0) as stream:
            stream.seek(stored.offset)
            for start in range(0, flat.size, step):
                target = flat[start : start + step]
                chunk = target if spare is None else spare[: target.size]
                view = chunk.view(np.uint8).data
                while view:
                    count = stream.readinto(view)
                    if not count:
                        raise InputError(f"{stored.file} ends inside tensor {stored.name}")
                    view = view[count:]
                if not (allow_nonfinite or stored.kind not in FLOATS or _all_finite(chunk, stored.kind)):
                    raise InputError(f"{stored.file}: tensor {stored.name} holds NaN or infinity")
                if chunk is not target:
                    with np.errstate(over="ignore"):
                        target[...] = chunk
                    if not (allow_nonfinite or _all_finite(target, kind_of(target.dtype))):
                        raise InputError(
                            f"{stored.file}: tensor {stored.name} holds a number too large for {target.dtype}"
                        )
                advance(chunk.nbytes)
    except OSError as error:
        raise InputError(f"{stored.file}: tensor {stored.name} cannot be read ({error})") from error
