"""A run's folder: `config.toml`, `metrics.jsonl`, `model.safetensors`, and `tokenizer.json` if it uses one.

It needs nothing from outside: the config names the tokenizer's copy. Weights are leaves by path.
"""

import dataclasses
import os
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from qwen3next.cli import dump_config, load_config
from qwen3next.config import TrainConfig
from qwen3next.errors import InputError, require
from qwen3next.model import Qwen3Next, abstract_model
from qwen3next.tree import leaf_path

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
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    # safetensors writes the buffer of an array and ignores its strides
    arrays = {leaf_path(path): np.ascontiguousarray(jax.device_get(leaf)) for path, leaf in leaves}
    partial = folder / f"{WEIGHTS}.partial"
    save_file(arrays, partial, metadata={"format": "qwen3next"})
    os.replace(partial, folder / WEIGHTS)


def load_weights(path: Path, skeleton: Qwen3Next) -> Qwen3Next:
    """The tree of `skeleton` (shapes and dtypes) with the file's leaves; `InputError` names one that does not fit."""
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a readable safetensors file ({error})") from error

    def take(key: tuple, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = leaf_path(key)
        require(name in arrays, f"{path}: tensor {name} is missing; the run's config asks for it")
        array = arrays.pop(name)
        require(array.shape == like.shape, f"{path}: tensor {name} is {array.shape}; it must be {like.shape}")
        return jnp.asarray(array, like.dtype)

    model = jax.tree_util.tree_map_with_path(take, skeleton)
    require(
        not arrays, f"{path}: {len(arrays)} tensors have no place in the model, the first is {min(arrays, default='')}"
    )
    return model


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
