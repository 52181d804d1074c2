"""Hugging Face `config.json` and `ModelConfig`, both ways: transformers 4 and 5 spell it differently."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from qwen3next.config import ModelConfig, RopeParameters
from qwen3next.errors import InputError, require
from qwen3next.structure import read_json, structure


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
    name = "original_max_position_embeddings"  # beside them it counts more than in them
    if rope["rope_type"] in ("llama3", "yarn", "longrope") and values.get(name) is not None:
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
    known = {**_known(ModelConfig, values), "rope_parameters": _rope(values), "dtype": dtype}
    return spelled_out(structure(known, ModelConfig))


def spelled_out(config: ModelConfig) -> ModelConfig:
    """Layers by their types alone, so that both spellings read alike."""
    kinds = tuple(kind.mixer for kind in config.layer_kinds)
    return dataclasses.replace(config, layer_types=kinds, full_attention_interval=4)


def _interval(kinds: list[str]) -> dict[str, int]:
    """`full_attention_interval`, for readers without `layer_types`, if one says which layers are which."""
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    regular = all((kind == "full_attention") == (at % interval == 0) for at, kind in enumerate(kinds, 1))
    return {"full_attention_interval": interval} if regular else {}


def _rope_values(config: ModelConfig) -> dict[str, Any]:
    """`rope_parameters`, with what a version asks for, or works out in its own way, said outright."""
    kind, longest = config.rope_parameters.rope_type, config.max_position_embeddings
    rope = {name: value for name, value in dataclasses.asdict(config.rope_parameters).items() if value is not None}
    if rope["truncate"]:
        del rope["truncate"]
    if kind in ("yarn", "llama3"):
        rope.setdefault("original_max_position_embeddings", longest)
    if kind == "yarn":
        rope.setdefault("factor", longest / rope["original_max_position_embeddings"])
    if kind == "longrope" and "factor" in rope:
        original = rope.get("original_max_position_embeddings", longest)
        rope.setdefault("attention_factor", math.sqrt(1 + math.log(rope["factor"]) / math.log(original)))
    return rope


def config_values(config: ModelConfig, end_of_text: tuple[int, ...] = ()) -> dict[str, Any]:
    """A config.json that transformers 4 and 5 both read as this config: what they spell differently stands twice."""
    rope = _rope_values(config)
    beside = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor")}
    scaling = {name: value for name, value in rope.items() if name not in beside}
    if config.rope_parameters.rope_type == "longrope" and "original_max_position_embeddings" in rope:
        beside["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    kinds = [kind.mixer for kind in config.layer_kinds]
    values = dataclasses.asdict(config) | beside
    del values["full_attention_interval"]
    return values | {
        **_interval(kinds),
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None if not end_of_text else end_of_text[0] if len(end_of_text) == 1 else list(end_of_text),
        "layer_types": kinds,
        "mlp_only_layers": list(config.mlp_only_layers),
        "model_type": "qwen3_next",
        "output_router_logits": False,
        "pad_token_id": None,
        "rope_parameters": rope,
        "rope_scaling": None if config.rope_parameters.rope_type == "default" else scaling,
        "torch_dtype": config.dtype,
        "use_cache": True,
    }


def updated_values(values: dict[str, Any], config: ModelConfig, *, with_mtp: bool) -> dict[str, Any]:
    """A parsed config.json, changed where `config` says otherwise, and unless `with_mtp` without the mtp.* tensors.

    Every other key stays, known or not.
    """
    values, before, after = dict(values), model_config(values), spelled_out(config)
    if not with_mtp:
        gone = [name for name in values if name.startswith("mtp") or name == "num_nextn_predict_layers"]
        values = {name: value for name, value in values.items() if name not in gone}
    if before.dtype != after.dtype:
        spelled = [name for name in ("dtype", "torch_dtype") if name in values] or ["dtype", "torch_dtype"]
        values |= dict.fromkeys(spelled, after.dtype)
    if before.tie_word_embeddings != after.tie_word_embeddings:
        values["tie_word_embeddings"] = after.tie_word_embeddings
    if model_config(values) != after:
        kept = ("eos_token_id", "bos_token_id", "pad_token_id", "architectures", "use_cache", "output_router_logits")
        new = config_values(config)
        values |= {name: value for name, value in new.items() if name not in kept or name not in values}
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
