"""The checks of rematerialisation: they hold as it is, and each fails when what it checks is broken."""

import dataclasses
from contextlib import nullcontext

import equinox as eqx
import jax
import pytest
from common import as_users_run, run_config, tiny_config

from qwen3next import check, remat_checks
from qwen3next.cli import dump_config
from qwen3next.config import Compute
from qwen3next.errors import InputError
from qwen3next.remat import Remat

LINEAR, FULL = "linear_attention", "full_attention"
CONFIG = tiny_config(num_hidden_layers=2, layer_types=(LINEAR, FULL), mlp_only_layers=(1,))


def traced(text: str, config=CONFIG) -> dict[str, bool]:
    compute = Compute(remat=Remat.of(text), chunk_size=8, dispatch="blocks")
    with as_users_run():
        checks = [*remat_checks._traced(config, compute), *remat_checks._kept(config, compute)]
    return {item.name: item.passed for item in checks}


@pytest.mark.parametrize(
    "text",
    [
        "both/offload:chunk_states",
        "full_attention+moe",
    ],
)
def test_what_is_traced_is_what_the_choice_says(text):
    results = traced(text)
    assert len(results) >= 5 and all(results.values()), [name for name, passed in results.items() if not passed]


def broken(text: str) -> set[str]:
    return {name for name, passed in traced(text).items() if not passed}


def test_a_layer_that_is_not_wrapped_is_seen(monkeypatch):
    monkeypatch.setattr(Remat, "wrap_layer", lambda self, unit, mixer, *, straight: unit)
    assert broken("layer") >= {"units of rematerialisation, without caches", "products computed again"}


def test_a_layer_that_is_wrapped_twice_is_seen(monkeypatch):
    once = Remat.wrap_layer

    def twice(self, unit, mixer, *, straight):
        return eqx.filter_checkpoint(once(self, unit, mixer, straight=straight))

    monkeypatch.setattr(Remat, "wrap_layer", twice)
    assert broken("layer") >= {"units inside each other, with caches", "units of rematerialisation, with caches"}


def test_a_policy_that_keeps_something_else_is_seen(monkeypatch):
    other = jax.checkpoint_policies.save_only_these_names("qkvz_proj")
    monkeypatch.setattr(Remat, "jax_policy", lambda self, mixer: other)
    assert broken("layer/names:conv_out") >= {"kept by linear_attention/moe", "names that are kept nowhere"}


def test_a_barrier_that_is_gone_is_seen(monkeypatch):
    small = remat_checks.shrunk(
        dataclasses.replace(CONFIG, num_hidden_layers=2, mlp_only_layers=(), layer_types=(LINEAR, FULL))
    )
    compute = Compute(chunk_size=8, dispatch="dense")
    with as_users_run():
        (held,) = remat_checks._compiled(small, compute)
        monkeypatch.setattr("qwen3next.stack._barrier", lambda wanted: nullcontext())
        (gone,) = remat_checks._compiled(small, compute)
    assert held.passed and not gone.passed


def test_gradients_that_differ_are_seen(monkeypatch):
    one = dict(num_hidden_layers=1, layer_types=(FULL,), mlp_only_layers=(0,))
    small = remat_checks.shrunk(dataclasses.replace(CONFIG, **one))
    compute = Compute(chunk_size=8, remat=Remat("layer"))
    wrap = Remat.wrap_layer

    def wrong(self, unit, mixer, *, straight):
        wrapped = wrap(self, unit, mixer, straight=straight)
        if not self.is_unit(mixer):
            return wrapped
        return lambda h, xs: jax.tree.map(lambda x: x + 0.01, wrapped(h, xs))

    with as_users_run():
        assert all(item.passed for item in remat_checks._agreeing(small, compute))
        monkeypatch.setattr(Remat, "wrap_layer", wrong)
        results = {item.name: item.passed for item in remat_checks._agreeing(small, compute)}
    assert not results["loss and gradient of layer against none"]
    assert results["loss and gradient of block against none"]


def test_shrinking_keeps_the_order_of_layers():
    config = tiny_config(num_hidden_layers=50, mlp_only_layers=(0,), decoder_sparse_step=1)
    kinds = remat_checks.shrunk(config).layer_kinds
    assert kinds[:1] == config.layer_kinds[:1] and kinds[-2:] == config.layer_kinds[-2:] and len(kinds) < 15


def test_the_command_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "config.toml"
    path.write_text(dump_config(run_config(tmp_path)))
    results = [remat_checks.Check("a", "1", "1", True)]
    monkeypatch.setattr(check, "remat_checks", lambda model, compute: iter(results))
    assert check.main(["remat", str(path), "--compute.remat", "both"]) == 0
    assert "remat both" in capsys.readouterr().out
    results.append(remat_checks.Check("b", "1", "2", False))
    assert check.main(["remat", str(path)]) == 1 and "FAIL" in capsys.readouterr().out
    for arguments, message in (([], "what to check is missing"), (["ramet"], "'ramet' is unknown; allowed: remat")):
        with pytest.raises(InputError, match=message):
            check.main(arguments)
