"""A TOML preset and command-line overrides, into `TrainConfig`; nothing misspelt passes."""

import contextlib
import dataclasses
import io
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w
import tyro

from qwen3next.config import ModelConfig, TrainConfig
from qwen3next.errors import InputError, require
from qwen3next.hf_config import read_config
from qwen3next.remat import Remat
from qwen3next.structure import structure

# A model's sizes are never taken from a default: these keys must stand in the file.
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "num_experts",
)
_SHORT = {"--resume": "--run.resume", "--dry-run": "--run.dry-run", "--lora.dry-run": "--run.dry-run"}
_SHORT |= {"--compile-only": "--run.compile-only", "--topology": "--run.topology"}


def _base_model(folder: Path) -> ModelConfig:
    """The architecture that a run or a Hugging Face folder holds."""
    here = folder.is_dir() and any((folder / name).is_file() for name in ("config.toml", "config.json"))
    require(here, f"run.init_from {folder} holds no checkpoint; needed: a run of train.py or a Hugging Face folder")
    path = folder / "config.toml"
    return load_config(path, "").model if path.is_file() else read_config(folder)


def _base_tokenizer(folder: Path) -> str:
    """The tokenizer of a run or a Hugging Face folder; `bytes` if there is none."""
    path = folder / "config.toml"
    if path.is_file():
        return load_config(path, "").data.tokenizer
    return str((folder / "tokenizer.json").resolve()) if (folder / "tokenizer.json").is_file() else "bytes"


def parse_config(text: str, name: str, init_from: str | None = None) -> TrainConfig:
    """The config of a TOML text, which errors call `name`.

    `init_from` stands for the text's `run.init_from`, the folder that tells the model's sizes and the tokenizer if the
    text does not.
    """
    try:
        values = tomllib.loads(text)
    except ValueError as error:
        raise InputError(f"{name}: not a readable TOML file ({error})") from error
    try:
        model = values.get("model")
        if isinstance(model, dict):
            missing = [f"model.{key}" for key in _REQUIRED if key not in model]
            require(not missing, f"required keys are missing: {', '.join(missing)}")
        run = values.setdefault("run", {})
        if isinstance(run, dict):
            run |= {} if init_from is None else {"init_from": init_from}
            base = run.get("init_from")
            if "model" not in values and isinstance(base, str) and base:
                values["model"] = _present(dataclasses.asdict(_base_model(Path(base))))
                data = values.setdefault("data", {})
                if isinstance(data, dict):
                    data.setdefault("tokenizer", _base_tokenizer(Path(base)))
        data = values.get("data")
        if isinstance(data, dict) and isinstance(data.get("source"), str):
            data["source"] = [data["source"]]
        compute = values.get("compute")
        if isinstance(compute, dict) and isinstance(compute.get("remat"), str):
            compute["remat"] = dataclasses.asdict(Remat.of(compute["remat"]))
        return structure(values, TrainConfig)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def load_config(path: Path, init_from: str | None = None) -> TrainConfig:
    """The config of a TOML file. A relative `data.tokenizer` that lies beside the file is that one."""
    try:
        config = parse_config(path.read_text(encoding="utf-8"), str(path), init_from)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a readable TOML file ({error})") from error
    beside = path.parent / config.data.tokenizer
    if config.data.tokenizer == "bytes" or not beside.is_file():
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(beside.resolve())))


def dump_config(config: TrainConfig) -> str:
    """The whole config as TOML; `load_config` of it gives an equal one."""
    return tomli_w.dumps(_present(dataclasses.asdict(config)))


def _present(value: Any) -> Any:
    """Without what is `None`, for which TOML has no word."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return list(value) if isinstance(value, tuple) else value


def _override(config: TrainConfig, args: list[str], program: str) -> TrainConfig:
    """`--a.b value` for every field. tyro reports a fault in a box of many lines; here it becomes one."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(TrainConfig, default=config, args=args, prog=program)
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line.strip(" │╭╮╰╯─") for line in printed.getvalue().splitlines()[1:]]
        told = [line for line in lines if line and "helptext" not in line]
        raise InputError(" ".join(told)) from stop


def _spell_out(args: list[str]) -> list[str]:
    """Short forms as the flags of fields: `--resume X`, `--dry-run`, and `--compute.remat PLACEMENT/POLICY`."""
    args, spelt = [part for arg in args for part in ([arg] if arg[:2] != "--" else arg.split("=", 1))], []
    while args:
        arg, *args = args
        if arg == "--compute.remat" and args:
            remat, *args = Remat.of(args[0]), *args[1:]
            barrier = "barrier" if remat.barrier else "no-barrier"
            spelt += ["--compute.remat.placement", remat.placement, "--compute.remat.policy", remat.policy]
            spelt.append(f"--compute.remat.{barrier}")
        else:
            spelt.append(_SHORT.get(arg, arg))
    return spelt


def parse(argv: list[str]) -> TrainConfig:
    """`PROGRAM CONFIG.toml [--a.b value ...]`; `--help` after CONFIG shows its values as the defaults."""
    program, *args = argv
    usage = f"{Path(program).name} CONFIG.toml"
    if not args or args[0].startswith("-"):
        if {"-h", "--help"} & set(args):
            print(
                f"usage: {usage} [--section.key value ...]\n\n{usage} --help lists every key and the config's values."
            )
            sys.exit(0)
        raise InputError(f"the first argument must be a config, {usage} [--section.key value ...]")
    spelt = _spell_out(args[1:])
    named = [value for flag, value in pairwise(spelt) if flag in ("--run.init-from", "--run.init_from")]
    return _override(load_config(Path(args[0]), named[-1] if named else None), spelt, usage)
