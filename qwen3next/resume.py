"""What a run does with a folder that is there already: go on from its last state, begin, or refuse."""

import dataclasses
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qwen3next.cli import load_config, parse_config
from qwen3next.config import TrainConfig
from qwen3next.errors import InputError, require
from qwen3next.hosts import leads, wait
from qwen3next.run_folder import ADAPTER, CONFIG, METRICS, STATES, TOKENIZER, WEIGHTS, begin_run, write_config
from qwen3next.train_state import SavedState, latest_state

# What may differ when a run goes on. Where text comes from is judged by the text itself: see `check_text`.
_FREE = ("run.", "compute.", "mesh.", "optimizer.", "data.source", "data.tokenizer", "data.token_dtype")
_FREE += ("data.text_field", "data.prompt_field", "data.messages_field", "data.roles", "data.on_error")
_FREE += ("data.held_out", "data.workers", "model.router_aux_loss_coef")
_FIXED = ("run.seed",)


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Every value by its dotted name."""

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, dict):
            yield prefix, value
            return
        for name, item in value.items():
            yield from walk(f"{prefix}.{name}" if prefix else name, item)

    return dict(walk("", dataclasses.asdict(config)))


def changes(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, by dotted name: (old, new)."""
    before, after = _settings(old), _settings(new)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def _require_same(folder: Path, old: TrainConfig, new: TrainConfig) -> None:
    for name, (before, after) in changes(old, new).items():
        free = name.startswith(_FREE) and name not in _FIXED
        require(
            free,
            f"run.folder {folder} holds a run with {name} {before!r}, and {after!r} is asked for; "
            f"allowed: the same, another folder, or --run.overwrite",
        )


def find_run(config: TrainConfig) -> SavedState | None:
    """The state to go on from, `None` for a run from its first step. Writes nothing.

    Raises `InputError` for a folder that is a file, that holds a run which may be neither replaced nor continued, or
    that holds none although `run.resume` is `must`.
    """
    run, folder = config.run, Path(config.run.folder)
    require(not folder.exists() or folder.is_dir(), f"run.folder {folder} is a file; it must be a folder or a new name")
    held = [name for name in (CONFIG, METRICS, WEIGHTS, *ADAPTER, TOKENIZER, STATES) if (folder / name).exists()]
    if run.overwrite:
        require(run.resume != "must", "run.overwrite begins a run anew and run.resume 'must' continues one; give one")
        return None
    holds = f"run.folder {folder} already holds a run ({', '.join(held)})"
    if run.resume == "never":
        require(not held, f"{holds}; allowed: another folder, --run.overwrite, or --resume auto")
        return None
    saved = latest_state(folder)
    if saved is None:
        require(run.resume != "must", f"run.folder {folder} holds no saved state; needed: a run that has saved one")
        # Killed before its first save, a run has lost all steps and is begun again.
        begun = CONFIG in held and not {WEIGHTS, *ADAPTER} & set(held)
        require(begun or not held, f"{holds} without a state to go on from; allowed: another folder or --run.overwrite")
        if begun:
            _require_same(folder, load_config(folder / CONFIG), config)
        return None
    _require_same(folder, parse_config(saved.position.config, str(saved.folder / str(saved.step))), config)
    require(
        saved.step <= run.steps,
        f"run.steps is {run.steps}; the run in {folder} is at step {saved.step} already: give at least that",
    )
    size = (folder / METRICS).stat().st_size if (folder / METRICS).is_file() else 0
    require(
        size >= saved.position.metrics_bytes,
        f"{folder / METRICS} has {size} bytes; the state of step {saved.step} was saved with "
        f"{saved.position.metrics_bytes}: put the file back, or begin anew with --run.overwrite",
    )
    return saved


def check_frozen(saved: SavedState, config: TrainConfig, base: str) -> None:
    """Raises `InputError` if the weights under a run's adapters are no longer those of the saved state."""
    require(
        saved.position.base == base,
        f"run.init_from {config.run.init_from} does not hold the weights that the run in {config.run.folder} began "
        f"with; allowed: the same weights, another run.folder, or --run.overwrite",
    )


def check_text(saved: SavedState, config: TrainConfig, text: str) -> None:
    """Raises `InputError` if the run's tokens are no longer those of the saved state; `text` is their fingerprint."""
    if saved.position.text != text:
        old = parse_config(saved.position.config, str(saved.folder))
        told = [f"{name} was {before!r}" for name, (before, _) in changes(old, config).items() if name[:5] == "data."]
        why = ", ".join(told) or "the files have changed"
        raise InputError(
            f"data.source: the text is not what the run in {config.run.folder} was trained on ({why}); "
            f"allowed: the same text, another run.folder, or --run.overwrite"
        )


@contextmanager
def open_run(config: TrainConfig, saved: SavedState | None) -> Iterator[Path]:
    """The run's folder, ready to be written from the state's step on, and held against a second process.

    A run that is not continued leaves nothing of what the folder held of another one.
    """
    folder = Path(config.run.folder)
    wait("before the folder is written")
    if not leads():
        wait("the folder is ready")
        yield folder
        return
    with _held(folder):
        try:
            if saved is None:
                begin_run(config, folder)
            else:
                write_config(config, folder)
                os.truncate(folder / METRICS, saved.position.metrics_bytes)
            wait("the folder is ready")
            yield folder
        except OSError as error:  # a full disk, for one; complete states are as they were
            raise InputError(f"run.folder {folder} cannot be written ({error})") from error


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Makes the folder and locks it; the lock ends with the process, however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"run.folder {folder} cannot be written ({error})") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"run.folder {folder} is in use by another process; allowed: another") from error
        yield
    finally:
        os.close(handle)
