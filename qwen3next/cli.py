"""A TOML preset and command-line overrides, into `TrainConfig`; nothing misspelt passes."""

import contextlib
import dataclasses
import io
import sys
import tomllib
from pathlib import Path
from typing import Any

import cattrs
import tomli_w
import tyro
from cattrs.errors import ForbiddenExtraKeysError

from qwen3next.config import TrainConfig
from qwen3next.errors import InputError


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind, accepted in ((int, (int,)), (float, (int, float)), (str, (str,)), (bool, (bool,))):

        def exactly(value: Any, _: type, kind: type = kind, accepted: tuple[type, ...] = accepted) -> Any:
            if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
                raise InputError(f"{value!r} is not {'an' if kind is int else 'a'} {kind.__name__}")
            return kind(value)

        converter.register_structure_hook(kind, exactly)
    return converter


def _describe(error: BaseException, _: Any) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        allowed = ", ".join(field.name for field in dataclasses.fields(error.cl))
        return f"unknown key {', '.join(sorted(error.extra_fields))}; allowed: {allowed}"
    if isinstance(error, KeyError):
        return f"required key {error} is missing"
    return str(error) or type(error).__name__


def structure(values: dict[str, Any]) -> TrainConfig:
    """`TrainConfig` of nested tables. `InputError` says which key is unknown, missing or of the wrong type."""
    try:
        return _converter().structure(values, TrainConfig)
    except Exception as error:
        messages = cattrs.transform_error(error, path="config", format_exception=_describe)
        raise InputError("; ".join(message.replace(" @ config.", ", in ") for message in messages)) from error


def load_config(path: Path) -> TrainConfig:
    """The config of a TOML file."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable TOML file ({error})") from error
    try:
        return structure(values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def dump_config(config: TrainConfig) -> str:
    """The whole config as TOML; `load_config` of it gives an equal one."""

    def present(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: present(item) for key, item in value.items() if item is not None}
        return list(value) if isinstance(value, tuple) else value

    return tomli_w.dumps(present(dataclasses.asdict(config)))


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
    return _override(load_config(Path(args[0])), args[1:], usage)
