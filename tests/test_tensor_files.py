"""safetensors files: written by us and read by the library, written by the library and damaged, and read by us."""

import errno
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from folders import EMBED, FUSED, KEY, UP, check_model, damaged, one_line, read_tensors
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from qwen3next import tensor_files
from qwen3next.errors import InputError
from qwen3next.hf import load_pretrained
from qwen3next.tensor_files import FLOATS, INDEX, SINGLE, kind_of, read, read_folder, read_header
from qwen3next.tensor_writer import (
    kind_spec,
    lay_out_file,
    lay_out_folder,
    new_file,
    new_folder,
    parse_size,
    write,
    write_index,
)

DTYPES = list(FLOATS.values())
RNG = np.random.default_rng(0)


def _save(folder: Path, arrays: dict[str, np.ndarray], limit: int = 10**9) -> Path:
    with new_folder(folder, overwrite=False) as new:
        layout = lay_out_folder(new, {name: kind_spec(a.dtype, a.shape) for name, a in arrays.items()}, limit)
        layout.create()
        for name, array in arrays.items():
            write(layout.tensors[name], array)
        write_index(new, layout)
    return folder


# --- Writing


STRIDES = {
    "plain": lambda x: x,
    "transposed": np.transpose,
    "strided": lambda x: x[::2, 1::3],
    "reversed": lambda x: x[::-1, ::-1],
    "broadcast": lambda x: np.broadcast_to(x[:1], (5, x.shape[1])),
    "fortran": np.asfortranarray,
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides_are_written_in_order(tmp_path, dtype):
    base = RNG.standard_normal((6, 9)).astype(dtype)
    arrays = {name: make(base) for name, make in STRIDES.items()}
    folder = _save(tmp_path / "folder", arrays)
    held = load_file(folder / SINGLE)
    assert held.keys() == arrays.keys()
    for name, array in arrays.items():
        assert held[name].dtype == array.dtype and held[name].shape == array.shape
        assert held[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


def test_tensors_are_aligned_and_the_header_says_pt(tmp_path):
    arrays = {f"{dtype.name}.{i}": np.ones(i, dtype) for dtype in DTYPES for i in (1, 3, 5)} | {
        "a": np.ones(1, np.float16)
    }
    file = _save(tmp_path / "folder", arrays) / SINGLE
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    assert (8 + length) % 8 == 0
    tensors, metadata = read_header(file)
    assert all(stored.offset % stored.dtype.itemsize == 0 for stored in tensors.values())
    with safe_open(file, framework="numpy") as opened:
        assert metadata == opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize(("limit", "files"), [(100, 7), (200, 4), (10**6, 1)])
def test_shards_and_their_index(tmp_path, limit, files):
    arrays = {f"model.layers.{i}.w": RNG.standard_normal(20).astype(np.float32) for i in range(11)}
    arrays |= {f"b.{i}": RNG.standard_normal(10).astype(ml_dtypes.bfloat16) for i in range(3)}
    arrays["large"] = RNG.standard_normal(40).astype(np.float32)
    del arrays["model.layers.3.w"]
    folder = _save(tmp_path / "folder", arrays, limit)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if limit == 10**6:
        assert names == [SINGLE] and not (folder / INDEX).exists()
        weight_map = dict.fromkeys(arrays, SINGLE)
    else:
        index = json.loads((folder / INDEX).read_text())
        weight_map = index["weight_map"]
        assert index["metadata"] == {"total_size": sum(a.nbytes for a in arrays.values())}
        assert names == [f"model-{i + 1:05}-of-{len(names):05}.safetensors" for i in range(len(names))]
        assert len(names) >= files
    held = {name: load_file(folder / name) for name in names}
    assert {key: name for name in names for key in held[name]} == weight_map
    for name, tensors in held.items():
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit or len(tensors) == 1, name
    for key, name in weight_map.items():
        assert held[name][key].tobytes() == arrays[key].tobytes()
    layers = [weight_map[f"model.layers.{i}.w"] for i in range(11) if i != 3]
    assert layers == sorted(layers)  # layer 10 after layer 9


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("2GiB", 2**31), ("1.5 kb", 1500), ("7", 7), (12, 12), ("3B", 3)],
)
def test_sizes(size, nbytes):
    assert parse_size(size) == nbytes


@pytest.mark.parametrize("size", ["", "0", "GB", "-5GB", "5 gigabytes", "5GBs", "0.1B", "1e9"])
def test_sizes_that_are_refused(size):
    with pytest.raises(InputError) as error:
        parse_size(size)
    one_line(error, repr(size), "5GB")


# --- Whole or not at all


