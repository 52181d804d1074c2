"""A run's folder: `config.toml`, `metrics.jsonl`, `model.safetensors`, and `tokenizer.json` if it uses one.

It needs nothing from outside: the config names the tokenizer's copy. Weights are leaves by path.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from qwen3next.cli import dump_config, load_config
from qwen3next.config import TrainConfig
from qwen3next.errors import InputError, require
from qwen3next.leaves import find_faults, leaves_by_path, load_leaves, require_no
from qwen3next.model import Qwen3Next, abstract_model
from qwen3next.tensor_files import read_header
from qwen3next.tensor_writer import kind_spec, lay_out_file, new_file, write

CONFIG, METRICS, WEIGHTS, TOKENIZER = "config.toml", "metrics.jsonl", "model.safetensors", "tokenizer.json"


def check_run_folder(config: TrainConfig) -> None:
    """Raises `InputError` if the run's folder is a file, or holds a run or part of one and may not be replaced."""
    folder = Path(config.run.folder)
    require(not folder.exists() or folder.is_dir(), f"run.folder {folder} is a file; it must be a folder or a new name")
    held = [name for name in (CONFIG, METRICS, WEIGHTS, TOKENIZER) if (folder / name).exists()]
    require(
        not held or config.run.overwrite,
        f"run.folder {folder} already holds a run ({', '.join(held)}); allowed: another folder, or --run.overwrite",
    )


def create_run(config: TrainConfig) -> Path:
    """The run's folder, with its config and tokenizer. What it held of a run is removed once all is at hand."""
    check_run_folder(config)
    folder, kept, tokenizer = Path(config.run.folder), config, None
    try:
        if config.data.tokenizer != "bytes":
            tokenizer = Path(config.data.tokenizer).read_bytes()
            kept = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=TOKENIZER))
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, WEIGHTS, TOKENIZER):
            (folder / name).unlink(missing_ok=True)
        if tokenizer is not None:
            (folder / TOKENIZER).write_bytes(tokenizer)
        (folder / CONFIG).write_text(dump_config(kept), encoding="utf-8")
    except OSError as error:
        raise InputError(f"run.folder {folder} cannot be written ({error})") from error
    return folder


def save_weights(folder: Path, model: Qwen3Next) -> None:
    """Writes the model's leaves under a temporary name and renames, so that a kill leaves the old file or the new."""
    arrays = dict(zip((leaf.path for leaf in leaves_by_path(model)), jax.tree.leaves(model), strict=True))
    specs = {path: kind_spec(array.dtype, array.shape) for path, array in arrays.items()}
    with new_file(folder / WEIGHTS) as partial:
        layout = lay_out_file(partial, specs, {"format": "qwen3next"})
        layout.create()
        for path, array in arrays.items():
            write(layout.tensors[path], np.asarray(jax.device_get(array)))


def load_weights(path: Path, skeleton: Qwen3Next) -> Qwen3Next:
    """The tree of `skeleton` with the file's leaves in the file's dtypes; `InputError` names one that does not fit."""
    tensors, _ = read_header(path)
    leaves = leaves_by_path(skeleton)
    require_no(find_faults(path, leaves, tensors))
    return load_leaves(skeleton, leaves, tensors)


def is_run(folder: Path) -> bool:
    """Whether the folder is a run of `train.py`."""
    return (folder / CONFIG).is_file()


def load_run(folder: Path) -> tuple[TrainConfig, Qwen3Next]:
    """Config, its tokenizer path made absolute, and trained model of a run's folder."""
    config = load_config(folder / CONFIG)
    if config.data.tokenizer != "bytes":
        tokenizer = str((folder / config.data.tokenizer).resolve())
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=tokenizer))
    require((folder / WEIGHTS).is_file(), f"{folder} holds no weights yet; needed: {WEIGHTS}")
    return config, load_weights(folder / WEIGHTS, abstract_model(config.model))
