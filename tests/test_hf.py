"""Hugging Face folders: both spellings of the config, every layout of the tensors, and every kind of damage."""

import collections
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from common import as_users_run
from folders import (
    DATA,
    EMBED,
    FUSED,
    HEAD,
    KEY,
    PLAIN,
    TIED,
    UP,
    check_model,
    damaged,
    fuse,
    one_line,
    read_tensors,
    write_folder,
)

from qwen3next.config import ModelConfig, RopeParameters
from qwen3next.errors import InputError
from qwen3next.hf import load_pretrained, table
from qwen3next.hf_config import model_config, read_config, read_end_of_text
from qwen3next.model import abstract_model
from qwen3next.rotary import frequencies
from qwen3next.tree import leaf_path

# Qwen/Qwen3-Next-80B-A3B-Instruct, as published: the spelling of transformers 4.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def _in_version_5(values: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 5 writes it."""
    gone = ("full_attention_interval", "rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype")
    kept = {key: value for key, value in values.items() if key not in gone}
    kinds = [("linear" if (i + 1) % 4 else "full") + "_attention" for i in range(values["num_hidden_layers"])]
    rope = {"partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "rope_type": "default"}
    return kept | {"rope_parameters": rope, "dtype": "bfloat16", "layer_types": kinds}


# --- Config


def test_both_spellings_of_the_published_config():
    old, new = model_config(PUBLISHED), model_config(_in_version_5(PUBLISHED))
    assert old == new
    assert (old.dtype, old.intermediate_size, old.num_hidden_layers) == ("bfloat16", 5120, 48)
    expected = 1e7 ** -(np.arange(0, 64, 2) / 64)
    for config in (old, new):
        found, scaling = frequencies(config, jnp.array([1], jnp.int32))
        np.testing.assert_allclose(found[0], expected, rtol=1e-6)
        assert scaling == 1


def test_both_spellings_of_scaled_frequencies():
    folder = DATA / "golden_extra" / "z_odd_order"
    old, new = (json.loads((folder / name).read_text()) for name in ("config_v4.json", "config.json"))
    assert "rope_scaling" in old and "rope_parameters" in new
    assert model_config(old) == model_config(new)
    assert model_config(new).rope_parameters.rope_type == "llama3"


LINEAR_ROPE = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, RopeParameters("default", 1e4, 0.25)),
        ({"rope_theta": 5e5}, RopeParameters("default", 5e5, 0.25)),
        ({"partial_rotary_factor": 0.5}, RopeParameters("default", 1e4, 0.5)),
        ({"rope_parameters": None, "rope_scaling": None, "rope_theta": 5e5}, RopeParameters("default", 5e5)),
        ({"rope_parameters": {}, "rope_scaling": {}, "rope_theta": 5e5}, RopeParameters("default", 5e5)),
        ({"rope_parameters": LINEAR_ROPE}, RopeParameters("linear", 1e4, factor=2.0)),
        # Inside beats the top level; the top level fills what is missing inside, null included.
        ({"rope_parameters": {"rope_theta": 3e3}, "rope_theta": 5e5}, RopeParameters("default", 3e3)),
        (
            {"rope_scaling": LINEAR_ROPE | {"rope_theta": 3e3}, "rope_theta": 5e5},
            RopeParameters("linear", 3e3, factor=2.0),
        ),
        ({"rope_scaling": LINEAR_ROPE, "rope_theta": 5e5}, RopeParameters("linear", 5e5, factor=2.0)),
        ({"rope_parameters": {"rope_theta": None}, "rope_theta": 5e5}, RopeParameters("default", 5e5)),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 1.0},
            RopeParameters("default", 1e4, 0.5),
        ),
        # A non-empty rope_scaling replaces rope_parameters, and nothing of it is merged in.
        (
            {"rope_scaling": LINEAR_ROPE, "rope_parameters": {"rope_theta": 3e3, "rope_type": "dynamic"}},
            RopeParameters("linear", 1e4, factor=2.0),
        ),
        ({"rope_scaling": {}, "rope_parameters": LINEAR_ROPE}, RopeParameters("linear", 1e4, factor=2.0)),
        # The older name of the type, beaten by the newer.
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeParameters("linear", factor=2.0)),
        ({"rope_scaling": LINEAR_ROPE | {"type": "dynamic"}}, RopeParameters("linear", factor=2.0)),
        ({"rope_parameters": {"unheard_of": 1}}, RopeParameters()),
        # What Phi has at the top level counts more than what is inside, where the type has a use for it.
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 64},
            RopeParameters("yarn", factor=2.0, original_max_position_embeddings=64),
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
                "original_max_position_embeddings": 64,
            },
            RopeParameters("yarn", factor=2.0, original_max_position_embeddings=64),
        ),
        ({"rope_scaling": LINEAR_ROPE, "original_max_position_embeddings": 64}, RopeParameters("linear", factor=2.0)),
    ],
)
def test_which_rope_setting_counts(values, expected):
    assert model_config(values).rope_parameters == expected


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        ({}, {}),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"dtype": "float16"}, {"dtype": "float16"}),
        ({"mlp_only_layers": None, "layer_types": None, "attention_bias": None}, {}),
        ({"mlp_only_layers": [3]}, {"mlp_only_layers": (3,)}),
        ({"use_sliding_window": False, "pad_token_id": 0, "unheard_of": [1]}, {}),
    ],
)
def test_defaults_nulls_and_unknown_keys(values, changes):
    types = ModelConfig(**changes).layer_kinds
    assert model_config(values) == ModelConfig(**changes, layer_types=tuple(kind.mixer for kind in types))


