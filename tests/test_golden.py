"""Tiny checkpoints against what Hugging Face transformers computed from them: see data/golden/README.md."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import Unrolled, unrolled
from safetensors.numpy import load_file

from qwen3next.cache import AttentionCache, Cache, DeltaNetCache, empty_cache
from qwen3next.config import Compute, Dispatch
from qwen3next.hf import load_pretrained, table
from qwen3next.loss import balance_loss
from qwen3next.model import Qwen3Next

DATA = Path(__file__).parent / "data"
CASES = {path.name: path for folder in ("golden", "golden_extra") for path in sorted((DATA / folder).iterdir())}
CASES = {name: path for name, path in CASES.items() if path.is_dir()}
# The dynamic frequencies that a longer sequence has set stay with the keys in transformers; it has no continuation.
GENERATING = [name for name in CASES if name != "w_longrope_dynamic"]
# Compiling a gradient takes longest. The others differ from one of these in files, sizes or frequencies alone.
TRAINED = [name for name in CASES if name[0] not in "chwx"]
# Gradients go through another way of meeting the experts in each of these; elsewhere through the cheapest to compile.
DISPATCH: dict[str, Dispatch] = {"a_cycle4_8l": "blocks", "b_remainder_6l": "ragged", "f_leftpad": "blocks"}


class Case(NamedTuple):
    model: Qwen3Next
    golden: dict[str, np.ndarray]
    norms: dict[str, Any]
    segment_ids: jax.Array | None
    real: np.ndarray
    dispatch: Dispatch

    def empty(self) -> Cache:
        batch, seq = self.golden["input_ids"].shape
        return empty_cache(self.model.config, batch, seq + 20)


class Trained(NamedTuple):
    logits: jax.Array
    loss_ce: jax.Array
    aux_loss: jax.Array
    gradients: dict[str, Qwen3Next]


def _close(actual: Any, expected: Any, atol: float = 2e-4) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    folder = CASES[request.param]
    golden = load_file(folder / "golden.safetensors")
    mask = golden.get("attention_mask")
    return Case(
        load_pretrained(folder),
        golden,
        json.loads((folder / "grad_norms.json").read_text()),
        None if mask is None else jnp.asarray(mask),
        np.ones(golden["input_ids"].shape, bool) if mask is None else mask.astype(bool),
        DISPATCH.get(request.param, "dense"),
    )


@pytest.fixture(scope="module")
def forward(case: Case) -> Unrolled:
    """The prefill. Transformers counts positions from the row's start, padding included: then its keys are ours."""
    ids = jnp.asarray(case.golden["input_ids"])
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    return unrolled(case.model, ids, case.segment_ids, case.empty(), positions=positions)


@eqx.filter_jit
def _train(model: Qwen3Next, batch: tuple[Any, ...], weights: jax.Array, compute: Compute) -> tuple[Any, ...]:
    """(logits, losses) and the gradient of `weights[0] * loss_ce + weights[1] * aux_loss`."""
    ids, labels, segment_ids = batch

    def losses(model: Qwen3Next) -> tuple[jax.Array, Any]:
        hidden = model.hidden(ids, segment_ids, compute=compute)
        logits = model.logits(hidden.states)
        found = model.cross_entropy(hidden.states, labels)
        both = jnp.stack([found.nats / found.labels, balance_loss(hidden.router)])
        return weights @ both, (logits, both)

    (_, values), gradient = eqx.filter_value_and_grad(losses, has_aux=True)(model)
    return values, gradient


