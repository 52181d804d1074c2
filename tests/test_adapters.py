"""PEFT folders both ways: what PEFT wrote and computed, PEFT itself where it is installed, and damage."""

import importlib.util
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from common import tiny_model
from folders import read_tensors
from safetensors.numpy import load_file, save_file
from test_lora import EVERYTHING, SMALL, adapted, logits_of, make_batch

import decode
from qwen3next import convert
from qwen3next.adapters import CONFIG, WEIGHTS, read_adapter, save_adapter
from qwen3next.checkpoint import load_checkpoint
from qwen3next.config import LoRAConfig
from qwen3next.errors import InputError
from qwen3next.factors import Factors, factors_of, with_adapters
from qwen3next.generate import generate
from qwen3next.hf import load_pretrained, save_pretrained
from qwen3next.lora import LoRALinear, adapters, merge, strip

DATA = Path(__file__).parent / "data"
BASE, MADE = DATA / "golden" / "b_remainder_6l", DATA / "golden_adapter"
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_file(MADE / "golden.safetensors")


@pytest.fixture(scope="module")
def base():
    return load_pretrained(BASE)


def settings(folder: Path) -> dict:
    return json.loads((folder / CONFIG).read_text())


def copy(folder: Path, tmp_path: Path, **changes) -> Path:
    """A folder of PEFT's with other settings."""
    target = tmp_path / "adapter"
    shutil.copytree(folder, target, dirs_exist_ok=True)
    (target / CONFIG).write_text(json.dumps(settings(target) | changes))
    return target


def assert_same(a: dict[str, Factors], b: dict[str, Factors]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name].A, b[name].A, err_msg=name)
        np.testing.assert_array_equal(a[name].B, b[name].B, err_msg=name)
        assert np.isclose(a[name].scale, b[name].scale, rtol=1e-12), name


# --- what PEFT computed -----------------------------------------------------------------------------------------------


def test_an_adapter_of_peft_gives_pefts_logits(base, golden):
    (model,) = with_adapters(base, [("here", read_adapter(MADE))])
    np.testing.assert_allclose(logits_of(model, golden["input_ids"]), golden["logits"], rtol=0, atol=2e-4)
    assert float(np.abs(logits_of(base, golden["input_ids"]) - golden["logits"]).max()) > 10
    np.testing.assert_allclose(logits_of(merge(model), golden["input_ids"]), golden["logits"], rtol=0, atol=3e-4)


def test_merged_folders_compute_what_peft_does(golden, tmp_path):
    for source in (["--adapter", str(MADE), str(BASE)], [str(copy(MADE, tmp_path, base_model_name_or_path=str(BASE)))]):
        target = tmp_path / f"merged{len(source)}"
        convert.main([*source, str(target), "--to", "hf"])
        model = load_pretrained(target)
        assert not adapters(model)
        np.testing.assert_allclose(logits_of(model, golden["input_ids"]), golden["logits"], rtol=0, atol=3e-4)
    for a, b in zip(*(read_tensors(tmp_path / name).values() for name in ("merged1", "merged3")), strict=True):
        assert a.tobytes() == b.tobytes()


def test_what_is_read_is_written_again(base, tmp_path):
    (model,) = with_adapters(base, [("here", read_adapter(MADE))])
    save_adapter(model, tmp_path, base="BASE")
    assert_same(factors_of(model), read_adapter(tmp_path))
    (again,) = with_adapters(base, [("there", read_adapter(tmp_path))])
    ids = make_batch()["input_ids"] % base.config.vocab_size
    np.testing.assert_allclose(logits_of(again, ids), logits_of(model, ids), rtol=0, atol=1e-5)


# --- what we write ----------------------------------------------------------------------------------------------------


