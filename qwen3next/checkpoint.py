"""Anything that can be decoded from: a run's folder, a Hugging Face folder, or an adapter that names one of these."""

import dataclasses
import hashlib
from pathlib import Path
from typing import NamedTuple

import jax

from qwen3next import adapters
from qwen3next.adapters import is_adapter, read_adapter
from qwen3next.cli import load_config
from qwen3next.config import Compute, ModelConfig, TrainConfig
from qwen3next.errors import InputError, require
from qwen3next.factors import with_adapters
from qwen3next.hf import load_pretrained
from qwen3next.hf_config import read_config, read_end_of_text, spelled_out
from qwen3next.mesh import leaf_sharding
from qwen3next.model import Qwen3Next, abstract_model
from qwen3next.run_folder import CONFIG, TOKENIZER, WEIGHTS, is_run, load_run, load_weights
from qwen3next.structure import read_json
from qwen3next.tokenizer import Tokenizer, load_tokenizer

_FREE = ("dtype", "router_aux_loss_coef", "initializer_range")  # may differ between a base and what begins with it
_SAMPLES, _SAMPLE = 64, 4096


class Checkpoint(NamedTuple):
    """A model, its tokenizer (`None` if the folder has none), the ids that end a text, and how the model computes."""

    model: Qwen3Next
    tokenizer: Tokenizer | None
    end_of_text: tuple[int, ...]
    compute: Compute


def default_compute(config: ModelConfig) -> Compute:
    """In the dtype of the parameters; float32 for float16, whose numbers are too small for activations."""
    return Compute(dtype="bfloat16" if config.dtype == "bfloat16" else "float32")


def _is_published(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _require_folder(folder: Path, role: str = "") -> None:
    require(folder.is_dir(), f"{role}{folder} is not a folder; allowed: a run of train.py or a Hugging Face folder")


def check_base(folder: Path, config: ModelConfig, role: str) -> ModelConfig:
    """The architecture of a folder with a whole model, which must be that of `config`. `role` is what errors call it.

    Raises `InputError` for a folder that holds none, an adapter, or another architecture, with the field that differs.
    """
    _require_folder(folder, role)
    run = is_run(folder)
    require(run or _is_published(folder), f"{role}{folder} holds no checkpoint; needed: {CONFIG} or config.json")
    require(not is_adapter(folder), f"{role}{folder} holds an adapter; needed: a whole model")
    require(not run or (folder / WEIGHTS).is_file(), f"{role}{folder} holds no weights yet; needed: {WEIGHTS}")
    held = load_config(folder / CONFIG).model if run else read_config(folder)
    resolved = [_resolved(one) for one in (config, held)]
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = (getattr(one, field.name) for one in resolved)
        require(
            field.name in _FREE or ours == theirs,
            f"model.{field.name} is {ours!r}, and {role}{folder} has {theirs!r}; they must be equal",
        )
    return held


def load_base(folder: Path, config: ModelConfig, role: str) -> Qwen3Next:
    """The model of either kind of folder, as a start for `config`: with its dtype and settings, in a mesh that is set.

    Raises `InputError` as `check_base` does, and for damage.
    """
    held = check_base(folder, config, role)
    dtype = None if held.dtype == config.dtype else config.dtype
    if is_run(folder):
        return load_weights(folder / WEIGHTS, abstract_model(config), dtype, leaf_sharding)
    model = load_pretrained(folder, dtype, sharding=leaf_sharding)
    tied = model.lm_head is None
    require(
        tied == config.tie_word_embeddings,
        f"{role}{folder} ties embedding and head in its config.json and has a head of its own; set "
        f"model.tie_word_embeddings to false there",
    )
    return jax.tree.unflatten(jax.tree.structure(abstract_model(config)), jax.tree.leaves(model))


def _resolved(config: ModelConfig) -> ModelConfig:
    """With the kind of each layer said outright, so that two spellings of one order are equal."""
    dense = tuple(at for at, kind in enumerate(config.layer_kinds) if kind.mlp == "dense")
    return dataclasses.replace(spelled_out(config), mlp_only_layers=dense, decoder_sparse_step=1)


def base_of(adapter: Path) -> Path:
    """The folder of the whole model that an adapter's folder says it belongs to; `InputError` if it is not there."""
    base = read_json(adapter / adapters.CONFIG).get("base_model_name_or_path")
    there = isinstance(base, str) and base != "" and Path(base).is_dir()
    require(there, f"{adapter} is an adapter of {base!r}, which is no folder here; allowed: BASE --adapter {adapter}")
    base = Path(str(base))
    require(not is_adapter(base), f"{adapter} is an adapter of {base}, which is an adapter too; needed: a whole model")
    trained_on = adapters.base_fingerprint(adapter)
    require(
        trained_on in ("", fingerprint(base)),
        f"{base} no longer holds the weights that the adapter in {adapter} was trained on; allowed: put them back, or "
        f"BASE --adapter {adapter}",
    )
    return base


def fingerprint(folder: Path) -> str:
    """SHA-256 of the headers of a folder's weights and of samples spread over them: enough to tell two trainings."""
    digest = hashlib.sha256()
    try:
        for file in sorted(folder.glob("*.safetensors")):
            size = file.stat().st_size
            with file.open("rb") as stream:
                digest.update(stream.read(8 + min(int.from_bytes(stream.read(8), "little"), size)))
                for sample in range(_SAMPLES):
                    stream.seek(size * sample // _SAMPLES)
                    digest.update(stream.read(_SAMPLE))
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error})") from error
    return digest.hexdigest()


def _load_any_run(folder: Path) -> tuple[TrainConfig, Qwen3Next]:
    """As `load_run`, also of a run that trained adapters."""
    config = load_config(folder / CONFIG)
    if not config.lora.targets:
        return load_run(folder)
    require(is_adapter(folder), f"{folder} holds no adapter yet; needed: {adapters.CONFIG}")
    base = load_base(base_of(folder), config.model, f"the base of {folder}, ")
    return config, with_adapters(base, [(str(folder), read_adapter(folder))])[0]


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads either kind of folder, or an adapter's with the base that it names; `InputError` if it is damaged.

    A run that was made from a Hugging Face folder has that one's config.json, which then says how a text ends.
    """
    _require_folder(folder)
    published = _is_published(folder)
    if is_adapter(folder) and not is_run(folder) and not published:
        checkpoint = load_checkpoint(base_of(folder))
        return checkpoint._replace(model=with_adapters(checkpoint.model, [(str(folder), read_adapter(folder))])[0])
    require(is_run(folder) or published, f"{folder} holds no checkpoint; needed: {CONFIG} or config.json")
    if is_run(folder):
        config, model = _load_any_run(folder)
        compute = config.compute
        if not published:
            tokenizer = load_tokenizer(config.data.tokenizer)
            return Checkpoint(model, tokenizer, (tokenizer.end_of_text,), compute)
    else:
        model = load_pretrained(folder)
        compute = default_compute(model.config)
    ends, path = read_end_of_text(folder), folder / TOKENIZER
    tokenizer = load_tokenizer(str(path), ends[0] if ends else None) if path.is_file() else None
    return Checkpoint(model, tokenizer, ends or ((tokenizer.end_of_text,) if tokenizer else ()), compute)
