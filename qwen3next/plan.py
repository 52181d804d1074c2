"""What a run would train and how, as tables: `train.py CONFIG --dry-run`. Nothing is allocated."""

import math
import sys

import equinox as eqx
import jax
from rich.console import Console
from rich.table import Table

from qwen3next.config import TrainConfig
from qwen3next.lora import add_adapters, find_targets, matrix_names
from qwen3next.model import abstract_model
from qwen3next.optim import Rule, leaf_rules, trainable
from qwen3next.tree import leaf_path, stacked_axes


def _leaf_table(title: str, *last: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("leaf", overflow="fold")
    for column in ("shape", "copies", "parameters", "share", *last):
        table.add_column(column, justify="right")
    return table


def show_plan(config: TrainConfig) -> None:
    """Prints the adapters, every leaf's optimizer rule, and what stays frozen. Raises `InputError` as training does."""
    base = model = abstract_model(config.model)
    console = Console(width=None if sys.stdout.isatty() else 150)
    if config.lora.targets:
        model = eqx.filter_eval_shape(add_adapters, base, config.lora, key=jax.random.key(0))
    trainable(model, config.optimizer)
    rules = leaf_rules(model, config.optimizer)
    shapes = {leaf_path(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(model)}
    sizes = {path: math.prod(shape) for path, shape in shapes.items()}
    total, trained = sum(sizes.values()), sum(size for path, size in sizes.items() if rules[path].trained)

    if config.lora.targets:
        names, adapted = matrix_names(base), _leaf_table("adapters", "rank", "scale")
        for path, (rank, scale) in find_targets(base, config.lora).items():
            shape, added = shapes[f"{path}.base.weight"], sizes[f"{path}.lora_A"] + sizes[f"{path}.lora_B"]
            where = f"{names[path]}  ({path})"
            adapted.add_row(where, *_cells(path, shape), f"{added:,}", f"{added / total:.3%}", str(rank), f"{scale:g}")
        console.print(adapted)

    optimized = _leaf_table("optimizer", "decay", "learning rate")
    for path, rule in rules.items():
        if rule.trained:
            settings = _settings(rule, config)
            optimized.add_row(
                path, *_cells(path, shapes[path]), f"{sizes[path]:,}", f"{sizes[path] / total:.3%}", *settings
            )
    console.print(optimized)
    frozen = [path for path, rule in rules.items() if not rule.trained]
    console.print(f"trained: {trained:,} of {total:,} parameters, {trained / total:.3%}", highlight=False)
    console.print(f"frozen:  {total - trained:,} in {len(frozen)} leaves", highlight=False)


def _cells(path: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """One layer's shape, and how many layers there are."""
    layers = stacked_axes(path)
    return " x ".join(map(str, shape[layers:])), f"{math.prod(shape[:layers]):,}"


def _settings(rule: Rule, config: TrainConfig) -> tuple[str, str]:
    decay, rate = config.optimizer.weight_decay * rule.decay, config.optimizer.learning_rate * rule.learning_rate
    return f"{decay:g}", f"{rate:g}"
