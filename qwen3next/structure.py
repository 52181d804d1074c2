"""Plain values (of TOML or JSON) into the frozen dataclasses; nothing misspelt and no wrong type passes."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import cattrs
from cattrs.errors import ForbiddenExtraKeysError

from qwen3next.errors import InputError, require

T = TypeVar("T")


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind, accepted in ((int, (int,)), (float, (int, float)), (str, (str,)), (bool, (bool,))):

        def exactly(value: Any, _: type, kind: type = kind, accepted: tuple[type, ...] = accepted) -> Any:
            if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
                raise InputError(f"{value!r} is not {'an' if kind is int else 'a'} {kind.__name__}")
            return kind(value)

        converter.register_structure_hook(kind, exactly)

    def listed(value: Any, cls: Any) -> Any:  # a string would be taken for a list of letters
        if not isinstance(value, list | tuple):
            raise InputError(f"{value!r} is not a list")
        return tuple(converter.structure(item, get_args(cls)[0]) for item in value)

    converter.register_structure_hook_func(lambda cls: get_origin(cls) is tuple, listed)
    return converter


def _describe(error: BaseException, _: Any) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        allowed = ", ".join(field.name for field in dataclasses.fields(error.cl))
        return f"unknown key {', '.join(sorted(error.extra_fields))}; allowed: {allowed}"
    if isinstance(error, KeyError):
        return f"required key {error} is missing"
    if isinstance(error, (TypeError, AttributeError)):  # cattrs looked for keys or entries where there are none
        return "the value is of the wrong kind; a table or list is needed, or neither"
    return re.sub(r"^(.*) not in literal typing\.Literal\[(.*)\]$", r"'\1' is not known; allowed: \2", str(error))


def structure(values: dict[str, Any], cls: type[T]) -> T:
    """An instance of `cls`. `InputError`, one line, says which key is unknown, missing, of a wrong type or value."""
    try:
        return _converter().structure(values, cls)
    except Exception as error:
        messages = cattrs.transform_error(error, path="$", format_exception=_describe)
        lines = [re.sub(r" @ \$\.?(.*)$", lambda at: f", in {at[1]}" if at[1] else "", text) for text in messages]
        raise InputError("; ".join(" ".join(line.split()) for line in lines)) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; `InputError` names the file if it is missing, unreadable or something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable JSON file ({error})") from error
    require(isinstance(values, dict), f"{path}: must hold a JSON object")
    return values
