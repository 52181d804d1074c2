"""Hugging Face `config.json`, in the spelling of transformers 4 and of 5, to `ModelConfig`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from qwen3next.config import ModelConfig, RopeParameters
from qwen3next.errors import InputError, require
from qwen3next.structure import structure


def _known(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """The entries that the dataclass has a field for and that are not null."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in values.items() if name in names and value is not None}


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """A non-empty `rope_scaling` (v4) replaces `rope_parameters` (v5); top-level keys fill what is missing in it."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    require(isinstance(given, dict), f"rope_scaling or rope_parameters is {given!r}; it must be an object or null")
    rope = {"rope_type": given.get("type", "default")} | _known(RopeParameters, given)
    for name in ("rope_theta", "partial_rotary_factor"):
        if name not in rope and values.get(name) is not None:
            rope[name] = values[name]
    return rope


def model_config(values: dict[str, Any]) -> ModelConfig:
    """`ModelConfig` of a parsed config.json. Keys without a meaning for the model are passed over.

    Raises `InputError` for another `model_type`, a wrong type, an unknown dtype or rope type, or sizes that do not fit.
    """
    kind = values.get("model_type", "qwen3_next")
    require(kind == "qwen3_next", f"model_type is {kind!r}; allowed: 'qwen3_next'")
    dropout = values.get("attention_dropout") or 0
    require(dropout == 0, f"attention_dropout is {dropout}; only 0 is implemented")
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    config = structure({**_known(ModelConfig, values), "rope_parameters": _rope(values), "dtype": dtype}, ModelConfig)
    kinds = tuple(kind.mixer for kind in config.layer_kinds)  # spelled out, so that both spellings read alike
    return dataclasses.replace(config, layer_types=kinds, full_attention_interval=4)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; `InputError` names the file if it is missing, unreadable or something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable JSON file ({error})") from error
    require(isinstance(values, dict), f"{path}: must hold a JSON object")
    return values


def read_config(folder: Path) -> ModelConfig:
    """The architecture of a Hugging Face folder."""
    path = folder / "config.json"
    try:
        return model_config(read_json(path))
    except InputError as error:
        raise error if str(path) in str(error) else InputError(f"{path}: {error}") from error


def read_end_of_text(folder: Path) -> tuple[int, ...]:
    """Ids that end a text: generation_config.json's `eos_token_id`, else config.json's; may be empty."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            found = read_json(folder / name).get("eos_token_id")
            if found is not None:
                ends = tuple(found) if isinstance(found, list) else (found,)
                whole = all(type(end) is int for end in ends)
                require(whole, f"{folder / name}: eos_token_id is {found!r}; it must be an integer or a list of them")
                return ends
    return ()
