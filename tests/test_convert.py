"""Hugging Face folders both ways: what goes in comes out, tensor by tensor and key by key, or one line says why not."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from common import as_users_run, tiny_config, tiny_model
from folders import DATA, EMBED, HEAD, KEY, PLAIN, TIED, check_model, fuse, read_tensors, write_folder
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from qwen3next import convert as convert_module
from qwen3next.checkpoint import load_checkpoint
from qwen3next.cli import dump_config, load_config
from qwen3next.config import DataConfig, ModelConfig, RopeParameters, RunConfig, TrainConfig
from qwen3next.convert import convert, main, parse
from qwen3next.errors import InputError
from qwen3next.generate import generate
from qwen3next.hf import load_pretrained, save_pretrained
from qwen3next.hf_config import config_values, model_config, updated_values
from qwen3next.rotary import frequencies
from qwen3next.run_folder import save_weights
from qwen3next.tensor_files import INDEX, SINGLE
from qwen3next.tokenizer import ByteTokenizer, HFTokenizer, byte_tokenizer_for_others

BF16 = ml_dtypes.bfloat16
FOLDERS = ["golden/b_remainder_6l", "golden/c_sharded", "golden/d_tied", "golden/g_dense_mix"]
FOLDERS += ["golden/x_fused_experts", "golden_extra/y_bias_yarn", "golden_extra/z_odd_order"]
MTP = {f"mtp.{name}": np.full((2, 3), i, dtype) for i, (name, dtype) in enumerate({"fc": BF16, "odd": np.int8}.items())}


def _convert(*args: Any) -> Path:
    convert(parse([str(arg) for arg in args]))
    return args[1]


def _same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert found[name].tobytes() == np.ascontiguousarray(tensor).tobytes(), name


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def _source(folder: Path, path: str = "golden_extra/w_longrope_dynamic", cast: Any = lambda i: np.float32, **how: Any):
    """A folder with the tensors of a stored one, cast by their number."""
    folder.mkdir()
    tensors = {name: t.astype(cast(i)) for i, (name, t) in enumerate(read_tensors(DATA / path).items())}
    config = json.loads((DATA / path / "config.json").read_text())
    return write_folder(folder, tensors, config | how.pop("config", {}), **how), tensors


# --- Tensors, both ways

CASTS = {
    "float32": lambda i: np.float32,
    "bfloat16": lambda i: BF16,
    "float16": lambda i: np.float16,
    "mixed": lambda i: (np.float32, BF16, np.float16)[i * 7 % 3],
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("path", FOLDERS)
def test_there_and_back_is_the_same_byte_for_byte(tmp_path, path, cast):
    source, tensors = _source(tmp_path / "source", path, CASTS[cast], shards=3)
    again = _convert(source, tmp_path / "again", "--to", "hf", "--max-shard-size", "40KB")
    run = _convert(source, tmp_path / "run")
    back = _convert(run, tmp_path / "back")
    for folder in (again, back):
        _same(read_tensors(folder), tensors)
        assert _config(folder) == _config(source)
    assert len(list(again.glob("*.safetensors"))) > 1 and (back / SINGLE).is_file()
    assert not (back / "config.toml").exists()


@pytest.mark.parametrize("cast", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("path", FOLDERS)
def test_a_loaded_model_is_saved_byte_for_byte(tmp_path, path, cast):
    """One dtype a kind of tensor, which is what a leaf can hold: all but the decay and the norms are cast."""
    tensors = read_tensors(DATA / path)
    for name in tensors:
        if not name.endswith(("A_log", "dt_bias", "norm.weight")):
            tensors[name] = tensors[name].astype(CASTS[cast](0))
    (tmp_path / "source").mkdir()
    source = write_folder(tmp_path / "source", fuse(tensors), _config(DATA / path))
    save_pretrained(load_pretrained(source), tmp_path / "fresh", max_shard_size="50KB")
    save_pretrained(load_pretrained(source), tmp_path / "like", like=source)
    for folder in (tmp_path / "fresh", tmp_path / "like"):
        _same(read_tensors(folder), tensors)
        assert model_config(_config(folder)) == model_config(_config(source))
    assert _config(tmp_path / "like") == _config(source)
    weight_map = json.loads((tmp_path / "fresh" / INDEX).read_text())["weight_map"]
    held = {name: path.name for path in (tmp_path / "fresh").glob("*.safetensors") for name in load_file(path)}
    assert held == weight_map


def test_a_model_of_any_strides_is_saved(tmp_path):
    model = load_pretrained(DATA / "golden" / "b_remainder_6l")
    save_pretrained(model, tmp_path / "plain")
    turned = jax.tree.map(np.asfortranarray, model)
    save_pretrained(turned, tmp_path / "turned")
    _same(read_tensors(tmp_path / "turned"), read_tensors(tmp_path / "plain"))
    check_model(model, read_tensors(tmp_path / "plain"))


def test_what_cannot_be_saved(tmp_path):
    model = load_pretrained(PLAIN)
    with pytest.raises(InputError, match="dtype float64 cannot be stored"):
        save_pretrained(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model), tmp_path / "out")
    with pytest.raises(InputError, match="max_shard_size is 'many'"):
        save_pretrained(model, tmp_path / "out", max_shard_size="many")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_casts(tmp_path, dtype):
    source, tensors = _source(tmp_path / "source", cast=CASTS["mixed"], config={"dtype": "bfloat16"})
    for name, tensor in tensors.items():
        decays = name.endswith(("A_log", "dt_bias"))
        tensors[name] = tensor.astype(np.float32).astype(np.float32 if decays else np.dtype(dtype))
        if tensor.dtype == np.float16 and dtype == "bfloat16":
            tensors[name] = tensor.astype(np.float32 if decays else BF16)
    out = _convert(source, tmp_path / "out", "--to", "hf", "--dtype", dtype)
    run = _convert(source, tmp_path / "run", "--dtype", dtype)
    for folder in (out, _convert(run, tmp_path / "back")):
        _same(read_tensors(folder), tensors)
        assert _config(folder) == _config(source) | {"dtype": dtype}
    checkpoint = load_checkpoint(run)
    assert checkpoint.model.config.dtype == dtype
    assert checkpoint.compute.dtype == ("bfloat16" if dtype == "bfloat16" else "float32")


def test_a_run_keeps_the_dtypes_of_its_file(tmp_path):
    source, _ = _source(tmp_path / "source", cast=lambda i: BF16)
    model = load_checkpoint(_convert(source, tmp_path / "run")).model
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {np.dtype(BF16)}


def test_equal_twins_are_tied_and_others_are_not(tmp_path):
    for number, change in enumerate((0, 1)):
        tensors = read_tensors(TIED)
        tensors[HEAD] = tensors[EMBED].copy()
        tensors[HEAD][-1, -1] += change
        (tmp_path / f"source{number}").mkdir()
        source = write_folder(tmp_path / f"source{number}", tensors, _config(TIED))
        out = _convert(source, tmp_path / f"out{number}", "--to", "hf")
        run = _convert(source, tmp_path / f"run{number}")
        if not change:
            del tensors[HEAD]
        for folder in (out, _convert(run, tmp_path / f"back{number}")):
            _same(read_tensors(folder), tensors)
            assert _config(folder) == _config(source) | {"tie_word_embeddings": not change}


# --- Decoding, config.json and the small files


def _generated(folder: Path) -> Any:
    model, tokenizer, ends, compute = load_checkpoint(folder)
    tokens = np.stack(list(generate(model, [[1, 2, 3]], 6, end_of_text=ends, compute=compute))).tolist()
    return tokens, ends, compute, tokenizer and tokenizer.encode("text").tolist()


def test_a_run_from_a_folder_decodes_as_the_folder(tmp_path):
    source, _ = _source(tmp_path / "source", config={"eos_token_id": [5, 9], "unheard_of": {"x": [1]}})
    byte_tokenizer_for_others().save(str(source / "tokenizer.json"))
    small = {
        "generation_config.json": '{"eos_token_id": [7, 8]}',
        "chat_template.jinja": "{{ x }}",
        "merges.txt": "a b",
    }
    small |= dict.fromkeys(
        ("tokenizer_config.json", "special_tokens_map.json", "vocab.json", "added_tokens.json"), "{}"
    )
    for name, text in small.items():
        (source / name).write_text(text)
    (source / "README.md").write_text("not of the model")
    run = _convert(source, tmp_path / "run")
    back = _convert(run, tmp_path / "back")
    for folder in (run, back):
        assert _generated(folder) == _generated(source)
        assert _config(folder) == _config(source)
        assert {name: (folder / name).read_text() for name in small} == small
        assert (folder / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
        assert not (folder / "README.md").exists()
    config = load_config(run / "config.toml")
    assert config.run.folder == str(run) and config.model == load_pretrained(source).config
    assert _generated(source)[1] == (7, 8)


def _trained(folder: Path) -> Path:
    folder.mkdir()
    model = tiny_model(vocab_size=300, num_hidden_layers=2, layer_types=("linear_attention", "full_attention"))
    config = TrainConfig(model=model.config, data=DataConfig(), run=RunConfig(folder=str(folder)))
    (folder / "config.toml").write_text(dump_config(config))
    save_weights(folder, model)
    return folder


def test_a_trained_run_goes_out_with_its_tokenizer(tmp_path):
    run = _trained(tmp_path / "run")
    out = _convert(run, tmp_path / "out")
    (tokens, *rest), (tokens_, *rest_) = _generated(run), _generated(out)
    assert tokens == tokens_ and rest == rest_ and rest[0] == (256,)
    values = _config(out)
    assert values["eos_token_id"] == 256 and values["architectures"] == ["Qwen3NextForCausalLM"]
    check_model(load_checkpoint(run).model, read_tensors(out))
    again = load_checkpoint(_convert(out, tmp_path / "again"))
    assert again.model.config == model_config(values) and again.end_of_text == (256,)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_the_shared_byte_tokenizer_has_the_same_ids(text):
    assume("<|endoftext|>" not in text)  # spelt out, it becomes the token, as in any tokenizer.json
    shared, ours = byte_tokenizer_for_others(), ByteTokenizer()
    ids = ours.encode(text.encode(errors="replace").decode()).tolist()
    assert shared.encode(bytes(ids).decode()).ids == ids
    assert shared.decode(ids) == ours.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=40))
def test_the_shared_byte_tokenizer_decodes_any_bytes(ids):
    assert byte_tokenizer_for_others().decode(ids, skip_special_tokens=True) == ByteTokenizer().decode(ids)


def test_the_shared_byte_tokenizer_is_read_from_its_file(tmp_path):
    byte_tokenizer_for_others().save(str(tmp_path / "tokenizer.json"))
    read, text = HFTokenizer(tmp_path / "tokenizer.json"), "".join(map(chr, range(256))) + "é\r\n\0 𝄞"
    assert (read.vocab_size, read.end_of_text) == (257, 256)
    assert (
        read.encode(text).tolist() == ByteTokenizer().encode(text).tolist() and read.decode(read.encode(text)) == text
    )


ROPES = json.loads((DATA / "rope.json").read_text())


@pytest.mark.parametrize("case", ROPES, ids=[case["name"] for case in ROPES])
def test_a_written_config_means_the_same(case):
    config = model_config(_config(PLAIN) | case["config"] | {"dtype": "bfloat16"})
    values = json.loads(json.dumps(config_values(config)))
    v4 = {name: value for name, value in values.items() if name not in ("rope_parameters", "layer_types", "dtype")}
    v5 = {name: value for name, value in values.items() if name in ModelConfig.__dataclass_fields__}
    found = model_config(values)
    assert found == model_config(v4 | {"layer_types": values["layer_types"]}) == model_config(v5)
    longest = jnp.array([case["length"]], jnp.int32)
    for a, b in zip(frequencies(found, longest), frequencies(config, longest), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    named = [name for name in ModelConfig.__dataclass_fields__ if name != "rope_parameters"]
    assert [getattr(found, name) for name in named] == [getattr(config, name) for name in named]


def test_the_interval_is_written_where_one_tells_the_layers():
    for layers, types, interval in (
        (8, (), 4),
        (6, (), 4),
        (2, ("linear_attention",) * 2, 3),
        (3, ("full_attention",) * 3, 1),
        (3, ("full_attention", "linear_attention", "full_attention"), None),
    ):
        values = config_values(tiny_config(num_hidden_layers=layers, layer_types=types))
        assert values.get("full_attention_interval") == interval
        if interval:
            del values["layer_types"]
            assert (
                model_config(values).layer_kinds == tiny_config(num_hidden_layers=layers, layer_types=types).layer_kinds
            )


def test_what_changed_is_updated_and_nothing_else():
    values = {"model_type": "qwen3_next", "torch_dtype": "bfloat16", "num_nextn_predict_layers": 1, "mtp_x": 2, "z": 3}
    config = model_config(values)
    assert updated_values(values, config, with_mtp=True) == values
    gone = {name: value for name, value in values.items() if name not in ("num_nextn_predict_layers", "mtp_x")}
    assert updated_values(values, config, with_mtp=False) == gone
    wider = ModelConfig(**{**config.__dict__, "dtype": "float32", "tie_word_embeddings": True})
    tied = {"torch_dtype": "float32", "tie_word_embeddings": True}
    assert updated_values(values, wider, with_mtp=True) == values | tied
    other = ModelConfig(**{**config.__dict__, "rope_parameters": RopeParameters("linear", factor=2.0)})
    assert model_config(updated_values(values | {"eos_token_id": 7}, other, with_mtp=False)) == other
    assert updated_values(values | {"eos_token_id": 7}, other, with_mtp=False)["eos_token_id"] == 7


# --- mtp.*


@pytest.fixture
def with_mtp(tmp_path):
    """One shard holds an mtp tensor, lm_head and a layer's, another the rest."""
    tensors = read_tensors(PLAIN)
    mixed = {HEAD, KEY, "mtp.fc"}
    shards = [{}, {}]
    for name, tensor in (tensors | MTP).items():
        shards[name in mixed][name] = tensor
    (tmp_path / "source").mkdir()
    source, weight_map = tmp_path / "source", {}
    for number, shard in enumerate(shards, 1):
        save_file(shard, source / f"model-{number:05}-of-00002.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{number:05}-of-00002.safetensors")
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (source / "config.json").write_text(json.dumps(_config(PLAIN) | {"num_nextn_predict_layers": 1, "mtp_depth": 2}))
    return source, tensors


