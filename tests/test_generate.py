"""Greedy decoding against its definition, and how often it compiles."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import tiny_config, tiny_model

from qwen3next.config import Compute, ModelConfig
from qwen3next.errors import InputError
from qwen3next.generate import bucket, generate
from qwen3next.model import Qwen3Next

FULL, LINEAR = "full_attention", "linear_attention"
PATTERNS = {
    "one cycle": {"num_hidden_layers": 4},
    "remainder": {"num_hidden_layers": 6},
    "odd order": {"num_hidden_layers": 5, "layer_types": (FULL, LINEAR, LINEAR, FULL, LINEAR)},
    "no attention": {"num_hidden_layers": 2, "layer_types": (LINEAR, LINEAR)},
}


@eqx.filter_jit
def _forward(model: Qwen3Next, ids: jax.Array) -> jax.Array:
    return model.logits(model.hidden(ids).states)


def by_definition(model: Qwen3Next, prompt: list[int], count: int) -> list[int]:
    """The argmax of a plain forward over the growing prefix. Zeros after it keep one shape; no token sees them."""
    ids = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, len(prompt) + count), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(jnp.argmax(_forward(model, jnp.asarray(padded))[0, len(ids) - 1])))
    return ids[len(prompt) :]


def decoded(model: Qwen3Next, prompts: list[list[int]], count: int, **options) -> list[list[int]]:
    rows = np.stack(list(generate(model, prompts, count, **options)), axis=1)
    return [[token for token in row if token >= 0] for row in rows.tolist()]


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_decoding_is_the_argmax_of_a_forward_over_the_growing_prefix(pattern, unroll):
    model = tiny_model(**PATTERNS[pattern])
    prompts = [[5, 9, 3, 7, 1] * 14, [4], [8, 2, 6]]  # beyond a chunk; shorter than the convolution; of other lengths
    expected = [by_definition(model, prompt, 12) for prompt in prompts]
    assert len({token for row in expected for token in row}) > 8
    assert decoded(model, prompts, 12, compute=Compute(unroll=unroll)) == expected


def test_a_row_ends_at_its_end_of_text_and_the_others_go_on():
    model = tiny_model(num_hidden_layers=4)
    prompts = [[1, 2, 3], [7, 8, 9, 10]]
    free = decoded(model, prompts, 10)
    ending = next(token for token in free[0][1:] if token not in free[1])
    stop = free[0].index(ending) + 1
    assert decoded(model, prompts, 10, end_of_text=(ending,)) == [free[0][:stop], free[1]]
    assert decoded(model, prompts[:1], 10, end_of_text=(ending,)) == [free[0][:stop]]


def test_lengths_within_a_bucket_compile_nothing(monkeypatch):
    traced = []
    hidden = Qwen3Next.hidden

    def counted(self, input_ids, *args, **kwargs):
        traced.append(input_ids.shape)
        return hidden(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(Qwen3Next, "hidden", counted)
    model = tiny_model(num_hidden_layers=4, vocab_size=67)  # a shape that no other test has compiled
    for length, count in ((3, 32), (1, 32), (40, 5), (64, 64), (17, 50)):
        decoded(model, [list(range(length))], count)
    assert traced == [(1, 64), (1, 1)]
    decoded(model, [list(range(65))], 5)
    assert traced[2:] == [(1, 128), (1, 1)]  # a longer bucket has a longer cache


def test_buckets_are_powers_of_two():
    assert [bucket(n) for n in (1, 64, 65, 128, 129, 5000)] == [64, 64, 128, 128, 256, 8192]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 127, 128, 129, 2047, 2049])
def test_prompts_of_any_length_are_finite(length):
    model = tiny_model(max_position_embeddings=4096)
    made = decoded(model, [[(3 * i) % 50 for i in range(length)]], 2)
    assert len(made[0]) == 2 and all(0 <= token < model.config.vocab_size for token in made[0])


@pytest.mark.parametrize(
    "prompts, count, names",
    [
        ([], 5, "no prompt"),
        ([[1], []], 5, "empty"),
        ([[1, 64]], 5, "64 is outside the vocabulary; allowed: 0 to 63"),
        ([[-1]], 5, "-1 is outside the vocabulary"),
        ([[1]], 0, "max_new_tokens is 0"),
        ([[1] * 90], 11, "90 and 11 new tokens exceed max_position_embeddings, 100"),
    ],
)
def test_bad_input_is_named(prompts, count, names):
    config = dataclasses.replace(tiny_config(num_hidden_layers=2), max_position_embeddings=100, vocab_size=64)
    assert isinstance(config, ModelConfig)
    model = Qwen3Next(config, key=jax.random.key(0))
    with pytest.raises(InputError, match=names):
        list(generate(model, prompts, count))