def test_an_error_leaves_what_was_there(tmp_path):
    old = tmp_path / "folder"
    old.mkdir()
    (old / "config.json").write_text("old")
    for error in (RuntimeError("of ours"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")):
        expected = InputError if isinstance(error, OSError) else type(error)
        with pytest.raises(expected), new_folder(old, overwrite=True) as new:
            (new / "config.json").write_text("new")
            raise error
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]
        assert (old / "config.json").read_text() == "old"
    with new_folder(old, overwrite=True) as new:
        (new / "x").write_text("new")
        assert (old / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"] and os.listdir(old) == ["x"]


def test_a_kill_leaves_no_folder_that_looks_finished(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom qwen3next.tensor_writer import new_folder\n"
        "with new_folder(Path(sys.argv[1]), overwrite=True) as new:\n"
        "    (new / 'config.json').write_text('new')\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    old = tmp_path / "folder"
    old.mkdir()
    (old / "config.json").write_text("old")
    with subprocess.Popen([sys.executable, "-c", code, str(old)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.kill()
    assert (old / "config.json").read_text() == "old"
    left = [path.name for path in tmp_path.iterdir() if path != old]
    assert len(left) == 1 and left[0].startswith("folder.partial-")


@pytest.mark.parametrize("held", ["notes.txt", "model.safetensors"])
def test_only_a_checkpoint_is_replaced(tmp_path, held):
    (tmp_path / held).write_text("mine")
    for overwrite, word in ((False, "--overwrite"), (True, "only a checkpoint")):
        with pytest.raises(InputError) as error, new_folder(tmp_path, overwrite):
            pass
        one_line(error, tmp_path, word)
    with pytest.raises(InputError, match="is a file"), new_folder(tmp_path / held, True):
        pass
    assert os.listdir(tmp_path) == [held]


def test_a_file_is_replaced_when_it_is_complete(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "x.safetensors"
    file.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(InputError) as error, new_file(file) as partial:
            lay_out_file(partial, {"x": kind_spec(np.float32, (3,))}, {}).create()
    one_line(error, file, "No space left")
    assert file.read_text() == "old" and os.listdir(tmp_path) == [file.name]


# --- Reading


@pytest.mark.parametrize("out", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_casts_and_chunks(tmp_path, monkeypatch, stored, out):
    monkeypatch.setattr(tensor_files, "CHUNK", 64)
    array = RNG.standard_normal((7, 5, 3)).astype(stored)
    save_file({"before": np.ones(5, np.int8), "x": array}, tmp_path / "x.safetensors")
    held, moved = read_header(tmp_path / "x.safetensors")[0]["x"], []
    found = np.empty((7, 5, 3), out)
    read(held, found, advance=moved.append)
    np.testing.assert_array_equal(found, array.astype(out))
    assert sum(moved) == array.nbytes and len(moved) > 1
    for part, expected in (
        (held.part((2,)), array[2]),
        (held.part((2, 4)), array[2, 4]),
        (held.rows(3, 6), array[3:6]),
        (held.part((6,)).rows(1, 3), array[6, 1:3]),
        (held.rows(2, 2), array[2:2]),
    ):
        assert part.shape == expected.shape
        found = np.empty(expected.shape, out)
        read(part, found)
        np.testing.assert_array_equal(found, expected.astype(out))
    flat = [np.empty(chunk.shape, stored) for chunk in held.chunks()]
    for chunk, target in zip(held.chunks(), flat, strict=True):
        read(chunk, target)
    assert len(flat) > 1 and np.concatenate(flat).tobytes() == array.tobytes()


@pytest.mark.parametrize("kind", FLOATS)
def test_every_number_is_told_from_nan_and_infinity(kind):
    bits = np.arange(2**16, dtype=np.uint16)
    values = bits.view(FLOATS[kind]) if kind != "F32" else (bits.astype(np.uint32) << 16 | 0xFFFF).view(np.float32)
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(values.astype(np.float32))
    assert [tensor_files._all_finite(value, kind) for value in values.reshape(-1, 1)] == finite.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fused", [False, True])
def test_nan_and_infinity_are_named_and_taken_on_request(tmp_path, dtype, value, fused):
    def damage(tensors: dict[str, np.ndarray]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].astype(dtype)
        tensors[FUSED if fused else UP][..., -1, 3] = value

    folder = damaged(tmp_path, damage, fused=fused)
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, folder / SINGLE, FUSED if fused else UP, "NaN or infinity")
    check_model(load_pretrained(folder, allow_nonfinite=True), read_tensors(folder))


def test_a_cast_that_makes_infinity_is_named(tmp_path):
    folder = damaged(tmp_path, lambda tensors: tensors[KEY].__setitem__((0, 0), 1e6))
    load_pretrained(folder, "bfloat16")
    with pytest.raises(InputError) as error:
        load_pretrained(folder, "float16")
    one_line(error, folder / SINGLE, KEY, "float16")


# --- Damage


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.int8, np.bool_, ml_dtypes.float8_e4m3fn], ids=str)
def test_other_dtypes_are_named(tmp_path, dtype):
    folder = damaged(tmp_path, lambda tensors: tensors.update({KEY: tensors[KEY].astype(dtype)}))
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, folder / SINGLE, KEY, "F32, BF16, F16")
    with pytest.raises(InputError, match="allowed: float32, bfloat16, float16"):
        kind_of(dtype)


def _rewrite_header(file: Path, change: Any) -> None:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    text = change(content[8:end].decode()).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def _entry(header: str, name: str) -> str:
    return json.dumps({name: json.loads(header)[name]})[1:-1]


@pytest.mark.parametrize("other_place", [False, True])
def test_a_name_twice_in_a_header_is_named(tmp_path, other_place):
    folder = damaged(tmp_path, lambda tensors: None)

    def twice(header: str) -> str:
        entry = _entry(header, EMBED if other_place else KEY).replace(EMBED, KEY)
        return header.rstrip()[:-1] + "," + entry + "}"

    _rewrite_header(folder / SINGLE, twice)
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, folder / SINGLE, KEY, "twice")


def test_a_tensor_in_two_shards_is_named(tmp_path):
    folder = damaged(tmp_path, lambda tensors: None, shards=3)
    listed = json.loads((folder / INDEX).read_text())["weight_map"][KEY]
    for file in sorted(folder.glob("model-*")):
        if file.name != listed:
            kept = file.read_bytes()
            save_file(load_file(file) | {KEY: read_tensors(folder)[KEY]}, file)
            with pytest.raises(InputError) as error:
                load_pretrained(folder)
            one_line(error, folder / listed, file, KEY, "both")
            file.write_bytes(kept)
    load_pretrained(folder)


def test_fused_and_single_experts_at_once_are_named(tmp_path):
    single = {UP: np.zeros((3, 3), np.float32)}
    folder = damaged(tmp_path, lambda tensors: tensors.update(single), fused=True)
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, folder / SINGLE, FUSED, UP)


def test_a_single_file_beside_an_index_is_refused(tmp_path):
    folder = damaged(tmp_path, lambda tensors: None, shards=2)
    save_file({"x": np.zeros(1, np.float32)}, folder / SINGLE)
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, folder, SINGLE, INDEX)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("../outside/model-00001-of-00002.safetensors", ("a name of a file beside the index",)),
        ("{outside}/model-00001-of-00002.safetensors", ("a name of a file beside the index",)),
        ("sub/model-00001-of-00002.safetensors", ("a name of a file beside the index",)),
        ("..", ("a name of a file beside the index",)),
        ("", ("a name of a file beside the index",)),
        ("model\0.safetensors", ("a name of a file beside the index",)),
        ("model-00001-of-00002.safetensors", ("lacks tensor", "model-00002-of-00002.safetensors holds it")),
        ("model-00003-of-00002.safetensors", ("model-00003-of-00002.safetensors", "No such file")),
        (None, ("model-00002-of-00002.safetensors", "does not list")),
    ],
)
def test_an_index_that_lies_is_named(tmp_path, file, words):
    (tmp_path / "folder").mkdir()
    folder = damaged(tmp_path / "folder", lambda tensors: None, shards=2)
    (tmp_path / "outside").mkdir()
    for path in folder.glob("model-*"):  # what the index points to is there, and is right
        (tmp_path / "outside" / path.name).write_bytes(path.read_bytes())
    index = json.loads((folder / INDEX).read_text())
    name = next(name for name, file in index["weight_map"].items() if file.startswith("model-00002"))
    index["weight_map"][name] = file and file.replace("{outside}", str(tmp_path / "outside"))
    if file is None:
        del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, *words, *([] if "No such file" in words else [name]))