@pytest.mark.parametrize("keep", [True, False])
def test_the_extra_head_is_kept_or_dropped(tmp_path, with_mtp, capsys, keep):
    (source, tensors), flags = with_mtp, ["--keep-mtp"] if keep else []
    out = _convert(source, tmp_path / "out", "--to", "hf", "--max-shard-size", "20KB", *flags)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mtp:")]
    assert len(told) == 1 and ("kept" if keep else "ignored") in told[0] and all(name in told[0] for name in MTP)
    run = _convert(source, tmp_path / "run", *flags)
    assert (run / "mtp.safetensors").exists() == keep
    back = _convert(run, tmp_path / "back", *flags)
    for folder in (out, back):
        _same(read_tensors(folder), tensors | (MTP if keep else {}))
        gone = () if keep else ("num_nextn_predict_layers", "mtp_depth")
        assert _config(folder) == {name: v for name, v in _config(source).items() if name not in gone}
    weight_map = json.loads((out / INDEX).read_text())["weight_map"]
    assert {name: p.name for p in out.glob("*.safetensors") for name in load_file(p)} == weight_map
    check_model(load_pretrained(out), tensors)
    if keep:
        _same(read_tensors(_convert(run, tmp_path / "dropped")), tensors)


# --- The command


def _fails(capsys: Any, *args: Any) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_a_dry_run_reads_headers_alone_and_writes_nothing(tmp_path, monkeypatch, capsys):
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("qwen3next.tensor_writer.read", read)
    monkeypatch.setattr("qwen3next.hf.read", read)
    source, tensors = _source(tmp_path / "source", cast=lambda i: BF16 if i % 2 else np.float32, shards=3)
    main([str(source), str(tmp_path / "out"), "--dry-run"])
    out = capsys.readouterr().out
    for word in (f"{len(tensors):,} tensors", "3 files", "BF16", "F32", "promoted", "model.safetensors"):
        assert word in out
    with pytest.raises(AssertionError, match="a tensor was read"):
        main([str(source), str(tmp_path / "out")])
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    (source / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in _fails(capsys, source, tmp_path / "out", "--dry-run")


def test_a_plan_names_every_fault(tmp_path, capsys):
    tensors = read_tensors(PLAIN)
    del tensors[KEY], tensors[HEAD]
    tensors |= {"x": np.zeros(3, np.float32), EMBED: tensors[EMBED][:-1]}
    (tmp_path / "source").mkdir()
    source = write_folder(tmp_path / "source", tensors, _config(PLAIN))
    with pytest.raises(SystemExit):
        main([str(source), str(tmp_path / "out"), "--dry-run"])
    told = capsys.readouterr()
    faults = [line for line in told.out.splitlines() if line.startswith("fault")]
    for word in (f"{KEY} is missing", f"{HEAD} is missing", f"{EMBED} is", "the first is x"):
        assert sum(word in line for line in faults) == 1
    assert "and 3 more faults" in told.err and told.err.count("\n") == 1


def test_commands_that_are_refused(tmp_path, capsys):
    source, _ = _source(tmp_path / "source")
    run = _convert(source, tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "link").symlink_to(source)
    for args, word in (
        ((source, source, "--overwrite"), "give another folder"),
        ((source, tmp_path / "link", "--overwrite"), "give another folder"),
        ((source, tmp_path, "--overwrite"), "give another folder"),
        ((source, run), "not empty"),
        ((source, tmp_path / "full", "--overwrite"), "only a checkpoint is replaced"),
        ((source, source / "config.json"), "is a file"),
        ((run, tmp_path / "out", "--to", "run"), "is a run already"),
        ((tmp_path / "absent", tmp_path / "out"), "not a folder"),
        ((tmp_path / "full", tmp_path / "out"), "no checkpoint"),
        ((source, tmp_path / "out", "--to", "hf", "--max-shard-size", "big"), "max_shard_size is 'big'"),
        ((source, tmp_path / "out", "--dtype", "float64"), "float64"),
        ((source,), "DST"),
        ((source, tmp_path / "out", "--what"), "--what"),
    ):
        with as_users_run():
            assert word in _fails(capsys, *args)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "run", "full", "link"}
    assert (tmp_path / "full" / "x").read_text() == "mine" and load_pretrained(source)


