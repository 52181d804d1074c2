"""What a run needs to go on exactly as if it had not stopped, saved together: by path, in the background, atomically.

A state of step n is the folder `states/n` (orbax). It is complete or not there: orbax writes under another name and
renames. The arrays are one flat dictionary from a leaf's path to the leaf, so nothing depends on positions.
"""

import dataclasses
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int, PRNGKeyArray, PyTree
from orbax.checkpoint import v1 as ocp

from qwen3next.errors import InputError, require
from qwen3next.hosts import leads
from qwen3next.mesh import leaf_sharding
from qwen3next.regroup import Stacks, regroup
from qwen3next.run_folder import STATES
from qwen3next.tree import leaf_path

_METRIC = "held_out_loss"


class TrainState(eqx.Module):
    """What an optimizer step changes: its number, the trainable leaves (the rest are `None`), the optimizer's state.

    `key` is the run's source of randomness; a step's own is `key` folded with `step`.
    """

    step: Int[Array, ""]
    key: PRNGKeyArray
    params: PyTree
    optimizer: optax.OptState


@dataclass(frozen=True)
class Position:
    """Where a run stands besides its arrays.

    `config` is its TOML, `text` the fingerprint of its tokens, `data` the state of the data iterator,
    `metrics_bytes` the length of its metrics file, and `stacks` says which layers the stacked arrays hold.
    `base` is the fingerprint of the weights that stay frozen beside the arrays, empty if there are none.
    """

    config: str
    text: str
    data: dict[str, Any]
    metrics_bytes: int
    stacks: Stacks
    base: str = ""


def _flat(state: TrainState) -> dict[str, Any]:
    """Arrays (or their shapes) by path; a key as its numbers."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    flat = {leaf_path(path): leaf for path, leaf in leaves}
    if isinstance(state.key, jax.Array):
        return flat | {"key": jax.random.key_data(state.key)}
    return flat | {"key": jax.eval_shape(jax.random.key_data, state.key)}


def _told(error: BaseException) -> str:
    """The first line of what went wrong, of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _damaged(state: Path, error: BaseException) -> InputError:
    return InputError(f"{state} is damaged ({_told(error)}); remove it to go on from the state before, if there is one")


@dataclass(frozen=True)
class SavedState:
    """A complete state on disk; its arrays have not been read."""

    step: int
    position: Position
    folder: Path

    def restore(self, like: TrainState, stacks: Stacks) -> TrainState:
        """The state, with the structure, shapes and dtypes of `like` (abstract), in the mesh that is set.

        A state whose layers were cut into other stacks than `stacks` is moved over. Raises `InputError` naming a leaf
        that is missing, has no place, or differs in shape or dtype.
        """
        wanted, device = _flat(like), jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        places = {path: leaf_sharding(path, leaf.shape) or device for path, leaf in wanted.items()}
        with ocp.training.Checkpointer(str(self.folder)) as states:
            found = states.checkpointables_metadata(self.step).metadata["arrays"]
            same = self.position.stacks == stacks
            if same:
                self._check(wanted, found)
            targets = {
                path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[path] if same else device)
                for path, leaf in (wanted if same else found).items()
            }
            try:
                arrays = states.load_checkpointables(self.step, {"arrays": targets})["arrays"]
            except Exception as error:
                # orbax leaves the failures of the other leaves behind, and asyncio would print them one by one.
                logging.getLogger("asyncio").disabled = True
                raise _damaged(self.folder / str(self.step), error) from error
        if not same:
            arrays = regroup(jax.tree.map(np.asarray, arrays), self.position.stacks, stacks, wanted)
            self._check(wanted, arrays)
            arrays = {path: jax.device_put(array, places[path]) for path, array in arrays.items()}
        key = jax.random.wrap_key_data(arrays["key"])
        paths = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]
        leaves = [key if path == "key" else arrays[path] for path in paths]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def _check(self, wanted: dict[str, Any], found: dict[str, Any]) -> None:
        place = self.folder / str(self.step)
        for words, paths in (
            ("lacks leaves that the config asks for", wanted.keys() - found.keys()),
            ("has leaves without a place in the config's state", found.keys() - wanted.keys()),
        ):
            require(not paths, f"{place} {words}: {len(paths)}, the first is {min(paths, default='')}")
        for path, leaf in wanted.items():
            is_, must = ((tuple(x.shape), jnp.dtype(x.dtype).name) for x in (found[path], leaf))
            require(is_ == must, f"{place}: leaf {path} is {is_[1]}{list(is_[0])}; it must be {must[1]}{list(must[0])}")


def latest_state(run: Path) -> SavedState | None:
    """The last complete state of a run's folder; nothing is written. `InputError` if its bookkeeping is damaged."""
    folder = run.absolute() / STATES
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    if not steps:
        return None
    step = max(steps)
    try:
        with ocp.training.Checkpointer(str(folder)) as states:
            position = Position(**states.checkpointables_metadata(step).custom_metadata)
    except Exception as error:
        raise _damaged(folder / str(step), error) from error
    return SavedState(step, position, folder)


class StateWriter:
    """Saves states in the background and keeps the last `keep` of them, and the one with the lowest held-out loss.

    Entered after all checks: what a kill left half-written is removed. Leaving waits for the save under way.
    """

    def __init__(self, run: Path, keep: int):
        policies = ocp.training.preservation_policies
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics[_METRIC], reverse=True, n=1, keep_checkpoints_without_metrics=False
        )
        self._folder = run.absolute() / STATES
        for half in self._folder.glob("*.orbax-checkpoint-tmp*") if leads() else ():
            shutil.rmtree(half, ignore_errors=True)
        self._states = self._attempt(
            lambda: ocp.training.Checkpointer(
                str(self._folder),
                # orbax annotates one of two types that have the same fields
                preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),  # pyright: ignore
            )
        )
        losses = [state.metrics[_METRIC] for state in self._states.checkpoints if state.metrics]
        self.best = min(losses, default=float("inf"))

    def save(self, state: TrainState, position: Position, held_out_loss: float | None = None) -> None:
        """Copies the arrays to the host and returns; a save that is still under way is waited for first.

        Raises `InputError` for what stopped this save or the one before.
        """
        metrics = None if held_out_loss is None else {_METRIC: held_out_loss}
        if held_out_loss is not None:
            self.best = min(self.best, held_out_loss)
        self._attempt(
            lambda: self._states.save_checkpointables_async(
                int(state.step),
                {"arrays": _flat(state)},
                force=True,
                metrics=metrics,
                custom_metadata=dataclasses.asdict(position),
            )
        )

    def _attempt(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            raise InputError(
                f"the state could not be saved into {self._folder} ({_told(error)}); complete ones are untouched"
            ) from error

    def __enter__(self) -> "StateWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._attempt(self._states.close)
        except InputError:
            if kind is None:
                raise
