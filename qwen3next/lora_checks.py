"""Are adapters where the config puts them, do they act, and are they alone in being trained?

Counts are of the config's own model, without allocating a parameter, against what follows from its layers alone. What
must be run is run on a model with the same order of layers and small sizes.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from qwen3next.config import Compute, ModelConfig, TrainConfig
from qwen3next.errors import require
from qwen3next.lora import adapters, find_targets, matrix_names, strip
from qwen3next.model import Qwen3Next, abstract_model
from qwen3next.optim import optimizer
from qwen3next.remat_checks import Check, same, shrunk
from qwen3next.training import gradients, initial_state, make_train_step
from qwen3next.tree import leaf_path, stacked_axes

_ROWS, _LENGTH, _STEPS = 2, 32, 3


def _copies(config: ModelConfig, name: str) -> int:
    """How many published tensors have this name, but for numbers: one a layer of the kind, or one an expert of it."""
    module, kinds = name.split(".")[0], config.layer_kinds
    if module in ("linear_attn", "self_attn"):
        return sum((kind.mixer == "linear_attention") == (module == "linear_attn") for kind in kinds)
    if module != "mlp":
        return 1
    dense = name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    layers = sum((kind.mlp == "dense") == dense for kind in kinds)
    return layers * (config.num_experts if name.startswith("mlp.experts.") else 1)


def _nbytes(tree: PyTree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _batch(vocab: int) -> dict[str, Array]:
    ids = np.random.default_rng(0).integers(vocab, size=(_ROWS, _LENGTH + 1), dtype=np.int32)
    arrays = (ids[:, :-1], ids[:, 1:], np.ones((_ROWS, _LENGTH), np.int32))
    return {
        name: jnp.asarray(array) for name, array in zip(("input_ids", "labels", "segment_ids"), arrays, strict=True)
    }


def _counted(config: TrainConfig) -> Iterator[Check]:
    base = abstract_model(config.model)
    names, transform = matrix_names(base), optimizer(config.optimizer, config.run.steps)
    wanted = {names[path] for path in find_targets(base, config.lora)}
    state, frozen = eqx.filter_eval_shape(initial_state, config, transform, jax.random.key(0))
    found: dict[str, int] = dict.fromkeys(wanted, 0)
    model: Qwen3Next = eqx.combine(state.params, frozen)
    for path, adapter in adapters(model).items():
        found[names[path]] += math.prod(adapter.lora_A.shape[:-2])
    for name in sorted(wanted):
        yield same(f"adapters on {name}", _copies(config.model, name), found[name])

    own = _nbytes([(adapter.lora_A, adapter.lora_B) for adapter in adapters(model).values()])
    shape = jax.ShapeDtypeStruct((_ROWS, _LENGTH), jnp.int32)
    batch = dict.fromkeys(("input_ids", "labels", "segment_ids"), shape)
    grads, _ = eqx.filter_eval_shape(gradients, state.params, frozen, batch, 1, config.compute)
    scalars = _nbytes([leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim == 0])
    yield same("bytes of gradients", f"{own:,}", f"{_nbytes(grads):,}")
    yield same("bytes of optimizer state, but for scalars", f"{2 * own:,}", f"{_nbytes(state.optimizer) - scalars:,}")
    yield same("leaves that stay frozen", len(jax.tree.leaves(base)), len(jax.tree.leaves(frozen)))


def _acting(model: Qwen3Next, compute: Compute) -> Iterator[Check]:
    """Each layer's and expert's adapter by itself, on some noise."""
    ids, names = _batch(model.config.vocab_size)["input_ids"], matrix_names(strip(model))

    @jax.jit
    def logits(model: Qwen3Next) -> Array:
        return model.logits(model.hidden(ids, compute=compute).states)

    plain = np.asarray(logits(model))
    yield same("logits that new adapters change", 0, int((plain != np.asarray(logits(strip(model)))).sum()))
    acting: dict[str, list[bool]] = {}
    for path, adapter in adapters(model).items():
        rng = np.random.default_rng(0)
        noise = [rng.standard_normal(leaf.shape).astype(np.float32) for leaf in (adapter.lora_A, adapter.lora_B)]
        for at in np.ndindex(adapter.lora_A.shape[:-2]):
            one = np.zeros(adapter.lora_B.shape, np.float32)
            one[at] = noise[1][at]
            moved = logits(_replaced(model, path, {"lora_A": noise[0], "lora_B": one}))
            acting.setdefault(names[path], []).append(bool((np.asarray(moved) != plain).any()))
    for name, each in sorted(acting.items()):
        yield same(f"adapters on {name} that act, of {len(each)}", len(each), sum(each))


def _replaced(model: Qwen3Next, path: str, leaves: dict[str, Any]) -> Qwen3Next:
    def visit(at: tuple, leaf: Array) -> Array:
        where, _, name = leaf_path(at).rpartition(".")
        return jnp.asarray(leaves[name]) if where == path and name in leaves else leaf

    return jax.tree_util.tree_map_with_path(visit, model)


def _trained(config: TrainConfig) -> Iterator[Check]:
    """A few steps with decay."""
    changes = {"warmup_steps": 0, "weight_decay": 0.1, "learning_rate": 0.01}
    tuned = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **changes))
    tuned = dataclasses.replace(tuned, run=dataclasses.replace(config.run, accumulate=1))
    transform = optimizer(tuned.optimizer, 10)
    state, frozen = initial_state(tuned, transform, jax.random.key(0))

    def base() -> list[bytes]:
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(strip(eqx.combine(state.params, frozen)))]

    before = base()
    step, batch = jax.jit(make_train_step(tuned, transform)), _batch(config.model.vocab_size)
    for _ in range(_STEPS):
        state, _ = step((frozen, batch), state)
    changed = sum(a != b for a, b in zip(before, base(), strict=True))
    yield same(f"leaves of the base that {_STEPS} steps with decay change", 0, changed)
    # By now no side of an adapter is 0, so that each has a gradient.
    grads, _ = jax.jit(lambda params: gradients(params, frozen, batch, 1, tuned.compute))(state.params)
    still, layers = 0, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        slopes = np.asarray(leaf).reshape(math.prod(leaf.shape[: stacked_axes(leaf_path(path))]), -1)
        layers, still = layers + len(slopes), still + int((~slopes.any(axis=1)).sum())
    yield same(f"layers' adapter leaves without a gradient, of {layers}", 0, still)


def lora_checks(config: TrainConfig) -> Iterator[Check]:
    """Every check of `config.lora`, one after another. Raises `InputError` if it names no target."""
    require(bool(config.lora.targets), "lora.targets is empty, so there is nothing to check; name a target")
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, rules=()))
    yield from _counted(config)
    small = dataclasses.replace(
        config,
        model=shrunk(config.model),
        compute=dataclasses.replace(config.compute, dtype="float32", chunk_size=8),
        lora=dataclasses.replace(config.lora, dropout=0.0),
    )
    state, frozen = initial_state(small, optimizer(small.optimizer, config.run.steps), jax.random.key(0))
    yield from _acting(eqx.combine(state.params, frozen), small.compute)
    yield from _trained(small)
