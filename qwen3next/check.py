"""Claims about a config, checked: `python -m qwen3next.check remat|lora CONFIG.toml [--a.b value ...]`.

Exit status 0 if all hold, 1 if one does not, 2 for bad input.
"""

import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table

from qwen3next.cli import parse
from qwen3next.config import TrainConfig
from qwen3next.errors import InputError, exit_on_input_error
from qwen3next.lora_checks import lora_checks
from qwen3next.remat_checks import Check, remat_checks

CHECKS: dict[str, Callable[[TrainConfig], Iterator[Check]]] = {
    "remat": lambda config: remat_checks(config.model, config.compute),
    "lora": lora_checks,
}
TITLES: dict[str, Callable[[TrainConfig], str]] = {
    "remat": lambda config: f"remat {config.compute.remat}",
    "lora": lambda config: f"lora {', '.join(config.lora.targets)}",
}


def main(argv: list[str]) -> int:
    """Prints a row for each check; the exit status."""
    if not argv or argv[0] not in CHECKS:
        given = f"{argv[0]!r} is unknown" if argv else "what to check is missing"
        raise InputError(f"{given}; allowed: {', '.join(CHECKS)}, then CONFIG.toml [--section.key value ...]")
    config = parse([f"check {argv[0]}", *argv[1:]])
    table, failed = Table("check", "must be", "is", "", title=TITLES[argv[0]](config)), 0
    for check in CHECKS[argv[0]](config):
        table.add_row(check.name, check.expected, check.found, "pass" if check.passed else "FAIL")
        failed += not check.passed
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    with exit_on_input_error():
        sys.exit(main(sys.argv[1:]))