def test_layer_types_beat_the_interval():
    types = ["full_attention", "linear_attention", "linear_attention"]
    values = {"num_hidden_layers": 3, "layer_types": types, "full_attention_interval": 2}
    assert [kind.mixer for kind in model_config(values).layer_kinds] == types
    del values["layer_types"]
    assert [kind.mixer for kind in model_config(values).layer_kinds] == [types[1], types[0], types[1]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "qwen3_moe"}, ("model_type", "'qwen3_moe'", "'qwen3_next'")),
        ({"attention_dropout": 0.1}, ("attention_dropout", 0.1)),
        ({"torch_dtype": "float64"}, ("dtype", "'float64'")),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, ("rope_type", "'ntk'")),
        ({"layer_types": ["linear_attention"]}, ("layer_types", 1, 48)),
        ({"hidden_size": "2048"}, ("hidden_size",)),
        ({"num_hidden_layers": None, "hidden_size": [1]}, ("hidden_size",)),
    ],
)
def test_configs_that_are_refused(tmp_path, values, words):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with as_users_run(), pytest.raises(InputError) as error:
        read_config(tmp_path)
    one_line(error, tmp_path / "config.json", *words)


@pytest.mark.parametrize("content", [None, "", "{", "[1]", '"text"', "\udcff"])
def test_config_files_that_are_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError) as error:
        read_config(tmp_path)
    one_line(error, tmp_path / "config.json")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(3, 4, (3,)), ([5, 6], 4, (5, 6)), (None, 4, (4,)), (None, None, ()), ("absent", 4, (4,))],
)
def test_end_of_text(tmp_path, generation, config, expected):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    if generation != "absent":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert read_end_of_text(tmp_path) == expected


# --- The published model


@pytest.fixture(scope="module")
def published():
    return abstract_model(model_config(PUBLISHED))


def test_parameter_count_of_the_published_model(published):
    hidden, vocab, layers = 2048, 151936, 48
    key, value, value_heads, heads, kv_heads, head = 16 * 128, 32 * 128, 32, 16, 2, 256
    linear = hidden * (2 * key + 2 * value) + hidden * 2 * value_heads + 4 * (2 * key + value) + value * hidden
    linear += 2 * value_heads + 128
    full = hidden * head * (2 * heads + 2 * kv_heads + heads) + 2 * head
    moe = 512 * hidden + 512 * 3 * 512 * hidden + 3 * 512 * hidden + hidden
    expected = 36 * linear + 12 * full + layers * (moe + 2 * hidden) + 2 * vocab * hidden + hidden
    assert expected == 79_674_391_296
    assert sum(leaf.size for leaf in jax.tree.leaves(published)) == expected
    wide = [leaf.size for leaf in jax.tree.leaves(published) if leaf.dtype != jnp.bfloat16]
    assert sum(wide) == 36 * 2 * value_heads  # decay parameters, and nothing else


