"""What several test files share: tiny models, and the decoder as a plain Python loop over its layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jax.core import Tracer

from qwen3next.cache import Cache, LayerCache
from qwen3next.config import Compute, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from qwen3next.context import Context, locate
from qwen3next.layer import Layer
from qwen3next.linear import AbstractEmbedding
from qwen3next.model import Qwen3Next, abstract_model
from qwen3next.moe import MoE, RouterStats
from qwen3next.tree import leaf_path

T = TypeVar("T")

# These programs compute for milliseconds and compile for seconds: most of that is LLVM optimising what runs once.
jax.config.update("jax_disable_most_optimizations", True)


def tiny_config(**changes: Any) -> ModelConfig:
    """Sizes that differ where two axes could be mixed up, and weights large enough for every part to matter."""
    sizes: dict[str, Any] = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=512,
        initializer_range=0.2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return ModelConfig(**(sizes | changes))


def tiny_model(seed: int = 0, **changes: Any) -> Qwen3Next:
    """A random model whose state lasts, which is what most tests need. Drawn by NumPy: nothing to compile."""
    skeleton = abstract_model(tiny_config(**changes))
    return slow_decay(randomise(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), skeleton), seed))


def slow_decay(model: T) -> T:
    """As it is drawn, the decay lets nearly every head forget within four tokens: a lost state could not be seen."""

    def slow(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return jnp.full_like(leaf, np.log(0.05)) if leaf_path(path).endswith("A_log") else leaf

    return jax.tree_util.tree_map_with_path(slow, model)


def randomise(model: T, seed: int) -> T:
    """Noise on every parameter, so that no norm weight, bias or gate keeps the constant that it starts from."""
    rng = np.random.default_rng(seed)

    def noisy(leaf: jax.Array) -> jax.Array:
        noise = 0.2 * rng.standard_normal(leaf.shape).astype(np.float32)
        return leaf + jnp.asarray(noise.astype(leaf.dtype))

    return jax.tree.map(noisy, model)


def tokens(*shape: int, seed: int = 0, vocab: int = 64) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, shape, np.int32))


@contextmanager
def as_users_run() -> Iterator[None]:
    """Without the type checks of the tests, which would refuse a bad value before the package's own check."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


class Unrolled(NamedTuple):
    """All that a forward passes through, a list entry a layer; a dense layer has no router."""

    logits: jax.Array
    final_hidden: jax.Array
    layer_out: list[jax.Array]
    mixer_out: list[jax.Array]
    mlp_out: list[jax.Array]
    router_logits: list[jax.Array | None]
    router: list[RouterStats | None]
    cache: Cache | None


def layers_of(model: Qwen3Next) -> list[Layer]:
    """The decoder's layers; cut out by NumPy where there is no tracing, since every slice would be compiled."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(model)):
        return model.decoder.layers()
    return [jax.tree.map(jnp.asarray, layer) for layer in jax.tree.map(np.asarray, model.decoder).layers()]


@eqx.filter_jit
def _begin(embedding: AbstractEmbedding, ids: jax.Array, *call: Any) -> tuple[jax.Array, Context, Cache | None]:
    config, compute, segment_ids, positions, cache = call
    context, cache = locate(config, compute, ids.shape, segment_ids, positions, cache)
    return embedding(ids, jnp.dtype(compute.dtype)), context, cache


@eqx.filter_jit  # one compilation a kind of layer, however many layers there are
def _apply(layer: Layer, h: jax.Array, context: Context, cache: LayerCache | None) -> tuple[Any, ...]:
    mixed, cache, _ = layer.mixer(layer.input_layernorm(h), context, cache)
    x = layer.post_attention_layernorm(h + mixed)
    if isinstance(layer.mlp, MoE):
        out, stats = layer.mlp(x, context)
        return h + mixed + out, mixed, out, layer.mlp.gate(x), stats, cache
    out = layer.mlp(x)
    return h + mixed + out, mixed, out, None, None, cache


@eqx.filter_jit
def _end(model: Qwen3Next, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    states = model.norm(h)
    return model.logits(states), states


def unrolled(
    model: Qwen3Next,
    ids: jax.Array,
    segment_ids: jax.Array | None = None,
    cache: Cache | None = None,
    *,
    positions: jax.Array | None = None,
    compute: Compute = Compute(),
) -> Unrolled:
    """The forward without a scan: the layers one by one."""
    call = (model.config, compute, segment_ids, positions, cache)
    h, context, moved = _begin(model.embed_tokens, ids, *call)
    layers = layers_of(model)
    steps: list[tuple[Any, ...]] = []
    for layer, entry in zip(layers, cache.layers if cache is not None else [None] * len(layers), strict=True):
        steps.append(_apply(layer, h, context, entry))
        h = steps[-1][0]
    outs, mixer_outs, mlp_outs, router_logits, router, entries = (list(part) for part in zip(*steps, strict=True))
    if moved is not None:
        moved = eqx.tree_at(lambda cache: cache.layers, moved, tuple(entries))
    logits, states = _end(model, h)
    return Unrolled(logits, states, outs, mixer_outs, mlp_outs, router_logits, router, moved)


_TEXT = "def greet(name):\n    return f'hello {name}'\n\n" * 200


def run_config(folder: Path, **run: Any) -> TrainConfig:
    """A run of seconds on a text of its own."""
    source = folder / "text.txt"
    source.write_text(_TEXT)
    defaults = {"steps": 6, "log_every": 2, "eval_every": 3, "save_every": 100, "sample_tokens": 4, "wandb": "off"}
    return TrainConfig(
        model=tiny_config(vocab_size=257, initializer_range=0.02),
        data=DataConfig(source=(str(source),), sequence_length=32, batch_size=4, held_out=0.1),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=2),
        run=RunConfig(folder=str(folder / "run"), **{**defaults, **run}),
    )
