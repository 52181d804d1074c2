"""The language model: embedding, decoder, final norm, head."""

import dataclasses
import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from qwen3next.cache import Cache
from qwen3next.config import Compute, ModelConfig
from qwen3next.context import locate
from qwen3next.errors import require
from qwen3next.layer import LayerStats
from qwen3next.linear import AbstractEmbedding, AbstractLinear, Embedding, Linear
from qwen3next.mesh import axis_sizes, shard_rows
from qwen3next.moe import RouterStats
from qwen3next.norms import RMSNorm
from qwen3next.stack import Decoder
from qwen3next.vocabulary import Losses, cross_entropy, embed


class Hidden(NamedTuple):
    """Final-normed hidden states; the cache moved past the call (`None` if none was given); sums by layer."""

    states: Float[Array, "batch seq hidden"]
    cache: Cache | None
    stats: tuple[LayerStats, ...]

    @property
    def router(self) -> tuple[RouterStats | None, ...]:
        """The router's sums of each layer."""
        return tuple(layer.router for layer in self.stats)


class Qwen3Next(eqx.Module):
    """Qwen3-Next: a hybrid of Gated DeltaNet and gated attention with a mixture of experts in each layer.

    There is one forward. Training, a prefill, a piece of one and a decode step differ in their data alone.
    """

    embed_tokens: AbstractEmbedding
    decoder: Decoder
    norm: RMSNorm
    lm_head: AbstractLinear | None
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        c, dtype = config, jnp.dtype(config.dtype)
        embed_key, decoder_key, head_key = jax.random.split(key, 3)
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, c.initializer_range, dtype, key=embed_key)
        self.decoder = Decoder(c, key=decoder_key)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.lm_head = None
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.hidden_size, c.vocab_size, c.initializer_range, dtype, key=head_key)
        self.config = c

    def hidden(
        self,
        input_ids: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        cache: Cache | None = None,
        *,
        positions: Int[Array, "batch seq"] | None = None,
        compute: Compute = Compute(),
    ) -> Hidden:
        """Everything but the head.

        `segment_ids`: 0 is padding, equal ids of neighbours are one document; documents do not see each other, and
        padding changes nothing. `None` is one document a row, or the rest of the one that the cache ends in.
        A document must be contiguous within a call. `cache` is continued from; tokens that do not fit raise
        `InputError`, or under `jit` give NaN. `positions` are the rotary ones; by default a document counts from 0.
        """
        heads = axis_sizes()["tensor"]
        require(cache is None or heads == 1, f"a cache on a mesh with tensor {heads}; caches need mesh.tensor 1")
        context, cache = locate(self.config, compute, input_ids.shape, segment_ids, positions, cache)
        c = self.config
        h = embed(self.embed_tokens, input_ids, (c.vocab_size, c.hidden_size), jnp.dtype(compute.dtype))
        layers = (None,) * self.config.num_hidden_layers if cache is None else cache.layers
        h, layers, stats = self.decoder(shard_rows(h), layers, context)
        if cache is not None:
            cache = dataclasses.replace(cache, layers=layers)
        return Hidden(self.norm(h), cache, stats)

    def logits(self, states: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Next-token logits of final-normed hidden states, in their dtype."""
        with jax.named_scope("lm_head"):
            return self.embed_tokens.logits(states) if self.lm_head is None else self.lm_head(states)

    def cross_entropy(self, states: Float[Array, "batch seq hidden"], labels: Int[Array, "batch seq"]) -> Losses:
        """The losses that these states' logits have, without all logits ever being there: see `vocabulary.py`."""
        with jax.named_scope("lm_head"):
            table = self.embed_tokens if self.lm_head is None else self.lm_head
            return cross_entropy(table, states, labels, self.config.vocab_size)


@functools.lru_cache(maxsize=16)
def abstract_model(config: ModelConfig) -> Qwen3Next:
    """The model's tree with shapes and dtypes in place of arrays: nothing is allocated, whatever the size."""
    return eqx.filter_eval_shape(Qwen3Next, config, key=jax.random.key(0))
