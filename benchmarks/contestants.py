"""This repository's side of `speed.py`: a process times one job, by the functions that train.py and decode.py use."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree
from products import products, time_products
from turns import Facts, Repetition, serve, timed

from qwen3next.cli import load_config
from qwen3next.config import IGNORED_LABEL, ModelConfig, TrainConfig
from qwen3next.context import locate
from qwen3next.delta_rule import gated_delta_rule
from qwen3next.generate import generate
from qwen3next.hf import load_pretrained, save_pretrained
from qwen3next.model import Qwen3Next, abstract_model
from qwen3next.moe import MoE
from qwen3next.optim import optimizer
from qwen3next.programs import COMPILER_OPTIONS
from qwen3next.remat import Remat
from qwen3next.report import count_parameters
from qwen3next.training import Batch, draw_state, jit_train_step, make_train_step

_READ = 2**28  # bytes


def run_or_products(function: Callable[..., Any], args: tuple[Any, ...], spec: Facts) -> Repetition:
    """The function's time, compiled, or that of the products it contains."""
    if spec["variant"] == "products":
        return time_products(products(function, *args))
    compiled = jax.jit(function, compiler_options=COMPILER_OPTIONS)
    return lambda: timed(lambda: jax.block_until_ready(compiled(*args)))


def gradients(function: Callable[..., Array]) -> Callable[[PyTree, Array], PyTree]:
    """`f(args, weights)`: the gradients of the weighted sum of the outputs. With weights of 1 there would be less to
    do."""

    def weighted(args: PyTree, weights: Array) -> Array:
        return jnp.vdot(function(*args), weights)

    return jax.grad(weighted)


def draw(config: ModelConfig, seed: int = 0) -> Qwen3Next:
    """A random model."""
    return jax.jit(lambda key: Qwen3Next(config, key=key))(jax.random.key(seed))


def draw_prompts(config: ModelConfig, rows: int, length: int) -> list[list[int]]:
    """Random prompts."""
    return np.random.default_rng(0).integers(0, config.vocab_size, (rows, length)).tolist()


def draw_batch(config: TrainConfig) -> Batch:
    """A full batch of random tokens, each labelled with the next."""
    rows, length = config.data.batch_size, config.data.sequence_length
    ids = np.random.default_rng(0).integers(0, config.model.vocab_size, (rows, length), np.int32)
    labels = np.concatenate([ids[:, 1:], np.full((rows, 1), IGNORED_LABEL, np.int32)], axis=1)
    return jax.tree.map(jnp.asarray, {"input_ids": ids, "labels": labels, "segment_ids": np.ones_like(ids)})


def train(config: TrainConfig, spec: Facts) -> Repetition:
    """One optimizer step; `variant` is a choice of remat, `unroll` how the layers are looped over."""
    remat = Remat.of("none" if spec["variant"] == "products" else spec["variant"])
    config = dataclasses.replace(
        config, compute=dataclasses.replace(config.compute, remat=remat, unroll=spec.get("unroll", False))
    )
    transform = optimizer(config.optimizer, config.run.steps)
    batch = draw_batch(config)
    state, frozen = draw_state(config, transform, jax.random.key(0))
    if spec["variant"] == "products":
        return time_products(products(make_train_step(config, transform), (frozen, batch), state))
    step, held = jit_train_step(config, transform), [state]

    def run() -> None:
        held[0], metrics = step((frozen, batch), held[0])
        jax.block_until_ready((held[0], metrics))

    return lambda: timed(run)


def prefill(config: TrainConfig, spec: Facts) -> Repetition:
    """A prompt up to its first token, cache filled."""
    model, prompts = draw(config.model), draw_prompts(config.model, spec["rows"], spec["length"])
    return lambda: timed(lambda: list(generate(model, prompts, 1, compute=config.compute)))


