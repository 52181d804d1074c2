"""The check of packed documents: it holds as it is, and each carrier of the past is seen when it leaks."""

import dataclasses
from itertools import islice

import jax
import pytest
from common import as_users_run, tiny_model

from qwen3next import check, deltanet, packing_checks
from qwen3next.config import Compute
from qwen3next.context import Context
from qwen3next.errors import InputError
from qwen3next.hf import save_pretrained

SIZES = {"num_hidden_layers": 2, "layer_types": ("linear_attention", "full_attention"), "mlp_only_layers": (0, 1)}


def _failed(count: int | None = None) -> set[str]:
    """The names of those of the first `count` checks, or of all, that fail; three are of layers."""
    jax.clear_caches()  # of programs that were traced from other code
    with as_users_run():
        checks = list(islice(packing_checks.packing_checks(tiny_model(**SIZES), Compute(chunk_size=16)), count))
    assert [item.name for item in checks[:3]] == ["layer 0, convolution", "layer 0, state", "layer 1, attention"]
    return {item.name for item in checks if not item.passed}


def _leaky_state(monkeypatch):
    rule = deltanet.gated_delta_rule
    monkeypatch.setattr(
        deltanet, "gated_delta_rule", lambda *args, chunk_size: rule(*args[:6], None, chunk_size=chunk_size)
    )


def _leaky_far_from_the_start(monkeypatch):
    """At the third boundary of the second row alone, which is a chunk's."""
    rule = deltanet.gated_delta_rule

    def leaky(*args, chunk_size):
        resets = None if args[6] is None else args[6].at[1, 64].set(False)
        return rule(*args[:6], resets, chunk_size=chunk_size)

    monkeypatch.setattr(deltanet, "gated_delta_rule", leaky)


def _leaky_convolution(monkeypatch):
    convolution = deltanet.short_convolution

    def leaky(x, weight, window, packing):
        far = None if packing is None else dataclasses.replace(packing, age=packing.age + 9)
        return convolution(x, weight, window, far)

    for module in (deltanet, packing_checks):
        monkeypatch.setattr(module, "short_convolution", leaky)


def _leaky_attention(monkeypatch):
    mask = Context.attention_mask

    def leaky(self, queries):
        return mask(dataclasses.replace(self, packing=None), queries)

    monkeypatch.setattr(Context, "attention_mask", leaky)


LEAKS = {
    _leaky_state: "layer 0, state",
    _leaky_far_from_the_start: "layer 0, state",
    _leaky_convolution: "layer 0, convolution",
    _leaky_attention: "layer 1, attention",
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_carrier_that_leaks_is_seen_and_no_other_is_blamed(monkeypatch, leak):
    leak(monkeypatch)
    assert _failed(3) == {LEAKS[leak]}


def test_a_leak_is_seen_in_the_whole_model(monkeypatch):
    _leaky_state(monkeypatch)
    whole = {"logits of the whole model", "logits packed and alone differ by"}
    assert _failed() == {"layer 0, state", "gradient of document 3's loss before it"} | whole


def test_a_check_that_could_see_nothing_fails(monkeypatch):
    monkeypatch.setattr(packing_checks, "_perturbed", lambda x, where: x)
    assert _failed(3) == {"layer 0, state", "layer 0, convolution", "layer 1, attention"}


def test_the_command_takes_a_checkpoint(tmp_path, capsys):
    save_pretrained(tiny_model(**SIZES), tmp_path / "model")
    with as_users_run():
        assert check.main(["packing", str(tmp_path / "model")]) == 0
    said = capsys.readouterr().out
    for name in ("layer 1, attention", "layer 0, state", "logits packed and alone", "gradient of document 3"):
        assert name in said
    assert "FAIL" not in said
    with pytest.raises(InputError, match="holds no checkpoint"):
        check.main(["packing", str(tmp_path)])