def test_names_shapes_and_settings_are_pefts(tmp_path):
    config = LoRAConfig(("all-linear", "experts=2", "head=4", "embedding", "down_proj=5"), rank=3, alpha=6.0)
    save_adapter(adapted(config), tmp_path, base="BASE", dropout=0.5)
    c = adapted(config).config
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    hidden, width, experts, layer = (
        c.hidden_size,
        c.moe_intermediate_size,
        c.num_experts,
        "base_model.model.model.layers",
    )
    expected = {
        f"{layer}.0.linear_attn.in_proj_qkvz.lora_A.weight": (3, hidden),
        f"{layer}.5.linear_attn.in_proj_qkvz.lora_B.weight": (2 * c.key_dim + 2 * c.value_dim, 3),
        f"{layer}.3.self_attn.q_proj.lora_B.weight": (2 * c.num_attention_heads * c.head_dim, 3),
        f"{layer}.1.mlp.gate.lora_B.weight": (experts, 3),
        f"{layer}.1.mlp.shared_expert_gate.lora_B.weight": (1, 3),
        f"{layer}.1.mlp.shared_expert.down_proj.lora_A.weight": (5, c.shared_expert_intermediate_size),
        f"{layer}.4.mlp.gate_proj.lora_A.weight": (3, hidden),
        f"{layer}.4.mlp.down_proj.lora_B.weight": (hidden, 5),
        f"{layer}.1.mlp.experts.base_layer.lora_A.weight": (4 * experts, hidden),  # gate and up, 2 each
        f"{layer}.1.mlp.experts.base_layer.lora_B.weight": (2 * width, 4 * experts),
        f"{layer}.1.mlp.experts.lora_A.weight": (5 * experts, width),
        f"{layer}.1.mlp.experts.lora_B.weight": (hidden, 5 * experts),
        "base_model.model.lm_head.lora_A.weight": (4, hidden),
        "base_model.model.model.embed_tokens.lora_embedding_A": (3, 64),
        "base_model.model.model.embed_tokens.lora_embedding_B": (hidden, 3),
    }
    assert {name: shapes[name] for name in expected} == expected
    assert not [name for name in shapes if ".4.mlp.experts" in name]
    said = settings(tmp_path)
    assert said["peft_type"] == "LORA" and said["base_model_name_or_path"] == "BASE" and not said["lora_dropout"]
    assert (said["r"], said["lora_alpha"], said["use_rslora"]) == (3, 6, False)
    assert "mlp.experts.gate_up_proj" in said["target_parameters"] and "self_attn.q_proj" in said["target_modules"]
    assert {"mlp.gate.weight", "mlp.gate_proj.weight", "mlp.shared_expert.up_proj.weight"} < set(
        said["target_parameters"]
    )
    ranks = {"mlp.experts.gate_up_proj": 4, "mlp.experts.down_proj": 5, "lm_head": 4, "mlp.down_proj.weight": 5}
    assert said["rank_pattern"] == ranks | {"mlp.shared_expert.down_proj.weight": 5}
    assert said["alpha_pattern"] == {"mlp.experts.gate_up_proj": 12}


