"""Rows to batches (grain): endless and shuffled for training, each row once for evaluation.

A position is the number of rows that all hosts together have consumed. Nothing else is remembered, so that a run goes
on with another number of workers or of hosts.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import connection, parent_process, resource_tracker
from typing import Any

import grain
import numpy as np
from absl import flags
from grain.experimental import DatasetOptions, WithOptionsIterDataset
from jaxtyping import Int32

from qwen3next.config import DataConfig
from qwen3next.data.packing import Rows
from qwen3next.errors import InputError, require

Batch = dict[str, Int32[np.ndarray, "batch seq"]]  # the keys of a row

_AHEAD = 8  # batches that a worker holds ready
_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # a run ends on these in its own way


def _seed(*numbers: int) -> int:
    """A seed of its own for these numbers: grain adds the epoch to what it is given."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _ready_worker(*_: int) -> None:
    """A worker leaves signals to the process that it works for, and ends when that one does, however it ends."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=lambda: (connection.wait([sentinel]), os._exit(1)), daemon=True).start()


@contextmanager
def _held_back() -> Iterator[None]:
    """Signals reach this process afterwards, and processes that start meanwhile never."""
    resource_tracker.ensure_running()  # when it starts, it lets them through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class TrainBatches:
    """Endless batches, each source's rows every one once an epoch, each epoch in an order of its own.

    A batch may straddle two epochs. Sources are drawn from in proportion to their weights, of which the smallest must
    be 100 (grain counts in hundredths of it). Host `host` of `hosts` gets its share of each batch's rows.
    `data.workers` processes make batches ahead, the same ones as none would, each with a copy of text that is in
    memory; `close`, or leaving the `with` block, ends them. Raises `InputError` if there are fewer rows than one batch
    takes, and for a batch that does not divide among the hosts.
    """

    def __init__(
        self, texts: Sequence[tuple[Rows, int]], config: DataConfig, seed: int, *, host: int = 0, hosts: int = 1
    ):
        count, size = sum(len(rows) for rows, _ in texts), config.batch_size
        require(
            count >= size,
            f"data.batch_size: {size} rows a batch, but the training text has only {count} rows of"
            f" data.sequence_length {config.sequence_length}; give more text, a smaller batch or a shorter sequence",
        )
        require(size % hosts == 0, f"data.batch_size is {size}; it must be a multiple of the {hosts} processes")
        shuffled = [
            grain.MapDataset.source(rows).shuffle(seed=_seed(seed, number)).repeat()
            for number, (rows, _) in enumerate(texts)
        ]
        weights = [weight for _, weight in texts]
        self._rows = shuffled[0] if len(shuffled) == 1 else grain.MapDataset.mix(shuffled, weights)
        self._size, self._workers, self._host, self._hosts = size, config.workers, host, hosts
        self._consumed, self._iterator = 0, None

    def _start(self) -> grain.DatasetIterator[Batch]:
        rows = self._rows[self._consumed + self._host :: self._hosts]
        # No reading threads: the rows are in memory, and the default buffers 500 batches ahead.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        batches = rows.batch(self._size // self._hosts, drop_remainder=True).to_iter_dataset(options)
        if not self._workers:
            return iter(batches)
        if not flags.FLAGS.is_parsed():  # grain's workers ask for flags, and a plain script has none
            flags.FLAGS.mark_as_parsed()
        ahead = grain.MultiprocessingOptions(self._workers, per_worker_buffer_size=_AHEAD)
        # Batches are small, and shared memory would be left behind by what a stop finds on its way.
        batches = WithOptionsIterDataset(batches, DatasetOptions(min_shm_size=sys.maxsize))
        return iter(batches.mp_prefetch(ahead, worker_init_fn=_ready_worker))

    def __iter__(self) -> "TrainBatches":
        return self

    def __next__(self) -> Batch:
        try:
            if self._iterator is None:
                self._iterator = self._start()
                with _held_back() if self._workers else nullcontext():
                    batch = next(self._iterator)  # workers start when they are asked for the first one
            else:
                batch = next(self._iterator)
        except OSError as error:  # each worker opens token files for itself
            raise InputError(f"data.source: cannot read {error.filename!r}: {error.strerror or error}") from error
        except RuntimeError as error:  # the system ends processes when memory runs out
            told = str(error).split(". ")[0]
            raise InputError(f"data.workers: one of {self._workers} has ended ({told}); allowed: fewer") from error
        self._consumed += self._size
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position, for `set_state`, also of another number of workers or hosts."""
        return {"rows": self._consumed}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a position."""
        self.close()
        self._consumed = int(state["rows"])

    def close(self) -> None:
        """Ends the workers; the next batch starts others."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def __enter__(self) -> "TrainBatches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def eval_batches(sources: Sequence[Rows], batch_size: int) -> Iterator[Batch]:
    """Every row once, in an order that is always the same, so that the first ones are a sample of all.

    The last batch is filled up with rows of padding.
    """
    rows = [(source, row) for source in sources for row in range(len(source))]
    order = [rows[at] for at in np.random.default_rng(0).permutation(len(rows))]
    for first in range(0, len(order), batch_size):
        members = [source[row] for source, row in order[first : first + batch_size]]
        members += [sources[0].padding()] * (batch_size - len(members))
        yield {key: np.stack([member[key] for member in members]) for key in members[0]}
