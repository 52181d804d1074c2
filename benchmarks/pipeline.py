"""Does the data pipeline keep up? Tokens/s of the batches alone, against what the training step of a config consumes.

python benchmarks/pipeline.py configs/tiny.toml configs/bench.toml --packing split best_fit --workers 0 2

Every figure is the median of repetitions, the pipelines and the step in turn. Text: a config's own source, its bytes
taken for tokens if the vocabulary is large enough.
"""

import argparse
import dataclasses
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from qwen3next.cli import load_config
from qwen3next.config import TrainConfig
from qwen3next.data.batches import TrainBatches
from qwen3next.data.texts import read_texts
from qwen3next.errors import exit_on_input_error
from qwen3next.optim import optimizer
from qwen3next.tokenizer import load_tokenizer
from qwen3next.training import initial_state, jit_train_step

_BATCHES, _STEPS = 1000, 3


def time_pipeline(batches: TrainBatches, tokens: int) -> float:
    """Tokens/s of some batches; the workers have started."""
    next(batches)
    began = time.perf_counter()
    for _ in range(_BATCHES):
        next(batches)
    return _BATCHES * tokens / (time.perf_counter() - began)


def make_step(config: TrainConfig, batches: TrainBatches) -> Callable[[], None]:
    """A function that runs some steps of the very step of `train.py`, compiled."""
    transform = optimizer(config.optimizer, config.run.steps)
    state, frozen = jax.jit(lambda key: initial_state(config, transform, key))(jax.random.key(0))
    step = jit_train_step(config, transform)
    held = [state]

    def run() -> None:
        for _ in range(_STEPS):
            held[0], metrics = step((frozen, jax.tree.map(jnp.asarray, next(batches))), held[0])
        jax.block_until_ready(metrics)

    run()
    return run


def measure(config: TrainConfig, packings: list[str], workers: list[int], repeats: int, table: Table) -> None:
    """A row of the table for each packing and number of workers."""
    tokenizer, tokens = load_tokenizer(config.data.tokenizer), config.data.batch_size * config.data.sequence_length
    choices = {}
    for packing in packings:
        data = dataclasses.replace(config.data, packing=packing)
        began = time.perf_counter()
        texts = read_texts(data, tokenizer, config.model.vocab_size, 0)
        seconds, sources = time.perf_counter() - began, [(text.train, text.weight) for text in texts]
        for count in workers:
            batches = TrainBatches(sources, dataclasses.replace(data, workers=count), 0)
            choices[packing, count] = (batches, seconds, texts[0].train.facts.share, list[float]())
    step, steps = make_step(config, next(iter(choices.values()))[0]), []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        steps.append(_STEPS * tokens / (time.perf_counter() - began))
        for batches, _, _, speeds in choices.values():
            speeds.append(time_pipeline(batches, tokens))
            batches.close()
    consumed = statistics.median(steps)
    for (packing, count), (_, seconds, share, speeds) in choices.items():
        speed = statistics.median(speeds)
        cells = (config.run.folder, packing, count, f"{share:.2%}", f"{seconds:.1f}", f"{speed:,.0f}")
        table.add_row(*map(str, cells), f"{consumed:,.0f}", f"{speed / consumed:,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--packing", nargs="+", default=["split", "best_fit"])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    versions = f"jax {jax.__version__}, grain {grain.__version__}, Python {platform.python_version()}"
    table = Table(title=f"{versions}, {platform.machine()}")
    for column in ("run", "packing", "workers", "real", "start, s", "tokens/s", "step, tokens/s", "ratio"):
        table.add_column(column, justify="left" if column in ("run", "packing") else "right")
    for path in args.configs:
        measure(load_config(path), args.packing, args.workers, args.repeats, table)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    with exit_on_input_error():
        main()
