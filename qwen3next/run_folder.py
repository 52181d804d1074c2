"""A run's folder: `config.toml`, `metrics.jsonl`, `model.safetensors`, `states/`, and `tokenizer.json` if it uses one.

It needs nothing from outside: the config names the tokenizer's copy. Weights are leaves by path. A run that trains
adapters holds these in place of weights, as a PEFT folder does, and its config names the base.
"""

import dataclasses
import shutil
from pathlib import Path

import jax

from qwen3next import adapters
from qwen3next.cli import dump_config, load_config
from qwen3next.config import StoredDtype, TrainConfig
from qwen3next.data import chat
from qwen3next.errors import require
from qwen3next.hosts import fetch, leads
from qwen3next.leaves import ShardingRule, find_faults, leaves_by_path, load_leaves, require_no
from qwen3next.model import Qwen3Next, abstract_model
from qwen3next.tensor_files import read_header
from qwen3next.tensor_writer import kind_spec, lay_out_file, new_file, write

CONFIG, METRICS, WEIGHTS, TOKENIZER = "config.toml", "metrics.jsonl", "model.safetensors", "tokenizer.json"
STATES, WANDB_ID = "states", "wandb.id"
ADAPTER = (adapters.WEIGHTS, adapters.CONFIG)


def write_config(config: TrainConfig, folder: Path) -> None:
    """Writes `config.toml`, and beside it the tokenizer that it names, as `tokenizer.json`, and the chat template if it
    has messages; each file whole or not at all."""
    if config.run.init_from:
        base = str(Path(config.run.init_from).resolve())
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, init_from=base))
    if config.data.tokenizer != "bytes":
        tokenizer = Path(config.data.tokenizer)
        _replace(folder / TOKENIZER, tokenizer.read_bytes())
        for name in (chat.SETTINGS, chat.TEMPLATE) if config.data.messages_field else ():
            if tokenizer.with_name(name).is_file():
                _replace(folder / name, tokenizer.with_name(name).read_bytes())
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=TOKENIZER))
    _replace(folder / CONFIG, dump_config(config).encode())


def begin_run(config: TrainConfig, folder: Path) -> None:
    """Readies the folder for a first step: nothing stays of another run that it held."""
    write_config(config, folder)
    tokenizer = (TOKENIZER, chat.SETTINGS, chat.TEMPLATE) if config.data.tokenizer == "bytes" else ()
    for name in (METRICS, WEIGHTS, *ADAPTER, WANDB_ID, *tokenizer):
        (folder / name).unlink(missing_ok=True)
    if (folder / STATES).exists():
        shutil.rmtree(folder / STATES)


def _replace(path: Path, content: bytes) -> None:
    with new_file(path) as partial:
        partial.write_bytes(content)


def save_weights(folder: Path, model: Qwen3Next) -> None:
    """Writes the model's leaves under a temporary name and renames, so that a kill leaves the old file or the new."""
    arrays = dict(zip((leaf.path for leaf in leaves_by_path(model)), jax.tree.leaves(model), strict=True))
    if not leads():
        for array in arrays.values():
            fetch(array)  # the process that writes asks for all parts
        return
    specs = {path: kind_spec(array.dtype, array.shape) for path, array in arrays.items()}
    with new_file(folder / WEIGHTS) as partial:
        layout = lay_out_file(partial, specs, {"format": "qwen3next"})
        layout.create()
        for path, array in arrays.items():
            write(layout.tensors[path], fetch(array))


def save_trained(folder: Path, model: Qwen3Next, config: TrainConfig, base_fingerprint: str) -> None:
    """Writes what a run trains: the model, or its adapters alone, with the fingerprint of what they stand on."""
    run, lora = config.run, config.lora
    if lora.targets:
        place = {"base": str(Path(run.init_from).resolve()), "fingerprint": base_fingerprint}
        adapters.save_adapter(model, folder, **place, dropout=lora.dropout, rslora=lora.rslora)
    else:
        save_weights(folder, model)


def load_weights(
    path: Path, skeleton: Qwen3Next, dtype: StoredDtype | None = None, sharding: ShardingRule | None = None
) -> Qwen3Next:
    """The tree of `skeleton` with the file's leaves, in the file's dtypes or, decay parameters left out, in `dtype`.

    `InputError` names a leaf that does not fit.
    """
    tensors, _ = read_header(path)
    leaves = leaves_by_path(skeleton)
    require_no(find_faults(path, leaves, tensors))
    return load_leaves(skeleton, leaves, tensors, dtype, sharding)


def is_run(folder: Path) -> bool:
    """Whether the folder is a run of `train.py`."""
    return (folder / CONFIG).is_file()


def load_run(folder: Path) -> tuple[TrainConfig, Qwen3Next]:
    """Config and trained model of a run's folder."""
    config = load_config(folder / CONFIG)
    require((folder / WEIGHTS).is_file(), f"{folder} holds no weights yet; needed: {WEIGHTS}")
    return config, load_weights(folder / WEIGHTS, abstract_model(config.model))