@pytest.fixture(scope="module")
def trained(case: Case) -> Trained:
    labels = np.pad(case.golden["labels"][:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    batch = (jnp.asarray(case.golden["input_ids"]), jnp.asarray(labels), case.segment_ids)
    gradients = {}
    for loss, of_aux in (("ce", 0.0), ("total", case.model.config.router_aux_loss_coef)):
        weights, compute = jnp.array([1.0, of_aux]), Compute(dispatch=case.dispatch)
        (logits, (ce, aux)), gradients[loss] = _train(case.model, batch, weights, compute)
    return Trained(logits, ce, aux, gradients)


def test_forward(case, forward):
    _close(forward.logits[case.real], case.golden["logits"][case.real])
    _close(forward.final_hidden[case.real], case.golden["final_hidden"][case.real])


def test_every_layer(case, forward):
    moe = {index for index, kind in enumerate(case.model.config.layer_kinds) if kind.mlp == "moe"}
    for name in ("layer_out", "mixer_out", "mlp_out", "router_logits"):
        stored = {int(key.split(".")[1]) for key in case.golden if key.startswith(name)}
        assert stored in (moe, set()) if name == "router_logits" else len(stored) in (len(forward.layer_out), 0)
        for index in stored:
            _close(getattr(forward, name)[index][case.real], case.golden[f"{name}.{index}"][case.real])


def _check_states(layers: Any, golden: dict[str, np.ndarray], real: np.ndarray) -> None:
    for index, entry in enumerate(layers):
        state = {key.split(".")[2]: value for key, value in golden.items() if key.startswith(f"state.{index}.")}
        if isinstance(entry, DeltaNetCache):
            _close(entry.state, state.pop("recurrent"))
            # Transformers keeps as many inputs as the kernel has taps; the oldest is never read again.
            _close(entry.conv, np.moveaxis(state.pop("conv")[..., 1:], 1, 2))
        elif state:  # the rows alone have no keys stored
            seq = real.shape[1]
            for name in ("key", "value"):
                held, stored = (np.moveaxis(y, 1, 2)[:, :seq][real] for y in (getattr(entry, name), state.pop(name)))
                _close(held, stored)
        assert not state


def test_states(case, forward):
    _check_states(forward.cache.layers, case.golden, case.real)


@pytest.mark.parametrize("case", TRAINED, indirect=True)
def test_losses(case, trained):
    """Absolute: float32 has steps of 5e-7 at the size of these losses."""
    _close(trained.logits[case.real], case.golden["logits"][case.real])
    _close(trained.loss_ce, case.golden["loss_ce"][0], 1e-5)
    _close(trained.aux_loss, case.golden["aux_loss"][0], 1e-5)
    total = trained.loss_ce + case.model.config.router_aux_loss_coef * trained.aux_loss
    _close(total, case.golden["loss_total"][0], 1e-5)


def _published(model: Qwen3Next, gradient: Qwen3Next) -> dict[str, np.ndarray]:
    """The gradient of each published tensor."""
    found = {}
    for leaf, value in zip(table(model), jax.tree.leaves(gradient), strict=True):
        value = np.asarray(value)
        found |= {str(leaf.tensors[at]): value[at] for at in np.ndindex(leaf.tensors.shape)}
    return found


@pytest.mark.parametrize("case", TRAINED, indirect=True)
@pytest.mark.parametrize("loss", ["ce", "total"])
def test_gradient_norms(case, trained, loss):
    """Relative 5e-4, of a norm of at least 1e-3."""
    norms = {key: np.linalg.norm(g) for key, g in _published(case.model, trained.gradients[loss]).items()}
    expected = case.norms[loss]
    assert norms.keys() == expected.keys()
    wrong = {
        key: (norm, expected[key])
        for key, norm in norms.items()
        if not abs(norm - expected[key]) <= 5e-4 * max(expected[key], 1e-3)
    }
    assert not wrong
    np.testing.assert_allclose(np.linalg.norm(list(norms.values())), case.norms[f"{loss}_global"], rtol=5e-4)


@pytest.mark.parametrize("case", TRAINED, indirect=True)
def test_small_gradients(case, trained):
    gradients = _published(case.model, trained.gradients["ce"])
    expected = {key.removeprefix("grad_ce."): g for key, g in case.golden.items() if key.startswith("grad_ce.")}
    assert expected
    for key, g in expected.items():
        assert np.linalg.norm(gradients[key] - g) <= 5e-4 * max(np.linalg.norm(g), 1e-3), key


@eqx.filter_jit
def _call(model: Qwen3Next, ids: jax.Array, cache: Cache) -> tuple[jax.Array, Any]:
    hidden = model.hidden(ids, cache=cache)
    return model.logits(hidden.states[:, -1]), hidden.cache


def _check_greedy(model: Qwen3Next, logits: jax.Array, cache: Any, golden: dict[str, np.ndarray], name: str) -> None:
    """Feeds back the best token again and again, `logits` being those after the prompt."""
    expected, step_logits = golden[f"{name}.tokens"], golden[f"{name}.step_logits"]
    count = expected.shape[1]
    chosen, seen = [], []
    for step in range(count):
        seen.append(logits[: len(expected)])
        chosen.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
        if step + 1 < count:
            logits, cache = _call(model, chosen[-1][:, None], cache)
    np.testing.assert_array_equal(np.stack(chosen, axis=1)[: len(expected)], expected)
    _close(np.stack(seen, axis=1), step_logits)


def _prefill(case: Case) -> Unrolled:
    return unrolled(case.model, jnp.asarray(case.golden["input_ids"]), case.segment_ids, case.empty())


@pytest.mark.parametrize("case", GENERATING, indirect=True)
def test_greedy_continuation(case):
    forward = _prefill(case)
    _check_greedy(case.model, forward.logits[:, -1], forward.cache, case.golden, "gen")


SHORT = [name for name in GENERATING if name not in ("f_leftpad", "x_fused_experts")]


@pytest.mark.parametrize("case", SHORT, indirect=True)
@pytest.mark.parametrize("name", ["gen_short1", "gen_short2"])
def test_prompts_shorter_than_the_convolution(case, name):
    """A token at a time, in as many equal rows as the other tests have, which saves a compilation."""
    cache, logits = case.empty(), jnp.zeros(())
    for token in case.golden[f"{name}.prompt"][0]:
        logits, cache = _call(case.model, jnp.full((len(case.real), 1), token, jnp.int32), cache)
    _check_greedy(case.model, logits, cache, case.golden, name)


@pytest.mark.parametrize("case", ["a_cycle4_8l", "z_odd_order"], indirect=True)
def test_a_prompt_of_two_tokens_in_one_call(case):
    prompt = jnp.asarray(np.repeat(case.golden["gen_short2.prompt"], len(case.real), axis=0))
    logits, cache = _call(case.model, prompt, case.empty())
    _check_greedy(case.model, logits, cache, case.golden, "gen_short2")


@pytest.mark.parametrize("case", ["f_leftpad"], indirect=True)
def test_padded_rows_equal_the_rows_alone(case):
    """States, logits and continuation of each row by itself, as transformers computed them without any padding."""
    forward = _prefill(case)
    assert forward.cache is not None
    width, rows = case.real.shape[1], []
    for row, seq in enumerate(case.real.sum(axis=1)):
        prefix = f"row.{row}."
        rows.append({key.removeprefix(prefix): v for key, v in case.golden.items() if key.startswith(prefix)})
        assert rows[-1]["input_ids"].shape == (1, seq)
        # Without positions a document counts from 0, as the row alone does, so that even the keys are the same.
        layers = [
            AttentionCache(entry.key[row : row + 1, :, width - seq :], entry.value[row : row + 1, :, width - seq :])
            if isinstance(entry, AttentionCache)
            else DeltaNetCache(entry.conv[row : row + 1], entry.state[row : row + 1])
            for entry in forward.cache.layers
        ]
        _check_states(layers, rows[-1], np.ones((1, seq), bool))
        _close(forward.logits[row, width - seq :], rows[-1]["logits"][0])
    alone = {key: np.concatenate([row[key] for row in rows]) for key in ("gen.tokens", "gen.step_logits")}
    _check_greedy(case.model, forward.logits[:, -1], forward.cache, alone, "gen")
