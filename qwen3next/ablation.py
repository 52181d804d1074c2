"""One row of an ablation: a config's training step traced, compiled and, on request, run. A child process does it.

`python -m qwen3next.ablation` reads a `Request` as JSON from standard input and writes what it finds as JSON lines,
each as soon as it is known, so that a child that is ended while it compiles has told the rest.
"""

import dataclasses
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from qwen3next.cli import parse_config
from qwen3next.collectives import network_facts
from qwen3next.config import TrainConfig
from qwen3next.errors import exit_on_input_error, require
from qwen3next.jaxprs import remat_regions
from qwen3next.mesh import ROWS, check_mesh, make_mesh, place, row_shards, shardings
from qwen3next.optim import optimizer
from qwen3next.remat import Remat
from qwen3next.report import jaxpr_flops
from qwen3next.residuals import saved_values
from qwen3next.tpu import topology_devices
from qwen3next.training import draw_state, initial_state, jit_train_step

_STATISTICS = {
    "temporaries": "temp_size_in_bytes",
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "aliased": "alias_size_in_bytes",
    "code": "generated_code_size_in_bytes",
    "host_temporaries": "host_temp_size_in_bytes",
}
_BATCH = ("input_ids", "labels", "segment_ids")

Facts = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What a child is asked. `config` is TOML, the choice of rematerialisation in it.

    `batch`: rows of one device, `None` for the config's batch divided among the devices. `steps` to run, 0 for none.
    `plain_flops`: those of the step without rematerialisation, if they are known.
    """

    config: str
    batch: int | None
    topology: str | None = None
    steps: int = 0
    plain_flops: int | None = None


def peak_bytes(facts: Facts) -> int | None:
    """Arguments + outputs - aliased + temporaries + code, of what is known; `None` without the temporaries."""
    if facts.get("temporaries") is None:
        return None
    known = {name: facts.get(name) or 0 for name in _STATISTICS}
    return known["arguments"] + known["outputs"] - known["aliased"] + known["temporaries"] + known["code"]


def _transform(config: TrainConfig) -> Any:
    return optimizer(config.optimizer, config.run.steps)


def _with_rows(config: TrainConfig, rows: int) -> TrainConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=rows))


def _trace(config: TrainConfig, state: PyTree, frozen: PyTree, **how: Any) -> Any:
    """The step of `train.py` on abstract arguments, the state donated."""
    shape = jax.ShapeDtypeStruct((config.data.batch_size, config.data.sequence_length), jnp.int32)
    step = jit_train_step(config, _transform(config), **how)
    return step.trace((frozen, dict.fromkeys(_BATCH, shape)), state)


def measure(request: Request) -> Iterator[Facts]:
    """The row's facts, part by part: bytes and FLOPs of one device, seconds, losses in nats a token.

    Raises `InputError` for a topology that is unknown and rows that do not divide.
    """
    config = parse_config(request.config, "the config")
    machine = topology_devices(request.topology) if request.topology else jax.devices()
    devices = len(machine)
    sizes = config.mesh.sizes(devices)
    shards = row_shards(sizes)
    if request.topology:
        config = dataclasses.replace(config, compute=dataclasses.replace(config.compute, platform="tpu"))
    total, parts = config.data.batch_size, config.run.accumulate
    if request.batch is None:
        check_mesh(config, sizes)
    rows = request.batch or total // shards
    require(rows % parts == 0, f"a batch of {rows} rows a device; it must be a multiple of run.accumulate, {parts}")
    config = _with_rows(config, rows * shards)
    check_mesh(config, sizes)
    names = ("jax", "jaxlib", "libtpu") if request.topology else ("jax", "jaxlib")
    versions = {name: importlib.metadata.version(name) for name in names} | {"python": platform.python_version()}
    yield {
        "batch": rows,
        "devices": devices,
        "backend": request.topology or jax.default_backend(),
        "versions": versions,
    }

    saved = saved_values(config.model, config.compute, rows // parts, config.data.sequence_length)
    yield {"saved": {kind: [value._asdict() for value in values] for kind, values in saved.items()}}

    mesh = make_mesh(config.mesh, machine) if devices > 1 else None
    begin = partial(initial_state, config, _transform(config))
    state, frozen = eqx.filter_eval_shape(begin, jax.random.key(config.run.seed))
    with jax.set_mesh(mesh) if mesh else nullcontext():
        how: dict[str, Any] = {}
        if mesh:
            places = shardings(state, mesh)
            given = (shardings(frozen, mesh), NamedSharding(mesh, ROWS))
            how = {"in_shardings": (given, places), "out_shardings": (places, None)}
        traced = _trace(config, state, frozen, **how)
        flops, plain_flops = jaxpr_flops(traced.jaxpr.jaxpr), request.plain_flops
        if plain_flops is None:
            plain = dataclasses.replace(config, compute=dataclasses.replace(config.compute, remat=Remat("none")))
            plain_flops = jaxpr_flops(_trace(plain, state, frozen).jaxpr.jaxpr)
        yield {
            "flops": flops,
            "plain_flops": plain_flops,
            "recompute": flops / plain_flops - 1,
            "regions": remat_regions(traced.jaxpr.jaxpr),
        }
        lowered, started = traced.lower(), time.perf_counter()
        compiled = lowered.compile()
        seconds, found = time.perf_counter() - started, compiled.memory_analysis()
        facts: Facts = {name: getattr(found, field, 0) or None for name, field in _STATISTICS.items()}
        yield facts | {"peak": peak_bytes(facts), "compile_seconds": seconds}
        if mesh:
            yield network_facts(compiled.as_text())
        if request.steps:
            yield _run(compiled, config, request.steps)


def _run(compiled: Any, config: TrainConfig, steps: int) -> Facts:
    """Steps on random tokens, the same for each choice; the first, which warms up, is not timed."""
    state, frozen = draw_state(config, _transform(config), jax.random.key(config.run.seed))
    rng, losses, seconds = np.random.default_rng(config.run.seed), list[float](), list[float]()
    rows, length = config.data.batch_size, config.data.sequence_length
    for _ in range(steps + 1):
        ids = rng.integers(config.model.vocab_size, size=(rows, length + 1), dtype=np.int32)
        arrays = (ids[:, :-1], ids[:, 1:], np.ones((rows, length), np.int32))
        batch = place(dict(zip(_BATCH, arrays, strict=True)))
        started = time.perf_counter()
        state, metrics = compiled((frozen, batch), state)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - started)
    return {"step_seconds": statistics.median(seconds[1:]), "losses": losses[1:]}


if __name__ == "__main__":
    with exit_on_input_error():
        for facts in measure(Request(**json.load(sys.stdin))):
            print(json.dumps(facts), flush=True)
