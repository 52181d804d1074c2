"""Claims about a config, checked: `python -m qwen3next.check remat|lora|packing CONFIG.toml [--a.b value ...]`.

`packing` takes a checkpoint's folder, too. Exit status 0 if all hold, 1 if one does not, 2 for bad input.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from qwen3next.checkpoint import load_checkpoint
from qwen3next.cli import parse
from qwen3next.errors import InputError, exit_on_input_error
from qwen3next.lora_checks import lora_checks
from qwen3next.model import Qwen3Next
from qwen3next.packing_checks import packing_checks
from qwen3next.remat_checks import Check, remat_checks, shrunk

CHECKS = ("remat", "lora", "packing")


def _checks(what: str, argv: list[str]) -> tuple[str, Iterator[Check]]:
    """A title and the checks that are asked for."""
    if what == "packing" and len(argv) == 1 and Path(argv[0]).is_dir():
        checkpoint = load_checkpoint(Path(argv[0]))
        return f"packing {argv[0]}", packing_checks(checkpoint.model, checkpoint.compute)
    config = parse([f"check {what}", *argv])
    if what == "packing":
        model = Qwen3Next(shrunk(config.model), key=jax.random.key(config.run.seed))
        return "packing, small sizes", packing_checks(model, config.compute)
    if what == "lora":
        return f"lora {', '.join(config.lora.targets)}", lora_checks(config)
    return f"remat {config.compute.remat}", remat_checks(config.model, config.compute)


def main(argv: list[str]) -> int:
    """Prints a row for each check; the exit status."""
    if not argv or argv[0] not in CHECKS:
        given = f"{argv[0]!r} is unknown" if argv else "what to check is missing"
        raise InputError(f"{given}; allowed: {', '.join(CHECKS)}, then CONFIG.toml [--section.key value ...]")
    title, checks = _checks(argv[0], argv[1:])
    table, failed = Table("check", "must be", "is", "", title=title), 0
    for check in checks:
        table.add_row(check.name, check.expected, check.found, "pass" if check.passed else "FAIL")
        failed += not check.passed
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    with exit_on_input_error():
        sys.exit(main(sys.argv[1:]))