def weight_bytes(config: ModelConfig, rows: int) -> int:
    """Bytes of the weights that a decode step reads: all but the embedding, and no more experts than can be chosen."""
    model = abstract_model(config)
    moe_layers = sum(kind.mlp == "moe" for kind in config.layer_kinds)
    idle = max(config.num_experts - rows * config.num_experts_per_tok, 0)
    elements = count_parameters(model) - moe_layers * idle * 3 * config.hidden_size * config.moe_intermediate_size
    if model.lm_head is not None:
        elements -= count_parameters(model.embed_tokens)
    return elements * jnp.dtype(config.dtype).itemsize


def decode(config: TrainConfig, spec: Facts) -> Repetition:
    """`new` tokens after a prompt, from the first token on; or the reading of the weights that they need."""
    rows, steps = spec["rows"], spec["new"] - 1
    if spec["variant"] == "weights":
        read, total = jax.jit(jnp.sum), weight_bytes(config.model, rows)
        array = jax.random.normal(jax.random.key(0), (_READ // 4,), jnp.float32)

        def reading() -> Facts:
            seconds = timed(lambda: jax.block_until_ready(read(array)))["seconds"]
            return {"seconds": steps * total * seconds / _READ, "bytes": total, "bytes_per_second": _READ / seconds}

        return reading
    model, prompts = draw(config.model), draw_prompts(config.model, rows, spec["length"])

    def decoding() -> Facts:
        began = time.perf_counter()
        tokens = generate(model, prompts, spec["new"], compute=config.compute)
        next(tokens)
        first = time.perf_counter() - began
        return timed(lambda: list(tokens)) | {"first_token": first}

    return decoding


def delta(config: TrainConfig, spec: Facts) -> Repetition:
    """The gated delta rule alone, forward and backward."""
    length, key_heads, value_heads, size = (spec[name] for name in ("length", "key_heads", "value_heads", "size"))
    keys = jax.random.split(jax.random.key(0), 6)
    q, k = (jax.random.normal(key, (1, length, key_heads, size)) for key in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, weights = (jax.random.normal(key, (1, length, value_heads, size)) for key in keys[2:4])
    g = -jax.nn.softplus(jax.random.normal(keys[4], (1, length, value_heads)))
    beta = jax.nn.sigmoid(jax.random.normal(keys[5], (1, length, value_heads)))
    state = jnp.zeros((1, value_heads, size, size))

    def outputs(q: Array, k: Array, v: Array, g: Array, beta: Array) -> Array:
        return gated_delta_rule(q, k, v, g, beta, state, chunk_size=config.compute.chunk_size)[0]

    args = (q * size**-0.5, k, v, g, beta)
    return run_or_products(gradients(outputs), (args, weights), spec)


def experts(config: TrainConfig, spec: Facts) -> Repetition:
    """The mixture of experts alone, forward and backward."""
    shape, compute = (1, spec["tokens"]), dataclasses.replace(config.compute, remat=Remat("none"))
    layer, key = jax.jit(lambda key: MoE(config.model, key=key))(jax.random.key(0)), jax.random.key(1)
    x, weights = jax.random.normal(key, (2, *shape, config.model.hidden_size))

    def outputs(layer: MoE, x: Array) -> Array:
        context, _ = locate(config.model, compute, shape, None, None, None)
        return layer(x, context)[0]

    return run_or_products(gradients(outputs), ((layer, x), weights), spec)


def load(config: TrainConfig, spec: Facts) -> Repetition:
    """A Hugging Face folder as a model in memory; `variant` "write" makes that folder first, and only once."""
    folder = Path(spec["folder"])
    if spec["variant"] == "write":
        model = dataclasses.replace(config.model, **spec["model"])
        save_pretrained(draw(model), folder)
        return lambda: {"seconds": 0.0}
    return lambda: timed(lambda: jax.block_until_ready(load_pretrained(folder)))


JOBS = {job.__name__: job for job in (train, prefill, decode, delta, experts, load)}


def make(spec: Facts) -> Repetition:
    """The job that a specification names."""
    return JOBS[spec["job"]](load_config(Path(spec["config"])), spec)


if __name__ == "__main__":
    serve(make)