@pytest.mark.parametrize(
    "targets",
    [
        ("all-linear", "head", "embedding"),
        ("experts",),
        ("experts.gate_proj",),
        ("experts.up_proj=2", "experts.gate_proj=5"),
        ("experts.up_proj", "experts.down_proj"),
        ("experts.down_proj",),
        ("attention",),
        ("router", "shared_expert_gate", "dense=7"),
    ],
)
@pytest.mark.parametrize("rslora", [False, True])
def test_there_and_back_is_the_same(targets, rslora, tmp_path):
    model = adapted(LoRAConfig(targets, rank=3, alpha=7.0, rslora=rslora))
    save_adapter(model, tmp_path, rslora=rslora)
    assert settings(tmp_path)["use_rslora"] == rslora
    before, after = factors_of(model), read_adapter(tmp_path)
    assert before.keys() == after.keys()
    for name, found in before.items():
        np.testing.assert_allclose(after[name].update(), found.update(), rtol=0, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(after[name].A, found.A, err_msg=name)
    (again,) = with_adapters(strip(model), [("here", after)])
    if len(targets) < 3:
        return  # one comparison of what they compute is enough
    ids = make_batch()["input_ids"]
    np.testing.assert_allclose(logits_of(again, ids), logits_of(model, ids), rtol=0, atol=2e-4)


def test_a_tied_table_is_adapted_as_both_and_read_as_one(tmp_path):
    model = adapted(LoRAConfig(("embedding", "attention"), rank=3), tie_word_embeddings=True)
    save_adapter(model, tmp_path)
    assert {"embed_tokens", "lm_head"} < set(settings(tmp_path)["target_modules"])
    (again,) = with_adapters(strip(model), [("here", read_adapter(tmp_path))])
    ids = make_batch()["input_ids"]
    np.testing.assert_allclose(logits_of(again, ids), logits_of(model, ids), rtol=0, atol=1e-5)
    tensors = load_file(tmp_path / WEIGHTS)
    for damage in (
        {name: tensor for name, tensor in tensors.items() if "lm_head" not in name},
        tensors | {"base_model.model.lm_head.lora_A.weight": 2 * tensors["base_model.model.lm_head.lora_A.weight"]},
    ):
        save_file(damage, tmp_path / WEIGHTS)
        with pytest.raises(InputError, match="adapts embed_tokens or lm_head, which the base ties"):
            with_adapters(strip(model), [("here", read_adapter(tmp_path))])


def test_layers_that_differ_are_named_by_their_numbers(base, tmp_path):
    factors = read_adapter(MADE)
    name = "model.layers.{}.linear_attn.in_proj_ba.weight"
    for layer in (4, 5):  # the remainder: a stack of its own
        found = factors[name.format(layer)]
        factors[name.format(layer)] = Factors(found.A[:2], found.B[:, :2], 5.0)
    for layer in range(6):
        del factors[f"model.layers.{layer}.mlp.gate.weight"]
    for layer in (4, 5):
        factors[f"model.layers.{layer}.mlp.gate.weight"] = read_adapter(MADE)[f"model.layers.{layer}.mlp.gate.weight"]
    (model,) = with_adapters(base, [("here", factors)])
    save_adapter(model, tmp_path)
    assert_same(factors, read_adapter(tmp_path))
    said = settings(tmp_path)
    assert {f"model.layers.{layer}.linear_attn.in_proj_ba" for layer in (0, 1, 2, 4, 5)} < set(said["target_modules"])
    assert {"model.layers.4.mlp.gate.weight", "mlp.experts.gate_up_proj"} < set(said["target_parameters"])
    assert "mlp.gate.weight" not in said["target_parameters"] and "self_attn.q_proj" in said["target_modules"]


def test_parameters_may_differ_between_layers(base, tmp_path):
    """PEFT matches targets by what a name ends in, layers' numbers included."""
    made = {name: found for name, found in read_adapter(MADE).items() if ".experts." in name}
    kept = {
        name: found
        for name, found in made.items()
        if (".layers.0." in name and "down_proj" not in name) or (".layers.1." in name and "down_proj" in name)
    }
    (model,) = with_adapters(base, [("here", kept)])
    save_adapter(model, tmp_path)
    tensors = {
        name: tensor for name, tensor in load_file(tmp_path / WEIGHTS).items()
        if "layers.0.mlp.experts.base_layer" in name or "layers.1.mlp.experts.lora" in name
    }  # fmt: skip
    inner = "layers.0.mlp.experts.base_layer"  # as if it were the only one of its module
    save_file({name.replace(inner, inner[:-11]): tensor for name, tensor in tensors.items()}, tmp_path / WEIGHTS)
    targets = ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
    (tmp_path / CONFIG).write_text(json.dumps(settings(tmp_path) | {"target_parameters": targets}))
    assert_same(read_adapter(tmp_path), kept)


def test_a_sum_that_is_too_large_is_refused(base, tmp_path, capsys):
    half = tmp_path / "half"
    convert.main([str(BASE), str(half), "--to", "hf", "--dtype", "float16"])
    (model,) = with_adapters(base, [("here", read_adapter(MADE))])
    large = {name: found._replace(B=found.B * 1e5) for name, found in factors_of(model).items()}
    save_adapter(with_adapters(base, [("here", large)])[0], tmp_path / "large")
    with pytest.raises(SystemExit) as stop:
        convert.main([str(half), str(tmp_path / "out"), "--adapter", str(tmp_path / "large")])
    assert stop.value.code == 2 and "is too large for float16 with its update" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_head_that_turns_out_untied_is_merged_too(tmp_path):
    tied = adapted(LoRAConfig(("embedding", "attention"), rank=3), tie_word_embeddings=True)
    save_adapter(tied, tmp_path / "adapter")
    save_pretrained(strip(tied), tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    convert.main([str(tmp_path / "base"), str(tmp_path / "out"), "--adapter", str(tmp_path / "adapter")])
    base = load_pretrained(tmp_path / "base")
    (model,) = with_adapters(base, [("here", read_adapter(tmp_path / "adapter"))])
    ids = make_batch()["input_ids"]
    merged = logits_of(load_pretrained(tmp_path / "out"), ids)
    np.testing.assert_allclose(merged, logits_of(model, ids), atol=2e-4, rtol=0)


# --- several ----------------------------------------------------------------------------------------------------------


def test_several_adapters_are_one_program():
    base = tiny_model(**SMALL)
    one = adapted(LoRAConfig(("attention", "experts"), rank=2, alpha=3.0), shape=SMALL)
    two = adapted(LoRAConfig(("router", "experts.up_proj=5"), rank=3), seed=7, shape=SMALL)
    models = with_adapters(base, [("here", factors_of(model)) for model in (one, two)])
    ids, compiled = make_batch()["input_ids"], []
    for model, alone in zip(models, (one, two), strict=True):
        np.testing.assert_allclose(logits_of(model, ids), logits_of(alone, ids), rtol=0, atol=2e-4)
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        made = [np.stack(list(generate(model, [[5, 6, 7]], 4))) for model in models[:1]]
        first = [name for name in compiled if "backend_compile" in name]
        compiled.clear()
        made += [np.stack(list(generate(model, [[5, 6, 7]], 4))) for model in models[1:]]
        second = [name for name in compiled if "backend_compile" in name]
    finally:
        jax.monitoring.clear_event_listeners()
    assert first and not second and not np.array_equal(*made)


def test_decode_takes_adapters_one_after_another(tmp_path, capsys):
    save_pretrained(tiny_model(**SMALL), tmp_path / "base")
    for seed, targets in ((0, ("attention",)), (3, ("experts=2",))):
        save_adapter(adapted(LoRAConfig(targets), seed=seed, scale=1.0, shape=SMALL), tmp_path / f"adapter{seed}")
    flags = [flag for seed in (0, 3) for flag in ("--adapter", str(tmp_path / f"adapter{seed}"))]
    asked = ["--prompt-ids", "5,6,7", "--max-new-tokens", "5", "--json"]
    decode.main([str(tmp_path / "base"), *flags, *asked])
    rows = json.loads(capsys.readouterr().out)
    assert [row["adapter"] for row in rows] == [str(tmp_path / f"adapter{seed}") for seed in (0, 3)]
    for seed, row in zip((0, 3), rows, strict=True):
        decode.main([str(tmp_path / "base"), "--adapter", str(tmp_path / f"adapter{seed}"), *asked])
        assert json.loads(capsys.readouterr().out)[0]["tokens"] == row["tokens"]
    decode.main([str(tmp_path / "base"), *asked])
    plain = json.loads(capsys.readouterr().out)[0]["tokens"]
    assert len({tuple(row["tokens"]) for row in rows} | {tuple(plain)}) == 3


def test_an_adapter_of_some_layers_is_nothing_in_the_others(base):
    factors = {name: found for name, found in read_adapter(MADE).items() if ".layers.4." in name}
    (model,) = with_adapters(base, [("here", factors)])
    for adapter in adapters(model).values():
        assert isinstance(adapter, LoRALinear)
        used = np.asarray(adapter.lora_B).reshape(adapter.lora_B.shape[0], -1).any(axis=1)
        assert used.tolist() == [True, False]  # the remainder is layers 4 and 5


# --- damage -----------------------------------------------------------------------------------------------------------


def test_settings_that_mean_something_else_are_refused(tmp_path, base):
    for changes, message in (
        ({"peft_type": "LOHA"}, r"peft_type is 'LOHA'; allowed: 'LORA'"),
        ({"use_dora": True}, "use_dora is True; allowed: False"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": []}, r"target_parameters do not say which parameters of .*experts are adapted"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters do not say"),
        ({"rank_pattern": {"mlp.experts.gate_up_proj": 7}}, "which ranks of 7 do not divide"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'; allowed: True"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"r": 0}, "a rank is 0; it must be a whole number above 0"),
        ({"r": None}, "a rank is None"),
        ({"rank_pattern": {"o_proj": 0}}, "a rank is 0"),
        ({"rank_pattern": [1]}, r"rank_pattern is \[1\]; it must be an object"),
        ({"rank_pattern": {"(": 1}}, r"rank_pattern has '\(', which is no pattern"),
        ({"lora_alpha": None}, "an alpha is None; it must be a finite number"),
        ({"alpha_pattern": {"o_proj": "x"}}, "an alpha is 'x'"),
        ({"lora_alpha": float("nan")}, "an alpha is nan"),
        ({"target_parameters": [1]}, r"target_parameters is \[1\]; it must be a list of names"),
        ({"target_parameters": 5}, "target_parameters is 5"),
    ):
        with pytest.raises(InputError, match=message):
            read_adapter(copy(MADE, tmp_path, **changes))
    (tmp_path / "adapter" / CONFIG).write_text("{")
    with pytest.raises(InputError, match="not a readable JSON file"):
        read_adapter(tmp_path / "adapter")
    with pytest.raises(InputError, match=r"holds no adapter; needed: adapter_config\.json"):
        read_adapter(BASE)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, base):
    tensors = load_file(MADE / WEIGHTS)
    key = "base_model.model.model.layers.3.self_attn.k_proj.lora_A.weight"
    nowhere = {
        f"base_model.model.model.layers.3.self_attn.j_proj.lora_{x}.weight": np.ones((1, 1), np.float32) for x in "AB"
    }
    for damage, message in (
        ({key: None}, r"layers\.3\.self_attn\.k_proj has one of A and B alone"),
        ({key: tensors[key][:-1]}, r"k_proj: A is \(3, .*the rank must be the same"),
        ({key: tensors[key].astype(np.int32)}, r"k_proj.*dtype I32"),
        ({key: np.full_like(tensors[key], np.nan)}, "holds NaN or infinity"),
        ({key: tensors[key][:, :-1].copy()}, r"adapts model.*k_proj\.weight as \(.*; the base's is"),
        (nowhere, r"adapts model\.layers\.3\.self_attn\.j_proj\.weight, which the base has not; allowed: .*v_proj"),
        ({key.replace("lora_A", "lora_magnitude_vector"): tensors[key]}, "is no part of a LoRA adapter"),
        ({"base_model.model.model.norm.base_layer.weight": tensors[key]}, "is no part of a LoRA adapter"),
    ):  # fmt: skip
        folder = copy(MADE, tmp_path)
        save_file({name: tensor for name, tensor in (tensors | damage).items() if tensor is not None}, folder / WEIGHTS)
        with pytest.raises(InputError, match=message):
            with_adapters(base, [(str(folder), read_adapter(folder))])
    save_file(tensors | {"base_model.model.lm_head.base_layer.weight": np.zeros((4, 4), np.float32)}, folder / WEIGHTS)
    with pytest.raises(InputError, match=r"lm_head.*is a table of the base's; save without save_embedding_layers"):
        read_adapter(folder)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])
    with pytest.raises(InputError, match="not a readable safetensors file"):
        read_adapter(folder)


