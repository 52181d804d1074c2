"""Cross-entropy and lookup a piece of the vocabulary at a time, against all logits at once and a plain lookup."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from common import run_config, tiny_model
from jax.extend.core import Literal

from qwen3next import vocabulary
from qwen3next.config import LoRAConfig
from qwen3next.jaxprs import equations, remat_regions
from qwen3next.lora import add_adapters
from qwen3next.optim import trainable
from qwen3next.training import gradients, loss

HIDDEN = 8
LABELS = jnp.asarray([[0, 1, -100, 36, 5, 36], [-100, -100, 35, 7, 7, 12]])


def _model(tied, adapters, vocab):
    model = tiny_model(num_hidden_layers=1, vocab_size=vocab, hidden_size=HIDDEN, tie_word_embeddings=tied)
    if adapters:
        model = add_adapters(
            model, LoRAConfig(targets=("head",) if not tied else ("embedding",)), key=jax.random.key(1)
        )
    return jax.tree.map(lambda leaf: leaf + 0.1, model)  # adapters that act


def _plain(model, states, labels):
    """Mean nats and mean squared logsumexp from all logits."""
    logits, counted = model.logits(states).astype(jnp.float32), labels != -100
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, labels, 0))
    z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return [jnp.sum(jnp.where(counted, x, 0)) / jnp.sum(counted, dtype=jnp.float32) for x in (nats, z)]


def _in_pieces(model, states, labels):
    found = model.cross_entropy(states, labels)
    return [found.nats / found.labels, found.z / found.labels]


@pytest.mark.parametrize(("tied", "adapters"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("vocab", "largest"), [(37, 2**24), (37, 12 * 5), (40, 12 * 8), (37, 1)])
def test_pieces_give_what_all_logits_give(monkeypatch, tied, adapters, vocab, largest):
    """One piece; pieces that divide, that do not, and of one row each. Values and every gradient to 1e-6."""
    monkeypatch.setattr(vocabulary, "_LARGEST", largest)
    model, states = _model(tied, adapters, vocab), jax.random.normal(jax.random.key(2), (2, 6, HIDDEN))

    def both(function):
        def weighted(model, states):
            nats, z = function(model, states, LABELS)
            return nats + 0.1 * z, (nats, z)

        run = eqx.filter_jit(lambda args: eqx.filter_grad(lambda args: weighted(*args), has_aux=True)(args))
        slopes, values = run((model, states))
        return values, jax.tree.leaves(slopes)

    (values, slopes), (expected, wanted) = both(_in_pieces), both(_plain)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    for found, right in zip(slopes, wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-6)


def test_logits_beyond_a_bound_are_nowhere(monkeypatch):
    """No array of tokens x vocabulary, in the loss or its gradient; the pieces are not units of rematerialisation."""
    tokens, vocab = 48, 640
    monkeypatch.setattr(vocabulary, "_LARGEST", tokens * 64)
    model = tiny_model(num_hidden_layers=1, vocab_size=vocab, hidden_size=HIDDEN)
    states, labels = jnp.zeros((1, tokens, HIDDEN)), jnp.zeros((1, tokens), jnp.int32)

    def largest(function):
        jaxpr = jax.make_jaxpr(jax.grad(lambda model, states: function(model, states, labels)[0], argnums=(0, 1)))
        found = equations(jaxpr(model, states).jaxpr)
        shapes = [v.aval.shape for equation, _ in found for v in equation.outvars if not isinstance(v, Literal)]
        return max(np.prod(shape) for shape in shapes if tokens in shape)

    assert largest(_plain) == tokens * vocab and largest(_in_pieces) == tokens * 64
    assert remat_regions(jax.make_jaxpr(lambda states: _in_pieces(model, states, labels))(states).jaxpr) == 0


def test_z_loss_is_the_mean_squared_logsumexp(tmp_path):
    """In the objective, in what is logged, and in gradients over microbatches."""
    model = tiny_model(num_hidden_layers=1)
    params, frozen = eqx.partition(model, trainable(model))
    ids = np.random.default_rng(0).integers(0, 64, (4, 9)).astype(np.int32)
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "segment_ids": np.ones((4, 8), np.int32)}
    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    compute = run_config(tmp_path).compute

    @oracles.quick_jit
    def objectives(params):
        return [loss(params, frozen, batch, jnp.float32(32), compute, None, coefficient) for coefficient in (0.5, 0.0)]

    (total, parts), (without, _) = objectives(params)
    logits = model.logits(model.hidden(batch["input_ids"]).states)
    z = jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)))
    np.testing.assert_allclose(parts["z"], z, rtol=1e-5)
    np.testing.assert_allclose(total - without, 0.5 * z, rtol=1e-4)
    whole, _ = oracles.quick_jit(lambda params: gradients(params, frozen, batch, 1, compute, None, 0.5))(params)
    parted, metrics = oracles.quick_jit(lambda params: gradients(params, frozen, batch, 2, compute, None, 0.5))(params)
    np.testing.assert_allclose(metrics["z"], z, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * max(1, float(jnp.abs(one).max())))


def test_a_row_of_the_table_by_piece():
    """`find` and `cut` agree on where each row lies, whatever the size of a piece."""
    for held, count in ((37, 1), (37, 5), (40, 5), (7, 7)):
        pieces = vocabulary.Pieces(held, (), count, 1)
        cut = np.asarray(pieces.cut(jnp.arange(held) + 1, 0))
        for number in range(count):
            place, here = pieces.find(jnp.arange(held), number)
            np.testing.assert_array_equal(cut[number][place][here], np.arange(held)[here] + 1)
            np.testing.assert_array_equal(pieces.real(number), cut[number] > 0)
