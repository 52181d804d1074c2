"""Run by test_sharding.py with eight devices: training on one device and on meshes of them, compared.

Prints what differs as JSON, for each mesh: loss and gradients of one step, losses of ten, and the leaves of the state
before it that was saved on the mesh before and are others when it is restored on this one.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import tiny_model
from jax.sharding import NamedSharding

from qwen3next import mesh as meshes
from qwen3next import vocabulary
from qwen3next.config import Compute, MeshConfig, OptimizerConfig, RunConfig, TrainConfig
from qwen3next.mesh import ROWS, leaf_spec, make_mesh, shardings
from qwen3next.optim import optimizer, trainable
from qwen3next.programs import quick_options
from qwen3next.train_state import Position, StateWriter, TrainState, latest_state
from qwen3next.training import make_train_step
from qwen3next.tree import leaf_path

meshes._SMALLEST = 0  # in this model every array is small
vocabulary._LARGEST = 2**8  # and the vocabulary has many pieces
MESHES = {
    "data": (MeshConfig(data=8, fsdp=1), "blocks"),
    "fsdp": (MeshConfig(), "ragged"),
    "expert": (MeshConfig(fsdp=1, expert=8), "auto"),
    "mixed": (MeshConfig(data=2, fsdp=2, expert=2), "auto"),
    "tensor": (MeshConfig(fsdp=4, tensor=2), "blocks"),
}
model = tiny_model(num_experts=8, router_aux_loss_coef=0.1)
params, frozen = eqx.partition(model, trainable(model))
ids = np.random.default_rng(0).integers(0, 64, (8, 17)).astype(np.int32)
segments = np.where(np.arange(16) < np.arange(4, 20, 2)[:, None], 1, 2).astype(np.int32)
batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "segment_ids": segments}
config = TrainConfig(
    model.config, optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1), run=RunConfig(steps=10)
)


def difference(one: jax.Array, other: jax.Array) -> float:
    scale = max(float(np.abs(one).max()), 1e-3)
    return float(np.abs(np.asarray(one) - np.asarray(other)).max()) / scale


def remembered(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transform, with the gradients that it met last in its state."""
    last = optax.GradientTransformation(lambda params: params, lambda updates, state, params: (updates, updates))
    return optax.chain(last, transform)


def train(compute: Compute, params, batch):
    """Gradients and metrics of a first step, and the losses of ten."""
    transform = remembered(optimizer(config.optimizer, 10))
    step = make_train_step(dataclasses.replace(config, compute=compute), transform)
    step = jax.jit(step, compiler_options=quick_options())
    state = TrainState(jnp.int32(0), jax.random.key(0), params, transform.init(params))
    state, first = step((frozen, batch), state)
    grads, losses = state.optimizer[0], [float(first["loss"])]
    for _ in range(9):
        state, metrics = step((frozen, batch), state)
        losses.append(float(metrics["loss"]))
    return grads, first, losses, state


def moved(saved: TrainState, mesh: jax.sharding.Mesh) -> int:
    """Leaves that a state does not bring whole, or not to their places, to another mesh."""
    with tempfile.TemporaryDirectory() as folder:
        with StateWriter(Path(folder), 1) as states:
            states.save(saved, Position("", "", {}, 0, {}))
        found = latest_state(Path(folder))
        assert found is not None
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved)
        with jax.set_mesh(mesh):
            restored = found.restore(like, {})
    pairs = zip(
        jax.tree_util.tree_leaves_with_path((saved.params, saved.optimizer)),
        jax.tree.leaves((restored.params, restored.optimizer)),
        strict=True,
    )
    return sum(
        not np.array_equal(one, other) or other.sharding.spec != leaf_spec(leaf_path(path), one.shape, dict(mesh.shape))
        for (path, one), other in pairs
    )


plain, report = Compute(chunk_size=8, dispatch="blocks"), {}
with jax.numpy_dtype_promotion("standard"):
    here = jax.tree.map(jnp.asarray, batch)
    grads, metrics, losses, state = train(plain, params, here)
    for name in sys.argv[1:] or MESHES:
        mesh_config, dispatch = MESHES[name]
        mesh = make_mesh(mesh_config, jax.devices())
        compute = Compute(chunk_size=8, dispatch=dispatch, expert_chunks=2, capacity_factor=0.6)
        with jax.set_mesh(mesh):
            spread_params = jax.device_put(params, shardings(params, mesh))
            spread_batch = jax.device_put(batch, NamedSharding(mesh, ROWS))
            spread, spread_metrics, spread_losses, spread_state = train(compute, spread_params, spread_batch)
        pairs = zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(spread), strict=True)
        found = {leaf_path(path): difference(one, other) for (path, one), other in pairs}
        worst = max(found, key=found.get)
        report[name] = {
            "loss": abs(float(metrics["loss"]) - float(spread_metrics["loss"])),
            "balance": abs(float(metrics["balance"]) - float(spread_metrics["balance"])),
            "worst": worst,
            "gradients": found[worst],
            "training": max(abs(a - b) for a, b in zip(losses, spread_losses, strict=True)),
            "moved": moved(state, mesh),
            "cut": sum(leaf.addressable_shards[0].data.size < leaf.size for leaf in jax.tree.leaves(spread)),
        }
        state = spread_state
print(json.dumps(report))
