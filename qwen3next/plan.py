"""What a run would train, how and where, and what its step would cost: `--dry-run` and `--compile-only` of train.py.

Nothing of the model's size is allocated.
"""

import math
import os
import sys

import equinox as eqx
import jax
from jaxtyping import PyTree
from rich.console import Console
from rich.table import Table

from qwen3next.ablation import Request
from qwen3next.ablation_table import show
from qwen3next.child import ask
from qwen3next.cli import dump_config
from qwen3next.config import TrainConfig
from qwen3next.lora import add_adapters, find_targets, matrix_names
from qwen3next.mesh import check_mesh, leaf_cuts
from qwen3next.model import abstract_model
from qwen3next.optim import Rule, leaf_rules, trainable
from qwen3next.tpu import require_tpu_extra, topology_devices
from qwen3next.tree import leaf_path, stacked_axes


def _leaf_table(title: str, *last: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("leaf", overflow="fold")
    for column in ("shape", "copies", "parameters", "share", *last):
        table.add_column(column, justify="right")
    return table


def show_plan(config: TrainConfig) -> None:
    """Prints the adapters, every leaf's optimizer rule and shard, and what stays frozen.

    Raises `InputError` as training does.
    """
    check_mesh(config, config.mesh.sizes(_devices(config)))
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
    console.print(_shard_table(model, config))


def _devices(config: TrainConfig) -> int:
    """How many the plan is for: those of the topology, or those that are here, or what the mesh's sizes come to."""
    if config.run.topology:
        return len(topology_devices(config.run.topology))
    named = math.prod(size for size in config.mesh.given.values() if size > 0)
    return named if named > jax.device_count() else jax.device_count()


def _shard_table(model: PyTree, config: TrainConfig) -> Table:
    sizes = config.mesh.sizes(_devices(config))
    shape = " x ".join(f"{name} {size}" for name, size in sizes.items())
    table = Table(title=f"shards, mesh {shape}", title_justify="left")
    table.add_column("leaf", overflow="fold")
    for column in ("shape", "cut over", "bytes a device"):
        table.add_column(column, justify="right")
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        cuts = leaf_cuts(leaf_path(path), leaf.shape, sizes)
        parts = math.prod(sizes[name] for names in cuts for name in names)
        cut = " ".join("+".join(names) if names else "." for names in cuts)
        size = math.prod(leaf.shape) * leaf.dtype.itemsize // parts
        table.add_row(leaf_path(path), " x ".join(map(str, leaf.shape)), cut, f"{size:,}")
        total += size
    table.add_row("all", "", "", f"{total:,}")
    return table


def compile_only(config: TrainConfig) -> int:
    """Compiles the step in a process of its own and prints its memory, FLOPs, network traffic and largest buffers.

    For a topology it stops where the compiler has assigned buffers, before code is generated, and says so. Returns 0,
    or 1 if that failed. Raises `InputError` for a mesh that the model or its batch does not fit.
    """
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 140
    if config.run.topology:
        require_tpu_extra()
    request = Request(dump_config(config), None, config.run.topology or None)
    row = {"choice": str(config.compute.remat), "length": config.data.sequence_length} | ask(request)
    show([row], console)
    if config.run.topology:
        console.print("temporaries and peak are those before code was generated")
    return int("error" in row)


def _cells(path: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """One layer's shape, and how many layers there are."""
    layers = stacked_axes(path)
    return " x ".join(map(str, shape[layers:])), f"{math.prod(shape[:layers]):,}"


def _settings(rule: Rule, config: TrainConfig) -> tuple[str, str]:
    decay, rate = config.optimizer.weight_decay * rule.decay, config.optimizer.learning_rate * rule.learning_rate
    return f"{decay:g}", f"{rate:g}"