def _published_names(kinds: list[str], experts: int) -> list[str]:
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for index, kind in enumerate(kinds):
        layer = f"model.layers.{index}"
        names += [f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"]
        if kind == "linear":
            mixer = f"{layer}.linear_attn"
            names += [f"{mixer}.A_log", f"{mixer}.dt_bias"]
            weights = ("in_proj_qkvz", "in_proj_ba", "conv1d", "norm", "out_proj")
        else:
            mixer = f"{layer}.self_attn"
            weights = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        names += [f"{mixer}.{weight}.weight" for weight in weights]
        names += [f"{layer}.mlp.gate.weight", f"{layer}.mlp.shared_expert_gate.weight"]
        owners = ("shared_expert", *(f"experts.{expert}" for expert in range(experts)))
        projections = ("gate_proj", "up_proj", "down_proj")
        names += [f"{layer}.mlp.{owner}.{name}.weight" for owner, name in itertools.product(owners, projections)]
    return names


@pytest.mark.parametrize(("layers", "experts"), [(48, 512), (50, 8), (3, 8)])
def test_tensor_names(layers, experts):
    """The table's two sides are the model's tree and the published layout: nothing missing, nothing more."""
    values = PUBLISHED | {"num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": 2}
    kinds = (["linear"] * 3 + ["full"]) * 13
    model = abstract_model(model_config(values))
    leaves = list(table(model))
    ours = [(leaf_path(path), leaf.shape) for path, leaf in jax.tree.leaves_with_path(model)]
    assert [(leaf.path, leaf.shape) for leaf in leaves] == ours
    assert all(leaf.shape[: leaf.tensors.ndim] == leaf.tensors.shape for leaf in leaves)
    names = [str(name) for leaf in leaves for name in leaf.tensors.flat]
    assert collections.Counter(names) == collections.Counter(_published_names(kinds[:layers], experts))


# --- Tensors


FOLDERS = ("a_cycle4_8l", "c_sharded", "d_tied", "g_dense_mix", "x_fused_experts")
EXTRA = ("y_bias_yarn", "z_odd_order")  # hidden size 2 x, and 1 x, the experts' width: shapes that hide a transpose


@pytest.mark.parametrize("path", [f"golden/{name}" for name in FOLDERS] + [f"golden_extra/{name}" for name in EXTRA])
def test_every_tensor_is_in_its_place(path):
    check_model(load_pretrained(DATA / path), read_tensors(DATA / path))


@pytest.mark.parametrize("shards", [0, 3])
@pytest.mark.parametrize("path", ["golden/b_remainder_6l", "golden_extra/y_bias_yarn", "golden_extra/z_odd_order"])
def test_fused_and_sharded(tmp_path, path, shards):
    tensors, config = read_tensors(DATA / path), json.loads((DATA / path / "config.json").read_text())
    check_model(load_pretrained(write_folder(tmp_path, fuse(tensors), config, shards)), tensors)


@pytest.mark.parametrize("shards", [0, 3])
def test_the_extra_prediction_head_is_not_read(tmp_path, shards):
    tensors, config = read_tensors(PLAIN), json.loads((PLAIN / "config.json").read_text())
    more = {
        name: np.ones((2, 3), np.float32) for name in ("mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight")
    }
    check_model(load_pretrained(write_folder(tmp_path, more | tensors, config, shards)), tensors)


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16", None])
def test_dtypes(tmp_path, stored, wanted):
    """What is stored stays unless a dtype is asked for, whatever the config says; decay is not cast down."""
    tensors = {name: tensor.astype(stored) for name, tensor in read_tensors(PLAIN).items()}
    config = json.loads((PLAIN / "config.json").read_text()) | {"dtype": "bfloat16"}
    model = load_pretrained(write_folder(tmp_path, tensors, config), wanted)
    for name, tensor in tensors.items():
        decays = name.endswith(("A_log", "dt_bias"))
        tensors[name] = tensor.astype(stored if wanted is None else np.float32 if decays else np.dtype(wanted))
    check_model(model, tensors)
    assert model.config.dtype == (wanted or "bfloat16")


def test_dtypes_that_differ_in_a_stack_become_float32(tmp_path):
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in read_tensors(TIED).items()}
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors[name] = tensors[name].astype(np.float32) * np.float32(1.001)
    model = load_pretrained(write_folder(tmp_path, tensors, json.loads((TIED / "config.json").read_text())))
    wide = {leaf_path(path) for path, leaf in jax.tree.leaves_with_path(model) if leaf.dtype == jnp.float32}
    assert len(wide) == 1 and next(iter(wide)).endswith("mlp.experts.up_proj.weight")
    for leaf, array in zip(table(model), jax.tree.leaves(model), strict=True):
        if leaf.path in wide:
            tensors |= {name: tensors[name].astype(np.float32) for _, name in leaf.parts()}
        assert array.dtype == tensors[str(leaf.tensors.flat[0])].dtype
    check_model(model, tensors)


def _tied(tmp_path: Path, **changes: np.ndarray | None) -> Any:
    tensors = read_tensors(TIED) | {{"embed": EMBED, "head": HEAD}[name]: value for name, value in changes.items()}
    config = json.loads((TIED / "config.json").read_text())
    return write_folder(tmp_path, {name: value for name, value in tensors.items() if value is not None}, config)


def test_tied_with_a_head_alone(tmp_path):
    head = read_tensors(TIED)[EMBED] + 1
    model = load_pretrained(_tied(tmp_path, embed=None, head=head))
    assert model.lm_head is None and model.config.tie_word_embeddings
    np.testing.assert_array_equal(model.embed_tokens.weight, head)


