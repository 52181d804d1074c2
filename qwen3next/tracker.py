"""Where a run's metrics go: JSON lines always, Weights & Biases besides."""

import dataclasses
import importlib.util
import json
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from qwen3next.config import TrainConfig
from qwen3next.hosts import leads
from qwen3next.run_folder import METRICS, WANDB_ID


@runtime_checkable
class Tracker(Protocol):
    """Takes the metrics of a step."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Records metrics by name."""
        ...

    def close(self) -> None:
        """Ends the record."""
        ...


class JsonLines:
    """One JSON object a line: `step`, `time` (Unix seconds) and the metrics. Flushed line by line."""

    def __init__(self, path: Path):
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Nothing:
    """Records nothing."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class WandB:
    """A Weights & Biases run. `offline` writes to the run's folder, needs no key and asks nothing."""

    def __init__(self, folder: Path, mode: Literal["offline", "online"], config: dict[str, Any]):
        import wandb

        identity = folder / WANDB_ID  # a run that is resumed goes on in the same one
        if not identity.is_file():
            identity.write_text(uuid.uuid4().hex)
        settings = wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True)
        self._run = wandb.init(
            project="qwen3next",
            id=identity.read_text(),
            resume="allow",
            name=folder.name,
            dir=folder,
            mode=mode,
            config=config,
            settings=settings,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class WithOptional:
    """A tracker that must work and one that may fail: after its first failure, told once, it is left alone."""

    def __init__(self, needed: Tracker, optional: Tracker):
        self._needed, self._optional = needed, optional

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._needed.log(step, metrics)
        self._attempt(lambda tracker: tracker.log(step, metrics))

    def close(self) -> None:
        self._needed.close()
        self._attempt(lambda tracker: tracker.close())

    def _attempt(self, action: Callable[[Tracker], None]) -> None:
        if self._optional is None:
            return
        try:
            action(self._optional)
        except Exception as error:
            print(f"{type(self._optional).__name__} failed and is left alone: {error}", file=sys.stderr)
            self._optional = None


def make_tracker(folder: Path, config: TrainConfig) -> tuple[Tracker, str]:
    """The run's tracker, and a word on what became of Weights & Biases. Whatever fails there stops nothing.

    Of several processes only the leading one records anything.
    """
    if not leads():
        return Nothing(), "left to the leading process"
    lines = JsonLines(folder / METRICS)
    mode = config.run.wandb
    if mode == "off":
        return lines, "off"
    if importlib.util.find_spec("wandb") is None:
        return lines, "not installed"
    try:
        return WithOptional(lines, WandB(folder, mode, dataclasses.asdict(config))), mode
    except Exception as error:  # a broken service must not cost the run
        return lines, f"failed to start: {error}"
