"""Greedy decoding of a batch: one prefill a length bucket, one step, both compiled once and fed with data."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from qwen3next.cache import Cache, empty_cache
from qwen3next.config import Compute, ModelConfig, Remat
from qwen3next.errors import InputError, require
from qwen3next.model import Qwen3Next
from qwen3next.programs import COMPILER_OPTIONS

_SMALLEST_BUCKET = 64
_AT_ONCE = 32  # tokens that the device makes before the host looks at them


def bucket(length: int) -> int:
    """The smallest power of two, from 64, that holds `length`."""
    return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())


class _Progress(eqx.Module):
    """What a step hands to the next: each row's last token, whether it has ended, and the cache."""

    token: Int[Array, " batch"]
    ended: Bool[Array, " batch"]
    cache: Cache


def _next(
    model: Qwen3Next,
    compute: Compute,
    ends: Int[Array, " ends"],
    input_ids: Int[Array, "batch seq"],
    segment_ids: Int[Array, "batch seq"],
    ended: Bool[Array, " batch"],
    cache: Cache,
) -> _Progress:
    """Runs tokens through the model and picks the likeliest next one. A row that has ended is padding."""
    states, cache_after, _ = model.hidden(input_ids, segment_ids, cache, compute=compute)
    assert cache_after is not None
    token = jnp.argmax(model.logits(states[:, -1]).astype(jnp.float32), axis=-1).astype(jnp.int32)
    return _Progress(token, ended | jnp.any(token[:, None] == ends[None, :], axis=1), cache_after)


@partial(jax.jit, static_argnames=("compute", "capacity"), compiler_options=COMPILER_OPTIONS)
def prefill(
    model: Qwen3Next,
    compute: Compute,
    ends: Int[Array, " ends"],
    input_ids: Int[Array, "batch seq"],
    segment_ids: Int[Array, "batch seq"],
    capacity: int,
) -> _Progress:
    """The prompts' next tokens, and a cache of `capacity` that holds the prompts."""
    batch = input_ids.shape[0]
    cache = empty_cache(model.config, batch, capacity, jnp.dtype(compute.dtype))
    return _next(model, compute, ends, input_ids, segment_ids, jnp.zeros(batch, bool), cache)


@partial(jax.jit, static_argnames="compute", donate_argnames="state", compiler_options=COMPILER_OPTIONS)
def steps(
    model: Qwen3Next, compute: Compute, ends: Int[Array, " ends"], state: _Progress, count: Int[Array, ""]
) -> tuple[_Progress, Int[Array, "_AT_ONCE batch"], Int[Array, ""]]:
    """Up to `count` steps of one token, fewer if all rows end; the tokens, -1 of an ended row, and how many steps."""

    def wanted(carry: tuple[_Progress, Array, Array]) -> Array:
        state, _, made = carry
        return (made < count) & ~jnp.all(state.ended)

    def step(carry: tuple[_Progress, Array, Array]) -> tuple[_Progress, Array, Array]:
        state, tokens, made = carry
        segments = jnp.where(state.ended, 0, 1)[:, None].astype(jnp.int32)
        after = _next(model, compute, ends, state.token[:, None], segments, state.ended, state.cache)
        return after, tokens.at[made].set(jnp.where(state.ended, -1, after.token)), made + 1

    nothing = jnp.full((_AT_ONCE, state.token.size), -1, jnp.int32)
    return jax.lax.while_loop(wanted, step, (state, nothing, jnp.int32(0)))


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
    ends, capacity = jnp.asarray(np.array(end_of_text, np.int32)), length + bucket(max_new_tokens)
    state = prefill(model, compute, ends, jnp.asarray(ids), jnp.asarray(segments), capacity)
    yield jax.device_get(state.token)
    left, count = max_new_tokens - 1, 1
    if left > 0 and compute.target == "cpu":
        model = eqx.tree_at(lambda model: model.decoder, model, model.decoder.apart())
    while left > 0:
        state, tokens, made = steps(model, compute, ends, state, jnp.int32(min(left, count)))
        yield from jax.device_get(tokens)[: int(made)]
        left = 0 if bool(jnp.all(state.ended)) else left - int(made)
        count = min(2 * count, _AT_ONCE)  # the first tokens come one by one, to be seen early
