"""Run by test_sharding.py with eight devices: one training step on one device and on all of them, compared."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from common import tiny_model

from qwen3next import sharding
from qwen3next.config import Compute
from qwen3next.optim import trainable
from qwen3next.training import gradients
from qwen3next.tree import leaf_path

sharding._SMALLEST = 0  # in this model every array is small
model = tiny_model(num_hidden_layers=6, num_experts=8, router_aux_loss_coef=0.1)
params, frozen = eqx.partition(model, trainable(model))
ids = np.random.default_rng(0).integers(0, 64, (8, 17)).astype(np.int32)
segments = np.where(np.arange(16) < np.arange(4, 20, 2)[:, None], 1, 2).astype(np.int32)
batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "segment_ids": segments}
mesh, report = sharding.fsdp_mesh(jax.devices()), {}
places = sharding.shardings(params, mesh)
rows = {name: sharding.batch_sharding(mesh) for name in batch}


def difference(one: jax.Array, other: jax.Array) -> float:
    scale = max(float(np.abs(one).max()), 1e-3)
    return float(np.abs(np.asarray(one) - np.asarray(other)).max()) / scale


for dispatch in ("blocks", "ragged"):
    compute = Compute(chunk_size=8, dispatch=dispatch)

    def run(params, batch, compute=compute):
        return gradients(params, frozen, batch, 1, compute)

    with jax.numpy_dtype_promotion("standard"):
        grads, metrics = jax.jit(run)(params, jax.tree.map(jnp.asarray, batch))
        with jax.set_mesh(mesh):
            step = jax.jit(run, in_shardings=(places, rows), out_shardings=(places, None))
            spread, spread_metrics = step(jax.device_put(params, places), jax.device_put(batch, rows))
    pairs = zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(spread), strict=True)
    report[dispatch] = {
        "loss": abs(float(metrics["loss"]) - float(spread_metrics["loss"])),
        "balance": abs(float(metrics["balance"]) - float(spread_metrics["balance"])),
        "gradients": {leaf_path(path): difference(one, other) for (path, one), other in pairs},
        "cut": sum(leaf.addressable_shards[0].data.size < leaf.size for leaf in jax.tree.leaves(spread)),
    }
print(json.dumps(report))
