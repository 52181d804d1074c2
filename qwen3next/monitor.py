"""What a run shows: a head, progress, evaluations, and a clean end on Ctrl-C."""

import signal
import time
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from qwen3next.hosts import leads


class StopRequest:
    """While entered, the first Ctrl-C (or SIGTERM) only sets `wanted`; a second one interrupts as usual."""

    def __init__(self) -> None:
        self.wanted = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, _: FrameType | None) -> None:
        self.wanted = True
        signal.signal(number, self._previous[signal.Signals(number)])


class Monitor:
    """A progress bar on a terminal, a line now and then elsewhere. Speed leaves out compilation and evaluation."""

    def __init__(self, steps: int, tokens_per_step: int):
        self.console = Console(highlight=False, soft_wrap=True, quiet=not leads())
        self._steps, self._tokens = steps, tokens_per_step
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, text="compiling")
        self._trained, self._counted, self._since, self._seconds = 0, 0, 0.0, 0.0

    def __enter__(self) -> "Monitor":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Prints a line above the progress bar."""
        self.console.print(text, markup=False)

    def start_clock(self, number: int) -> None:
        """Training goes on after step `number`: what has passed since the last `step` is not counted."""
        self._counted, self._since = number, time.perf_counter()

    def step(self, number: int, loss: float) -> float:
        """Shows a step's loss; returns tokens/s, all counted time taken together."""
        now = time.perf_counter()
        self._trained += number - self._counted
        self._seconds += now - self._since
        self._counted, self._since = number, now
        speed = self._trained * self._tokens / self._seconds if self._trained else 0.0
        text = f"loss {loss:.3f}  {speed:,.0f} tokens/s"
        self._progress.update(self._task, completed=number, text=text)
        if not self.console.is_terminal:
            left = f"{(self._steps - number) * self._tokens / speed:.0f} s left" if speed else "compiled"
            self.say(f"step {number}/{self._steps}  {text}  {left}")
        return speed
