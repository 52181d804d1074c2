"""Every check of the settings: it fires, names the field, and shows the values."""

import dataclasses

import pytest
from common import as_users_run, tiny_config

from qwen3next.config import (
    Compute,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Remat,
    RopeParameters,
    RunConfig,
    TrainConfig,
)
from qwen3next.errors import InputError

LINEAR, FULL = "linear_attention", "full_attention"


def _refused(make, *words, **values):
    """`make(**values)` raises `InputError`: one line with all the words in it."""
    with pytest.raises(InputError) as error:
        make(**values)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message, f"{word!r} is not in {message!r}"


def test_defaults_are_those_of_hugging_face():
    config = ModelConfig()
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (151_936, 2048, 5632)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 2, 256)
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (16, 32)
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (512, 10, True)
    assert config.rope_parameters == RopeParameters("default", 10_000.0, 0.25)
    assert (config.rotary_dim, config.rotary_frequencies) == (64, 32)
    assert (config.key_dim, config.value_dim, config.conv_dim) == (2048, 4096, 8192)


def test_odd_rotary_dimensions_round_up():
    config = tiny_config(head_dim=12, rope_parameters=RopeParameters(partial_rotary_factor=0.25))
    assert (config.rotary_dim, config.rotary_frequencies) == (3, 2)


@pytest.mark.parametrize("cls", [RopeParameters, ModelConfig, Remat, Compute, DataConfig, OptimizerConfig, RunConfig])
def test_settings_cannot_be_changed(cls):
    config = cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, None)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "decoder_sparse_step",
        "full_attention_interval",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "num_experts_per_tok",
    ],
)
def test_model_sizes_must_be_positive(name, value):
    _refused(tiny_config, f"model.{name}", value, "above 0", **{name: value})


@pytest.mark.parametrize("name", ["initializer_range", "rms_norm_eps"])
def test_model_scales_must_be_positive(name):
    _refused(tiny_config, f"model.{name}", "0.0", **{name: 0.0})


def test_expert_sizes_do_not_matter_without_experts():
    tiny_config(num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0, shared_expert_intermediate_size=0)
    tiny_config(mlp_only_layers=(0, 1, 2, 3), num_experts=1, num_experts_per_tok=9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(num_attention_heads=5, num_key_value_heads=2), ("num_attention_heads", 5, "num_key_value_heads", 2)),
        (dict(num_attention_heads=2, num_key_value_heads=4), ("num_attention_heads", 2, "num_key_value_heads", 4)),
        (
            dict(linear_num_value_heads=6, linear_num_key_heads=4),
            ("linear_num_value_heads", 6, "linear_num_key_heads", 4),
        ),
        (
            dict(linear_num_value_heads=2, linear_num_key_heads=4),
            ("linear_num_value_heads", 2, "linear_num_key_heads", 4),
        ),
        (dict(hidden_act="gelu"), ("hidden_act", "'gelu'", "'silu'")),
        (dict(layer_types=(LINEAR,) * 3), ("layer_types", 3, "num_hidden_layers", 4)),
        (dict(layer_types=(LINEAR,) * 5), ("layer_types", 5, "num_hidden_layers", 4)),
        (dict(mlp_only_layers=(1, 4)), ("mlp_only_layers", 4, "0 to 3")),
        (dict(mlp_only_layers=(-1,)), ("mlp_only_layers", -1, "0 to 3")),
        (dict(num_experts=3, num_experts_per_tok=4), ("num_experts_per_tok", 4, "num_experts", 3)),
        (
            dict(head_dim=8, rope_parameters=RopeParameters("dynamic", factor=2.0)),
            ("dynamic", "rotates 2", "above 2"),
        ),
        (dict(head_dim=3), ("head_dim 3", "partial_rotary_factor 0.25", "rotates 0")),
        (dict(head_dim=7, rope_parameters=RopeParameters(partial_rotary_factor=1.0)), ("head_dim 7", "rotates 7")),
        (
            dict(
                head_dim=16,
                rope_parameters=RopeParameters("longrope", short_factor=(1.0, 1.0), long_factor=(1.0, 1.0, 1.0)),
            ),
            ("rope_parameters.long_factor", 3, 2),
        ),
        (
            dict(
                head_dim=16,
                rope_parameters=RopeParameters("longrope", short_factor=(1.0,), long_factor=(1.0, 1.0)),
            ),
            ("rope_parameters.short_factor", 1, 2),
        ),
    ],
)
def test_model_checks(changes, words):
    _refused(tiny_config, *words, **changes)


