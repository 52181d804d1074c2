"""Hugging Face `config.json`, in the spelling of transformers 4 and of 5, to `ModelConfig`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from qwen3next.config import ModelConfig, RopeParameters
from qwen3next.errors import InputError, require

_TUPLES = ("layer_types", "mlp_only_layers", "short_factor", "long_factor")


def _fields(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """The entries that the dataclass knows and that are not null, lists as tuples."""
    names = {field.name for field in dataclasses.fields(cls)}
    present = {name: value for name, value in values.items() if name in names and value is not None}
    return {name: tuple(value) if name in _TUPLES else value for name, value in present.items()}


def _rope(values: dict[str, Any]) -> RopeParameters:
    """A non-empty `rope_scaling` (v4) replaces `rope_parameters` (v5); top-level keys fill what is missing in it."""
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    for name in ("rope_theta", "partial_rotary_factor"):
        if rope.get(name) is None and values.get(name) is not None:
            rope[name] = values[name]
    return RopeParameters(**_fields(RopeParameters, rope))


def model_config(values: dict[str, Any]) -> ModelConfig:
    """`ModelConfig` of a parsed config.json. Keys without a meaning for the model are passed over.

    Raises `InputError` for another `model_type`, an unknown dtype or rope type, or sizes that do not fit.
    """
    kind = values.get("model_type", "qwen3_next")
    require(kind == "qwen3_next", f"model_type is {kind!r}; allowed: 'qwen3_next'")
    dropout = values.get("attention_dropout") or 0
    require(dropout == 0, f"attention_dropout is {dropout}; only 0 is implemented")
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    try:
        config = ModelConfig(**{**_fields(ModelConfig, values), "rope_parameters": _rope(values), "dtype": dtype})
    except TypeError as error:
        raise InputError(f"config.json holds a value of the wrong type: {error}") from error
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
                return tuple(found) if isinstance(found, list) else (found,)
    return ()