def test_nan_is_refused_and_taken_on_request(tmp_path, capsys):
    tensors = read_tensors(PLAIN)
    tensors[KEY][0, 0] = np.nan
    (tmp_path / "source").mkdir()
    source = write_folder(tmp_path / "source", tensors, _config(PLAIN))
    err = _fails(capsys, source, tmp_path / "run")
    assert KEY in err and str(source / SINGLE) in err and not (tmp_path / "run").exists()
    run = _convert(source, tmp_path / "run", "--allow-nonfinite")
    assert KEY.rpartition(".self_attn.")[2] in _fails(capsys, run, tmp_path / "back")
    _same(read_tensors(_convert(run, tmp_path / "back", "--allow-nonfinite")), tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "run", "source"]


def test_a_damaged_run_is_named(tmp_path, capsys):
    run = _convert(_source(tmp_path / "source")[0], tmp_path / "run")
    whole = load_file(run / SINGLE)
    for damage, words in (
        ({"norm.weight": None}, ("norm.weight", "missing")),
        ({"norm.weight": np.zeros(3, np.float32)}, ("norm.weight", "(3,)")),
        ({"norm.weight": np.zeros(whole["norm.weight"].shape)}, ("norm.weight", "F64")),
    ):
        save_file({name: array for name, array in (whole | damage).items() if array is not None}, run / SINGLE)
        err = _fails(capsys, run, tmp_path / "out")
        assert all(word in err for word in (str(run / SINGLE), *words)), err
    save_file(whole, run / SINGLE, metadata={"dtypes": "[1]"})
    assert "dtypes" in _fails(capsys, run, tmp_path / "out")
    (run / SINGLE).unlink()
    assert "no weights" in _fails(capsys, run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@contextmanager
def _small_disk(nbytes: int) -> Iterator[None]:
    """No file may grow beyond this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["run", "hf"])
def test_a_disk_without_room_harms_nothing(tmp_path, monkeypatch, capsys, kind):
    source, _ = _source(tmp_path / "source")
    old = _convert(source, tmp_path / "old", "--to", kind)
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    command = (source, old, "--to", kind, "--overwrite")
    with _small_disk(10_000):
        assert "cannot be written" in _fails(capsys, *command)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for module, name in ((os, "posix_fallocate"), (convert_module, "write_companions"), (convert_module, "copy")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            assert "No space left" in _fails(capsys, *command)
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "source"]
    _convert(*command)


def test_the_module_is_a_command(tmp_path):
    source, _ = _source(tmp_path / "source")
    command = [sys.executable, "-m", "qwen3next.convert", str(source), str(tmp_path / "run")]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and done.stdout.startswith("read:") and "MB/s" in done.stderr.splitlines()[-1]
    again = subprocess.run(command, capture_output=True, text=True, env=env)
    assert again.returncode == 2 and again.stderr.count("\n") == 1 and "not empty" in again.stderr


# --- Many devices

SHARDED = """
import jax, json, sys
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from qwen3next import leaves
from qwen3next.hf import load_pretrained, save_pretrained

folder, out = sys.argv[1:]
assert len(jax.devices()) == 8
mesh = jax.make_mesh((2, 4), ("a", "b"))
moved = []
real = leaves.read
leaves.read = lambda stored, *args, **how: (moved.append(stored.nbytes), real(stored, *args, **how))

def rule(path, shape):
    if path.endswith("experts.gate_proj.weight"):  # [block, run, expert, width, hidden], by expert
        return NamedSharding(mesh, P(None, None, "b", None, None))
    if path.endswith("experts.up_proj.weight"):  # rows of each, once for each of two replicas
        return NamedSharding(mesh, P(None, None, None, "b", None))
    if path.endswith("experts.down_proj.weight"):  # the last axis: whole tensors are read, and cut
        return NamedSharding(mesh, P(None, None, None, "a", "b"))
    if path == "embed_tokens.weight":
        return NamedSharding(mesh, P("a", "b"))
    if path == "norm.weight":
        return NamedSharding(mesh, P())
    return None

plain = load_pretrained(folder)
moved.clear()
model = load_pretrained(folder, sharding=rule)
total = sum(leaf.nbytes for leaf in jax.tree.leaves(plain))
for (path, a), b in zip(jax.tree.leaves_with_path(plain), jax.tree.leaves(model), strict=True):
    assert a.dtype == b.dtype and np.array_equal(a, b), path
    name = leaves.leaf_path(path)
    wanted = rule(name, a.shape)
    assert wanted is None or b.sharding == wanted, path
down = [leaf for path, leaf in jax.tree.leaves_with_path(plain) if leaves.leaf_path(path).endswith("down_proj.weight")]
experts = sum(leaf.nbytes for leaf in down if leaf.ndim == 5)
assert sum(moved) == total + 3 * (experts + plain.embed_tokens.weight.nbytes), (sum(moved), total, experts)
half = load_pretrained(folder, "bfloat16", sharding=rule)
embedding = half.embed_tokens.weight
assert embedding.dtype == "bfloat16" and embedding.sharding == rule("embed_tokens.weight", ())
save_pretrained(model, out)
print("fine")
"""


@pytest.mark.parametrize("fused", [False, True])
def test_eight_devices_read_their_own_parts(tmp_path, fused):
    tensors = read_tensors(DATA / "golden" / "c_sharded")
    (tmp_path / "source").mkdir()
    source = write_folder(
        tmp_path / "source", fuse(tensors) if fused else tensors, _config(DATA / "golden" / "c_sharded"), 3
    )
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    env |= {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", SHARDED, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout == "fine\n", done.stderr
    _same(read_tensors(tmp_path / "out"), tensors)


# --- transformers reads it


@pytest.mark.parametrize("path", FOLDERS)
def test_transformers_computes_the_same(tmp_path, path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    save_pretrained(load_pretrained(DATA / path), tmp_path / "out", max_shard_size="200KB")
    golden = load_file(DATA / path / "golden.safetensors")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values()), told
    mask = torch.from_numpy(golden.get("attention_mask", np.ones_like(golden["input_ids"]))).long()
    with torch.no_grad():
        logits = model(torch.from_numpy(golden["input_ids"]).long(), attention_mask=mask, use_cache=False).logits
    np.testing.assert_allclose(logits[mask > 0], golden["logits"][mask.numpy() > 0], atol=2e-4)