@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3", "longrope"])
def test_a_rope_type_needs_its_fields(name):
    _refused(RopeParameters, repr(name), "rope_parameters.", rope_type=name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(rope_theta=0.0), ("rope_theta", "0.0", "above 0")),
        (dict(partial_rotary_factor=-0.5), ("partial_rotary_factor", -0.5, "above 0")),
        (dict(partial_rotary_factor=1.5), ("partial_rotary_factor", 1.5, "at most 1")),
        (dict(rope_type="linear", factor=0.5), ("rope_parameters.factor", 0.5, "at least 1")),
        (dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0), ("'llama3'", "high_freq_factor")),
        (dict(rope_type="llama3", factor=8.0, high_freq_factor=4.0), ("'llama3'", "low_freq_factor")),
        (dict(rope_type="longrope", short_factor=(1.0,)), ("'longrope'", "long_factor")),
        (dict(rope_type="yarn", factor=4.0, rope_theta=1.0), ("rope_theta", "1.0", "yarn", "more than 1")),
        (dict(original_max_position_embeddings=1), ("rope_parameters.original_max_position_embeddings", 1, "above 1")),
    ],
)
def test_rope_checks(changes, words):
    _refused(RopeParameters, *words, **changes)


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        (Compute, dict(chunk_size=48), ("compute.chunk_size", 48, "power of two")),
        (Compute, dict(chunk_size=-8), ("compute.chunk_size", -8, "power of two")),
        (DataConfig, dict(sequence_length=0), ("data.sequence_length", 0, "above 0")),
        (DataConfig, dict(batch_size=-2), ("data.batch_size", -2, "above 0")),
        (DataConfig, dict(sequence_length=2**40), ("data.sequence_length", 2**40, "at most")),
        (DataConfig, dict(packing="split", long_documents="drop"), ("data.long_documents", "'drop'", "split")),
        (DataConfig, dict(source=()), ("data.source", "empty")),
        (DataConfig, dict(source=("a=1", "b")), ("data.source 'b'", "NAME=WEIGHT")),
        (DataConfig, dict(source=("a=1", "b=0")), ("data.source 'b=0'", "above 0")),
        (DataConfig, dict(source=("a=1", "b=nan")), ("data.source 'b=nan'", "above 0")),
        (DataConfig, dict(source=("a=1", "a=2")), ("data.source", "'a' twice")),
        (DataConfig, dict(source=("a=1e300", "b=1e-300")), ("data.source", "1,000,000 times")),
        (DataConfig, dict(prompt_field="a", messages_field="b"), ("data.prompt_field", "'a'", "'b'", "one")),
        (DataConfig, dict(roles=()), ("data.roles", "empty")),
        (DataConfig, dict(held_out=0.0), ("data.held_out", "0.0", "between 0 and 1")),
        (DataConfig, dict(held_out=1.0), ("data.held_out", "1.0", "between 0 and 1")),
        (OptimizerConfig, dict(learning_rate=0.0), ("optimizer.learning_rate", "0.0", "above 0")),
        (OptimizerConfig, dict(epsilon=0.0), ("optimizer.epsilon", "0.0", "above 0")),
        (OptimizerConfig, dict(clip_norm=-1.0), ("optimizer.clip_norm", "-1.0", "above 0")),
        (OptimizerConfig, dict(beta1=1.0), ("optimizer.beta1", "1.0", "between 0 and 1")),
        (OptimizerConfig, dict(beta2=-0.1), ("optimizer.beta2", -0.1, "between 0 and 1")),
        (OptimizerConfig, dict(final_fraction=1.1), ("optimizer.final_fraction", 1.1, "between 0 and 1")),
        (OptimizerConfig, dict(warmup_steps=-1), ("optimizer.warmup_steps", -1, "negative")),
        (OptimizerConfig, dict(weight_decay=-0.1), ("optimizer.weight_decay", -0.1, "negative")),
        *(
            (RunConfig, {name: 0}, (f"run.{name}", 0, "above 0"))
            for name in ("steps", "accumulate", "log_every", "eval_every", "eval_batches", "save_every")
        ),
        (RunConfig, dict(sample_tokens=-1), ("run.sample_tokens", -1, "negative")),
        (RunConfig, dict(seed=-1), ("run.seed", -1, "negative")),
        (RunConfig, dict(folder=""), ("run.folder", "empty")),
        (RunConfig, dict(compilation_cache=""), ("run.compilation_cache", "empty", "auto, off or a folder")),
    ],
)
def test_other_checks(make, changes, words):
    _refused(make, *words, **changes)


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        (RopeParameters, dict(rope_type="ntk"), ("rope_type", "'ntk'", "default, linear, dynamic, yarn")),
        (tiny_config, dict(dtype="float64"), ("dtype", "'float64'", "float32, bfloat16, float16")),
        (tiny_config, dict(layer_types=(LINEAR, FULL, "mamba", FULL)), ("layer_types", "'mamba'", LINEAR, FULL)),
        (Compute, dict(dtype="float64"), ("compute.dtype", "'float64'", "float32, bfloat16")),
        (Compute, dict(dispatch="fast"), ("compute.dispatch", "'fast'", "auto, dense, blocks, ragged")),
        (Compute, dict(attention="flash"), ("compute.attention", "'flash'", "auto, plain, splash, cudnn")),
        (Remat, dict(placement="all"), ("compute.remat.placement", "'all'", "none, block, layer, both")),
    ],
)
def test_choices(make, changes, words):
    with as_users_run():
        _refused(make, *words, **changes)


def test_a_batch_is_cut_into_equal_parts():
    data, run = DataConfig(batch_size=6), RunConfig(accumulate=4)
    _refused(TrainConfig, "data.batch_size", 6, "run.accumulate", 4, model=tiny_config(), data=data, run=run)


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (OptimizerConfig, "learning_rate"),
        (OptimizerConfig, "weight_decay"),
        (DataConfig, "held_out"),
        (RopeParameters, "rope_theta"),
        (RopeParameters, "factor"),
        (tiny_config, "rms_norm_eps"),
    ],
)
def test_numbers_must_be_finite(make, name, value):
    _refused(make, name, value, **{name: float(value)})


def test_weights_are_hundredths_of_the_smallest():
    assert DataConfig(source=("x/year=2024",)).weights == {"x/year=2024": 100}
    assert DataConfig(source=("a=3", "b=1")).weights == {"a": 300, "b": 100}
    assert DataConfig(source=("a=0.5", "b c=0.7", "d=e=0.6")).weights == {"a": 100, "b c": 140, "d=e": 120}
