"""Remat as a value: what it accepts, what it keeps, and that each choice takes effect."""

import dataclasses
import re
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import pytest
from common import run_config, tiny_model, tokens

from qwen3next.cli import dump_config, load_config, parse
from qwen3next.config import Compute
from qwen3next.errors import InputError
from qwen3next.jaxprs import equations
from qwen3next.remat import NAMES, Remat

PACKAGE = Path(__file__).parent.parent / "qwen3next"

REFUSED = {
    "everywhere": r"placement 'everywhere' is unknown; allowed: none, block, layer, both, linear_attention",
    "blok": r"placement 'blok' is unknown, did you mean block\?",
    "block+moe": r"block stands alone",
    "layer/dot": r"policy 'dot' is unknown, did you mean dots\?; allowed: nothing, dots, everything, names:A,B",
    "layer/names:conv": r"name 'conv' is unknown, did you mean conv_out\?; allowed: mixer_norm",
    "layer/offload:router": r"name 'router' is unknown, did you mean router_logits\?",
    "layer/names:": r"name '' is unknown",
    "layer/names:conv_out+offload:conv_out": r"conv_out cannot be kept and offloaded",
    "none/dots": r"placement 'none' has no unit that policy 'dots'",
    "block/linear_attention=dots": r"needs units that are layers",
    "layer/linear=dots": r"kind of layer 'linear' is unknown, did you mean linear_attention\?",
    "layer/linear_attention=dots;linear_attention=nothing": r"names linear_attention twice",
    "layer/dots/x/no-barrier": r"must be PLACEMENT, PLACEMENT/POLICY or",
}


@pytest.mark.parametrize("text", REFUSED)
def test_unknown_words_are_refused_with_the_known_and_the_nearest(text):
    with pytest.raises(InputError, match=REFUSED[text]) as caught:
        Remat.of(text)
    assert "\n" not in str(caught.value) and "compute.remat" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "remat"),
    [
        ("block", Remat("block")),
        ("layer/no-barrier", Remat("layer", barrier=False)),
        ("layer/names:conv_out,q_proj", Remat("layer", "names:conv_out,q_proj")),
        ("both/dots/no-barrier", Remat("both", "dots", False)),
        ("linear_attention+moe", Remat("linear_attention+moe")),
        ("layer/linear_attention=dots;full_attention=names:q_proj", None),
    ],
)
def test_the_shorthand_in_toml_and_on_the_command_line(tmp_path, text, remat):
    remat = remat or Remat.of(text)
    assert Remat.of(text) == remat and str(remat) == text
    path = tmp_path / "config.toml"
    lines = dump_config(run_config(tmp_path)).split("[compute.remat]")[0] + f'remat = "{text}"\n'
    path.write_text(re.sub(r"(?m)^remat = .*$", "", lines).replace("[compute]", f'[compute]\nremat = "{text}"'))
    assert load_config(path).compute.remat == remat
    path.write_text(dump_config(run_config(tmp_path)))
    for flags in (["--compute.remat", text], [f"--compute.remat={text}"]):
        assert parse(["train.py", str(path), *flags]).compute.remat == remat
    again = dataclasses.replace(run_config(tmp_path), compute=Compute(remat=remat))
    path.write_text(dump_config(again))
    assert load_config(path) == again


# --- names ------------------------------------------------------------------------------------------------------------


def test_each_name_stands_once_in_the_source():
    source = "".join(path.read_text() for path in PACKAGE.glob("*.py"))
    written = re.findall(r"checkpoint_name\(.*?\"(\w+)\"\)", source)
    assert sorted(written) == sorted(NAMES)


EXPECTED = {
    "linear_attention": "qkvz_proj ba_proj conv_out delta_qk delta_gates chunk_inverse chunk_states chunk_deltas"
    " delta_out gated_norm",
    "full_attention": "q_proj k_proj v_proj attention_qk attention_out",
    "moe": "router_logits expert_rows expert_hidden expert_out mlp_hidden mlp_out",
    "dense": "mlp_hidden mlp_out",
}


@pytest.mark.parametrize("mixer", ["linear_attention", "full_attention"])
@pytest.mark.parametrize("mlp", ["moe", "dense"])
def test_each_layer_holds_its_names(mixer, mlp):
    model = tiny_model(num_hidden_layers=1, layer_types=(mixer,), num_experts=4 if mlp == "moe" else 0)
    compute = Compute(remat=Remat("none"), chunk_size=8, dispatch="blocks")

    def loss(model, ids):
        return jnp.sum(model.hidden(ids, compute=compute).states)

    jaxpr = eqx.filter_make_jaxpr(eqx.filter_grad(loss))(model, tokens(2, 13))[0].jaxpr
    found = {equation.params["name"] for equation, _ in equations(jaxpr) if equation.primitive.name == "name"}
    assert found == {"mixer_norm", "mixer_out", "mlp_norm", *EXPECTED[mixer].split(), *EXPECTED[mlp].split()}


def test_the_expected_names_are_all():
    words = " ".join(EXPECTED.values()).split()
    assert {*words, "mixer_norm", "mixer_out", "mlp_norm"} == set(NAMES)
