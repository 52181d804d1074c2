"""Counts against hand formulas, and bits per byte against their definition."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import tiny_config, tiny_model

from qwen3next.config import Compute
from qwen3next.data.batches import eval_batches
from qwen3next.data.corpus import tokenize
from qwen3next.data.documents import Document, LeftOut, Part
from qwen3next.data.packing import Rows
from qwen3next.evaluate import compressed_bits_per_byte, evaluate
from qwen3next.experts import Experts
from qwen3next.model import abstract_model
from qwen3next.report import active_parameters, count_parameters, jaxpr_flops
from qwen3next.tokenizer import ByteTokenizer

MATRIX = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def count_flops(function, *args):
    return jaxpr_flops(jax.make_jaxpr(function)(*args).jaxpr)


def test_a_loop_counts_as_often_as_it_runs():
    def loop(x, w):
        return jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=5)[0]

    def written_out(x, w):
        for _ in range(5):
            x = x @ w
        return x

    assert count_flops(loop, MATRIX, MATRIX) == count_flops(written_out, MATRIX, MATRIX) == 5 * 2 * 8**3


def test_recomputation_is_counted():
    def run(x, w, wrap):
        return jnp.sum(wrap(lambda x: jnp.sin(x @ w))(x))

    plain = count_flops(jax.grad(lambda x, w: run(x, w, lambda f: f)), MATRIX, MATRIX)
    again = count_flops(jax.grad(lambda x, w: run(x, w, jax.checkpoint)), MATRIX, MATRIX)
    assert again - plain == 2 * 8**3


@pytest.mark.parametrize("dispatch, rows", [("dense", 4 * 30), ("ragged", 2 * 30)])
def test_experts_cost_what_their_rows_do(dispatch, rows):
    config = dataclasses.replace(tiny_config(), hidden_size=16, moe_intermediate_size=24)
    experts = jax.eval_shape(lambda key: Experts(config, key=key), jax.random.key(0))
    x, weights = jnp.zeros((30, 16)), jnp.zeros((30, 2))
    chosen = jnp.zeros((30, 2), jnp.int32)

    def forward(experts):
        return jnp.sum(experts(x, weights, chosen, Compute(dispatch=dispatch))[0])

    products = 3 * 2 * rows * 16 * 24
    overhead = 0.15 * products  # router weights times outputs, and for `dense` the one-hot choice
    assert products <= count_flops(forward, experts) <= products + overhead
    # With gradients: what the forward needs, three of weights, and one of the down projection's input (x has none).
    assert 2 * products <= count_flops(jax.grad(forward), experts) <= 8 / 3 * products + 3 * overhead


def test_parameters_are_counted_once_and_idle_experts_not_at_all():
    config = tiny_config(num_hidden_layers=6, mlp_only_layers=(2,))
    model, concrete = abstract_model(config), tiny_model(num_hidden_layers=6, mlp_only_layers=(2,))
    assert count_parameters(model) == sum(leaf.size for leaf in jax.tree.leaves(concrete))
    assert count_parameters(model) - active_parameters(model, config) == 5 * 2 * 3 * 32 * 24


def test_bits_per_byte_of_a_model_that_knows_nothing():
    """All logits 0: every byte and every end of text costs log2(257) bits, wherever rows and documents end."""
    model = tiny_model(vocab_size=257)
    model = eqx.tree_at(lambda model: model.lm_head.weight, model, replace_fn=jnp.zeros_like)
    texts = [b"x" * 50, b"yz" * 40, b"w"]
    documents = [Document(str(i), (Part(text),)) for i, text in enumerate(texts)]
    rows = Rows(tokenize(documents, ByteTokenizer(), 257, LeftOut("fail")), 16)
    bytes_per_label = sum(map(len, texts)) / rows.predictions
    result = evaluate(model, eval_batches([rows], 2), None, Compute(), bytes_per_label)
    assert math.isclose(result["loss"], math.log(257), rel_tol=1e-6)
    bits = sum(len(text) + 1 for text in texts) * math.log2(257)
    assert math.isclose(result["bits_per_byte"], bits / sum(map(len, texts)), rel_tol=1e-6)
    part = evaluate(model, eval_batches([rows], 2), 1, Compute(), bytes_per_label)
    assert math.isclose(part["bits_per_byte"], result["bits_per_byte"], rel_tol=1e-6)
    assert set(evaluate(model, eval_batches([rows], 2), 1, Compute(), None)) == {"loss"}


def test_compressors_are_those_of_the_command_line():
    text = bytes(np.random.default_rng(0).integers(97, 105, 20_000, np.uint8))  # 3 bits each, and no more to gain
    found = compressed_bits_per_byte(text)
    assert 3 <= found["xz"] < 3.4 and 3 <= found["gzip"] < 3.7
