"""Greedy decoding of a batch: one prefill a length bucket, one step, both compiled once and fed with data."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from qwen3next.cache import Cache, empty_cache
from qwen3next.config import Compute, ModelConfig, Remat
from qwen3next.errors import InputError, require
from qwen3next.model import Qwen3Next

_SMALLEST_BUCKET = 64


def bucket(length: int) -> int:
    """The smallest power of two, from 64, that holds `length`."""
    return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())


class _Progress(eqx.Module):
    """What a step hands to the next: each row's last token, whether it has ended, and the cache."""

    token: Int[Array, " batch"]
    ended: Bool[Array, " batch"]
    cache: Cache


@eqx.filter_jit(donate="all-except-first")
def _advance(
    inputs: tuple[Qwen3Next, Compute, Int[Array, " ends"]],
    input_ids: Int[Array, "batch seq"],
    segment_ids: Int[Array, "batch seq"],
    ended: Bool[Array, " batch"],
    cache: Cache,
) -> _Progress:
    """Runs tokens through the model and picks the likeliest next one. A row that has ended is padding."""
    model, compute, ends = inputs
    states, cache_after, _ = model.hidden(input_ids, segment_ids, cache, compute=compute)
    assert cache_after is not None
    token = jnp.argmax(model.logits(states[:, -1]).astype(jnp.float32), axis=-1).astype(jnp.int32)
    return _Progress(token, ended | jnp.any(token[:, None] == ends[None, :], axis=1), cache_after)


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raises `InputError` for an empty prompt, an id outside the vocabulary, or more tokens than positions."""
    vocab, limit = config.vocab_size, config.max_position_embeddings
    require(len(prompts) > 0, "no prompt was given; needed: at least one")
    require(max_new_tokens > 0, f"max_new_tokens is {max_new_tokens}; it must be above 0")
    for prompt in prompts:
        require(len(prompt) > 0, "a prompt is empty; it must hold at least one token")
        for token in prompt:
            if not 0 <= token < vocab:
                raise InputError(f"prompt id {token} is outside the vocabulary; allowed: 0 to {vocab - 1}")
        require(
            len(prompt) + max_new_tokens <= limit,
            f"a prompt of {len(prompt)} and {max_new_tokens} new tokens exceed max_position_embeddings, {limit}",
        )


def generate(
    model: Qwen3Next,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    end_of_text: Sequence[int] = (),
    compute: Compute = Compute(),
) -> Iterator[Int32[np.ndarray, " batch"]]:
    """Yields each row's next token until all rows have ended or `max_new_tokens` are made; -1 for an ended row.

    The token that ends a text is yielded. Prompts may differ in length: they are padded on the left. Within a bucket
    of the longest prompt's length, and one of `max_new_tokens`, nothing is compiled again.
    """
    check_prompts(model.config, prompts, max_new_tokens)
    how = {"dispatch": "auto", "expert_chunks": 1} if compute.dispatch == "all_to_all" else {}
    compute = replace(compute, remat=Remat("none", barrier=False), **how)
    length = bucket(max(len(prompt) for prompt in prompts))
    ids = np.zeros((len(prompts), length), np.int32)
    segments = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = prompt
        segments[row, length - len(prompt) :] = 1
    cache = empty_cache(model.config, len(prompts), length + bucket(max_new_tokens), jnp.dtype(compute.dtype))
    inputs = (model, compute, jnp.asarray(np.array(end_of_text, np.int32)))
    ended = np.zeros(len(prompts), bool)
    state = _advance(inputs, jnp.asarray(ids), jnp.asarray(segments), jnp.asarray(ended), cache)
    for made in range(1, max_new_tokens + 1):
        token, was_ended, ended = jax.device_get(state.token), ended, jax.device_get(state.ended)
        yield np.where(was_ended, np.int32(-1), token)
        if made == max_new_tokens or ended.all():
            return
        segments = jnp.where(state.ended, 0, 1)[:, None].astype(jnp.int32)
        state = _advance(inputs, state.token[:, None], segments, state.ended, state.cache)