def test_tied_with_two_equal_tensors(tmp_path):
    model = load_pretrained(_tied(tmp_path, head=read_tensors(TIED)[EMBED]))
    assert model.lm_head is None and model.config.tie_word_embeddings
    check_model(model, read_tensors(TIED))


def test_tied_with_two_different_tensors(tmp_path):
    head = read_tensors(TIED)[EMBED].copy()
    head[-1, -1] += 1
    model = load_pretrained(_tied(tmp_path, head=head))
    assert model.lm_head is not None and not model.config.tie_word_embeddings
    check_model(model, read_tensors(TIED) | {HEAD: head})


def test_tied_with_neither(tmp_path):
    with pytest.raises(InputError) as error:
        load_pretrained(_tied(tmp_path, embed=None))
    one_line(error, EMBED, "missing")


# --- Damage


@pytest.mark.parametrize("shards", [0, 2])
@pytest.mark.parametrize("name", [KEY, UP, EMBED, HEAD, "model.layers.0.linear_attn.A_log", "model.norm.weight"])
def test_a_missing_tensor_is_named(tmp_path, name, shards):
    folder = damaged(tmp_path, lambda tensors: tensors.pop(name), shards=shards)
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, name, "missing")


@pytest.mark.parametrize("name", ["model.layers.2.input_layernorm.weight", "model.layers.1.self_attn.k_proj.bias", "x"])
def test_an_unknown_tensor_is_named(tmp_path, name):
    folder = damaged(tmp_path, lambda tensors: tensors.update({name: np.zeros(16, np.float32)}))
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, folder, name)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (KEY, np.transpose),
        (UP, lambda tensor: tensor[:-1]),
        (EMBED, lambda tensor: tensor[:-1]),
        ("model.norm.weight", lambda tensor: tensor[None]),
        ("model.layers.0.linear_attn.conv1d.weight", lambda tensor: tensor[:, 0]),
        ("model.layers.0.linear_attn.dt_bias", lambda tensor: tensor[:1]),
    ],
)
def test_a_tensor_of_a_wrong_shape_is_named(tmp_path, name, change):
    before = read_tensors(PLAIN)[name].shape
    after = change(read_tensors(PLAIN)[name]).shape
    folder = damaged(tmp_path, lambda all: all.update({name: np.ascontiguousarray(change(all[name]))}))
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, folder / "model.safetensors", name, before, after)


@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t[:, :-1], lambda t: np.swapaxes(t, 1, 2)])
def test_a_fused_tensor_of_a_wrong_shape_is_named(tmp_path, change):
    damage = lambda all: all.update({FUSED: np.ascontiguousarray(change(all[FUSED]))})  # noqa: E731
    with pytest.raises(InputError) as error:
        load_pretrained(damaged(tmp_path, damage, fused=True))
    one_line(error, FUSED)


def test_a_missing_shard_is_named(tmp_path):
    folder = damaged(tmp_path, lambda tensors: None, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, folder / "model-00002-of-00003.safetensors")


def test_an_index_that_promises_too_much_is_named(tmp_path):
    folder = damaged(tmp_path, lambda tensors: None, shards=3)
    index = folder / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    held["weight_map"]["model.layers.9.x"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(held))
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, index, "model.layers.9.x", "model-00001-of-00003.safetensors")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "model.safetensors.index.json"),
        ("[]", "model.safetensors.index.json"),
        ("{}", "model.safetensors.index.json"),
        ('{"weight_map": []}', "model.safetensors.index.json"),
        ('{"weight_map": {"x": 3}}', "model.safetensors.index.json"),
        ('{"weight_map": {"x": "config.json"}}', "config.json"),
        ('{"weight_map": {}}', EMBED),
    ],
)
def test_an_index_that_is_none_is_named(tmp_path, content, named):
    folder = damaged(tmp_path, lambda tensors: None, shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    with as_users_run(), pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, named)


def test_a_tensor_that_the_index_leaves_out_is_named(tmp_path):
    folder = damaged(tmp_path, lambda tensors: None, shards=3)
    index = folder / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    del held["weight_map"][KEY]
    index.write_text(json.dumps(held))
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, index, KEY)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    folder = damaged(tmp_path, lambda tensors: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InputError) as error:
        load_pretrained(folder)
    one_line(error, file)


def test_folders_without_a_checkpoint(tmp_path):
    for folder in (tmp_path / "absent", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(InputError) as error:
            load_pretrained(folder)
        one_line(error, folder, "not a folder")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError) as error:
        load_pretrained(tmp_path)
    one_line(error, tmp_path, "no checkpoint", "model.safetensors")


def test_a_folder_without_a_config(tmp_path):
    damaged(tmp_path, lambda tensors: None)
    (tmp_path / "config.json").unlink()
    with pytest.raises(InputError) as error:
        load_pretrained(str(tmp_path))
    one_line(error, tmp_path / "config.json")
