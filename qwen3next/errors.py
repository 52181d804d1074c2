"""The one exception that means "the input is wrong", as opposed to a fault of ours."""

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, get_args


class InputError(ValueError):
    """Bad input: a config, file, name or flag. The message is one line: what is wrong and what is allowed."""


def require(condition: bool, message: str) -> None:
    """Raises `InputError(message)` unless the condition holds."""
    if not condition:
        raise InputError(message)


def require_positive(section: str, **values: int | float) -> None:
    """Raises `InputError` for the first value that is not above zero and finite."""
    for name, value in values.items():
        require(0 < value < math.inf, f"{section}.{name} is {value}; it must be above 0 and finite")


def require_choice(name: str, value: str, allowed: object) -> None:
    """Raises `InputError` unless the value is one of a `Literal`'s."""
    choices = get_args(allowed)
    require(value in choices, f"{name} is {value!r}; allowed: {', '.join(choices)}")


@contextmanager
def exit_on_input_error() -> Iterator[None]:
    """Around a script's main: an `InputError` becomes one line on standard error and exit status 2."""
    try:
        yield
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


class Parser(argparse.ArgumentParser):
    """A command line whose faults are bad input like any other."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; {self.prog} --help lists what is allowed")
