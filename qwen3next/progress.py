"""How far a transfer of bytes has come."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def human_bytes(nbytes: int) -> str:
    """`1.23 GB`, or a smaller unit."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


@contextmanager
def transfer(verb: str, total: int, *, summary: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told of bytes moved. On a terminal a bar shows them; a `summary` ends it anywhere."""
    console, started = Console(stderr=True), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(verb, total=total)
    with bar:
        yield (lambda nbytes: bar.advance(task, nbytes)) if console.is_terminal else (lambda nbytes: None)
    if summary:
        seconds = time.perf_counter() - started
        speed = total / seconds / 1e6
        print(f"{verb}: {human_bytes(total)} in {seconds:.1f} s, {speed:,.0f} MB/s", file=sys.stderr)