@pytest.mark.parametrize("length", [2**63, 2**40, 100_000_001, 10_000_000, 1, 0])
def test_an_absurd_header_length_is_refused_at_once(tmp_path, length):
    folder, started = damaged(tmp_path, lambda tensors: None), time.perf_counter()
    file = folder / SINGLE
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, file, "not a readable safetensors file")
    assert time.perf_counter() - started < 2


def test_overlapping_tensors_are_refused(tmp_path):
    folder = damaged(tmp_path, lambda tensors: None)

    def overlap(header: str) -> str:
        entries = json.loads(header)
        begin, end = entries[KEY]["data_offsets"]
        entries[KEY]["data_offsets"] = [begin - 4, end - 4]
        return json.dumps(entries)

    _rewrite_header(folder / SINGLE, overlap)
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, folder / SINGLE)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_shard_is_named(tmp_path, keep):
    folder = damaged(tmp_path, lambda tensors: None, shards=3)
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, file)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path):
    folder = damaged(tmp_path, lambda tensors: None)
    stored = read_folder(folder)[KEY]
    os.truncate(folder / SINGLE, stored.offset + stored.nbytes - 1)
    with pytest.raises(InputError) as error:
        read(stored, np.empty(stored.shape, stored.dtype))
    one_line(error, folder / SINGLE, KEY, "ends inside")
    (folder / SINGLE).unlink()
    with pytest.raises(InputError) as error:
        read(stored, np.empty(stored.shape, stored.dtype))
    one_line(error, folder / SINGLE, KEY)


def test_loading_needs_no_more_than_the_model_and_a_leaf(tmp_path):
    """Python's own count of NumPy's memory, in which the model's arrays are those that were read."""
    import tracemalloc

    tensors = read_tensors(damaged(tmp_path, lambda tensors: None))
    total, jaxes = sum(tensor.nbytes for tensor in tensors.values()), load_pretrained(tmp_path)
    tracemalloc.start()
    model = load_pretrained(tmp_path)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert total <= held + 2**20 and peak < total + largest + 2**20, (held, peak, total)
    del jaxes
