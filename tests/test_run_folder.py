"""What a run writes, what it leaves alone, and what it refuses to read."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from common import tiny_config, tiny_model
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from qwen3next.checkpoint import load_checkpoint
from qwen3next.cli import load_config
from qwen3next.config import DataConfig, RunConfig, TrainConfig
from qwen3next.errors import InputError
from qwen3next.model import abstract_model
from qwen3next.resume import find_run, open_run
from qwen3next.run_folder import load_run, load_weights, save_weights
from qwen3next.tracker import JsonLines, WithOptional


def make_config(folder: Path, tokenizer: str = "bytes", overwrite: bool = False) -> TrainConfig:
    run = RunConfig(folder=str(folder), overwrite=overwrite, wandb="off")
    return TrainConfig(model=tiny_config(vocab_size=300), data=DataConfig(tokenizer=tokenizer), run=run)


def create_run(config: TrainConfig) -> Path:
    with open_run(config, find_run(config)) as folder:
        return folder


def make_tokenizer(path: Path) -> bytes:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(["some text"], trainers.BpeTrainer(vocab_size=270, special_tokens=["<|endoftext|>"]))
    tokenizer.save(str(path))
    return path.read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_back_bit_for_bit(tmp_path, dtype):
    model = tiny_model(num_hidden_layers=6, dtype=dtype)
    save_weights(tmp_path, model)
    again = load_weights(tmp_path / "model.safetensors", abstract_model(model.config))
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        assert a.dtype == b.dtype and bool((a == b).all())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_run_can_be_moved_with_its_tokenizer(tmp_path):
    bytes_of = make_tokenizer(tmp_path / "mine.json")
    folder = create_run(make_config(tmp_path / "run", str(tmp_path / "mine.json")))
    save_weights(folder, tiny_model(vocab_size=300))
    (tmp_path / "mine.json").unlink()
    moved = folder.rename(tmp_path / "elsewhere")
    assert (moved / "tokenizer.json").read_bytes() == bytes_of
    checkpoint = load_checkpoint(moved)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("some text")) == "some text"
    assert checkpoint.end_of_text == (0,)


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "model.safetensors", "tokenizer.json"])
def test_what_stands_in_a_folder_is_not_written_over(tmp_path, name):
    (tmp_path / name).write_text("mine")
    message = "not a readable TOML" if name == "config.toml" else rf"a run \({name}\) without a state to go on from"
    with pytest.raises(InputError, match=message):
        create_run(make_config(tmp_path))
    assert (tmp_path / name).read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_a_run_may_replace_itself_with_its_own_tokenizer(tmp_path):
    bytes_of = make_tokenizer(tmp_path / "tokenizer.json")
    create_run(make_config(tmp_path, str(tmp_path / "tokenizer.json"), overwrite=True))
    assert (tmp_path / "tokenizer.json").read_bytes() == bytes_of


def test_a_tokenizer_that_cannot_be_read_removes_nothing(tmp_path):
    (tmp_path / "model.safetensors").write_text("old")
    with pytest.raises(InputError, match="cannot be written"):
        create_run(make_config(tmp_path, str(tmp_path / "none.json"), overwrite=True))
    assert (tmp_path / "model.safetensors").read_text() == "old"


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        find_run(make_config(tmp_path / "file"))


def test_damaged_weights_are_named(tmp_path):
    folder = create_run(make_config(tmp_path))
    with pytest.raises(InputError, match="holds no weights yet"):
        load_run(folder)
    path = folder / "model.safetensors"
    save_weights(folder, tiny_model(vocab_size=300))
    whole = load_file(path)
    for damage, message in (
        ({"norm.weight": None}, "tensor norm.weight is missing"),
        ({"norm.weight": np.zeros(7, np.float32)}, r"tensor norm.weight is \(7,\); it must be \(32,\)"),
        ({"more": np.zeros(1, np.float32)}, "1 tensors have no place in the model, the first is more"),
    ):
        arrays = {name: array for name, array in (whole | damage).items() if array is not None}
        save_file(arrays, path)
        with pytest.raises(InputError, match=message):
            load_run(folder)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="not a readable safetensors file"):
        load_run(folder)


def test_a_tracker_that_fails_stops_nothing(tmp_path, capsys):
    class Broken:
        calls = 0

        def log(self, step: int, metrics: dict[str, float]) -> None:
            self.calls += 1
            raise RuntimeError("no connection")

        def close(self) -> None:
            raise RuntimeError("still none")

    broken = Broken()
    tracker = WithOptional(JsonLines(tmp_path / "metrics.jsonl"), broken)
    tracker.log(1, {"loss": 2.0})
    tracker.log(2, {"loss": 1.0})
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 2.0), (2, 1.0)]
    assert broken.calls == 1 and capsys.readouterr().err.count("no connection") == 1


def test_a_config_survives_its_toml(tmp_path):
    config = make_config(tmp_path / "run")
    model = dataclasses.replace(config.model, layer_types=("full_attention",) * 4, mlp_only_layers=(1, 3))
    config = dataclasses.replace(config, model=model)
    create_run(config)
    save_weights(tmp_path / "run", tiny_model(vocab_size=300))
    assert load_config(tmp_path / "run" / "config.toml") == config