def test_commands_refuse_in_one_line_and_write_nothing(tmp_path, capsys):
    folder = copy(MADE, tmp_path, base_model_name_or_path="somewhere/else")
    for argv, message in (
        ([str(folder), str(tmp_path / "out")], "is an adapter of 'somewhere/else', which is no folder here"),
        ([str(folder), str(tmp_path / "out"), "--adapter", str(MADE)], "is an adapter itself"),
        ([str(BASE), str(tmp_path / "out"), "--adapter", str(BASE)], "holds no adapter"),
        ([str(BASE), str(folder), "--adapter", str(folder), "--overwrite"], "is or holds"),
        ([str(DATA / "golden" / "a_cycle4_8l"), str(tmp_path / "out"), "--adapter", str(MADE)], "the base's is"),
    ):
        with pytest.raises(SystemExit) as stop:
            convert.main(argv)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and message in error and error.count("\n") == 1, error
        assert not (tmp_path / "out").exists() and read_adapter(folder)
    with pytest.raises(InputError, match="which is no folder here; allowed: BASE --adapter"):
        load_checkpoint(folder)


# --- PEFT itself ------------------------------------------------------------------------------------------------------


def _with_peft(base: Path, adapter: Path, ids: np.ndarray) -> np.ndarray:
    import torch
    from peft import PeftModel
    from transformers import Qwen3NextForCausalLM

    model = Qwen3NextForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    model = PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor(np.asarray(ids)).long(), use_cache=False).logits.numpy()


@needs_peft
@pytest.mark.filterwarnings("ignore")  # of theirs
@pytest.mark.parametrize("targets", [EVERYTHING.targets, ("experts.up_proj=2",), ("experts", "deltanet=4")])
@pytest.mark.parametrize("tied", [False, True])
def test_peft_loads_what_we_write_and_computes_the_same(targets, tied, tmp_path):
    targets = tuple(target for target in targets if not (tied and target == "head"))
    model = adapted(LoRAConfig(targets, rank=3, alpha=5.0), tie_word_embeddings=tied)
    save_pretrained(strip(model), tmp_path / "base")
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    ids = make_batch()["input_ids"]
    theirs = _with_peft(tmp_path / "base", tmp_path / "adapter", ids)
    ours = logits_of(model, ids)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)
    assert float(np.abs(ours - logits_of(strip(model), ids)).max()) > 0.05
