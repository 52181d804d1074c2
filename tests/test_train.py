"""The optimizer step's arithmetic, and whole runs of train.py and decode.py."""

import dataclasses
import json
import math
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tomli_w
from common import run_config, tiny_config, tiny_model

import decode
import train
from qwen3next.cli import dump_config, load_config
from qwen3next.config import Compute, OptimizerConfig, Remat, TrainConfig
from qwen3next.errors import InputError
from qwen3next.hf import leaf_path
from qwen3next.optim import leaf_rules, optimizer, schedule, trainable
from qwen3next.programs import quick_options
from qwen3next.run_folder import load_run
from qwen3next.structure import structure
from qwen3next.training import TrainState, gradients, make_train_step

ROOT = Path(__file__).parent.parent


def make_batch(rows: int, seq: int) -> dict[str, jax.Array]:
    """Rows with different shares of labels, one of them with none."""
    ids = np.random.default_rng(0).integers(0, 64, (rows, seq + 1))
    labels = np.where(np.arange(seq) < np.linspace(0, seq, rows)[:, None], ids[:, 1:], -100)
    arrays = {"input_ids": ids[:, :-1], "labels": labels, "segment_ids": np.ones((rows, seq))}
    return {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}


def test_accumulation_weighs_microbatches_by_their_real_tokens():
    # The balance loss is nonlinear in the batch, so it is off: what is left must be the mean over all real tokens.
    model, batch = tiny_model(router_aux_loss_coef=0.0), make_batch(8, 16)
    params, frozen = eqx.partition(model, trainable(model))
    run = eqx.filter_jit(gradients, compiler_options=quick_options())
    whole, loss = run(params, frozen, batch, 1, Compute())
    for parts in (2, 8):
        pieces, metrics = run(params, frozen, batch, parts, Compute())
        assert math.isclose(metrics["loss"], loss["loss"], rel_tol=1e-5)
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * float(jnp.abs(a).max()))  # a wrong weight: 0.1


def test_packed_documents_train_as_separate_ones_do():
    """Boundaries in a chunk of 16, at its edge, and beside it; documents of one token; rows that differ; slow decay."""
    rows, seq = ((20, 27, 17), (15, 16, 1, 1, 31)), 64
    ids = np.asarray(make_batch(2, seq)["input_ids"])
    segments = np.stack([np.repeat(np.arange(1, len(row) + 1), row) for row in rows])
    labels = np.where(np.diff(segments, append=0, axis=1) == 0, np.roll(ids, -1, axis=1), -100)
    packed = {"input_ids": ids, "labels": labels, "segment_ids": segments}
    alone = {name: np.zeros((8, seq), np.int32) for name in packed} | {"labels": np.full((8, seq), -100)}
    places = [segments[row] == number for row in (0, 1) for number in range(1, len(rows[row]) + 1)]
    for at, place in enumerate(places):
        for name, values in packed.items():
            alone[name][at, : place.sum()] = values[int(at > 2)][place]
    model = tiny_model(router_aux_loss_coef=0.0)
    params, frozen = eqx.partition(model, trainable(model))
    run = eqx.filter_jit(gradients, compiler_options=quick_options())
    (one, loss), (other, separate) = (
        run(params, frozen, {name: jnp.asarray(x, jnp.int32) for name, x in batch.items()}, 1, Compute(chunk_size=16))
        for batch in (packed, alone)
    )
    assert math.isclose(loss["loss"], separate["loss"], rel_tol=1e-5)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * float(jnp.abs(a).max()))


def test_a_microbatch_without_labels_gives_no_nan():
    model, batch = tiny_model(), make_batch(2, 8)
    params, frozen = eqx.partition(model, trainable(model))
    empty = {**batch, "labels": jnp.full_like(batch["labels"], -100)}
    grads, metrics = gradients(params, frozen, empty, 1, Compute())
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads)) and float(metrics["loss"]) == 0


def test_only_matrices_decay_whatever_the_stacking():
    for layers in (4, 6):
        model = tiny_model(num_hidden_layers=layers, attention_bias=True)
        rules = leaf_rules(model, OptimizerConfig())
        kept = {path.rsplit(".modules.", 1)[-1] for path, rule in rules.items() if not rule.decay}
        projections = {f"mixer.{name}_proj.bias" for name in "qkvo"}
        norms = {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"}
        inner = {"mixer.norm.weight", "mixer.q_norm.weight", "mixer.k_norm.weight", "mixer.A_log", "mixer.dt_bias"}
        assert kept == projections | norms | inner


def test_the_schedule_warms_up_to_the_peak_and_ends_at_its_fraction():
    rate = schedule(OptimizerConfig(learning_rate=2.0, warmup_steps=10, final_fraction=0.25), 110)
    expected = [0, 1, 2, 2 * (0.25 + 0.75 / 2), 0.5]
    np.testing.assert_allclose([float(rate(n)) for n in (0, 5, 10, 60, 110)], expected, rtol=1e-6)
    with pytest.raises(InputError, match=r"warmup_steps is 10.*below run.steps, 10"):
        schedule(OptimizerConfig(warmup_steps=10), 10)


DTYPES = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]


@pytest.mark.parametrize("params_dtype, dtype", DTYPES)
def test_a_step_keeps_dtypes_and_moves_every_leaf(tmp_path, params_dtype, dtype):
    config = run_config(tmp_path)
    config = dataclasses.replace(config, compute=Compute(dtype=dtype, remat=Remat("both")))
    model = tiny_model(dtype=params_dtype)
    params, frozen = eqx.partition(model, trainable(model))
    transform = optimizer(OptimizerConfig(learning_rate=0.1, warmup_steps=0), 10)
    state = TrainState(jnp.int32(0), jax.random.key(0), params, transform.init(params))
    with jax.numpy_dtype_promotion("standard"):  # the gradient of jax.nn.dot_product_attention in bfloat16 counts on it
        after, metrics = eqx.filter_jit(make_train_step(config, transform))((frozen, make_batch(4, 16)), state)
    assert math.isfinite(float(metrics["loss"])) and metrics["loss"].dtype == jnp.float32
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(state)]
    old, new = (jax.tree_util.tree_leaves_with_path(tree) for tree in (params, after.params))
    assert [leaf_path(path) for (path, a), (_, b) in zip(old, new, strict=True) if bool((a == b).all())] == []
    assert int(after.step) == 1
    decay = [leaf for path, leaf in new if leaf_path(path).endswith("A_log")]
    assert decay and all(leaf.dtype == jnp.float32 for leaf in decay)


def test_a_run_learns_writes_its_folder_and_decodes(tmp_path, capsys):
    config = run_config(tmp_path, steps=30, accumulate=2)
    assert train.main(config) == 0
    out, folder = capsys.readouterr().out, Path(config.run.folder)
    assert "held-out bits per byte: this model" in out and "gzip" in out and "xz" in out
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 15 and losses[-1] < losses[0] - 1
    assert records[-1]["held_out_bits_per_byte/this model"] < 8

    assert load_config(folder / "config.toml") == config
    _, model = load_run(folder)
    assert model.config == config.model
    decode.main([str(folder), "--prompt", "def ", "--prompt-ids", "1,2", "--max-new-tokens", "3", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["prompt_ids"] for row in rows] == [[100, 101, 102, 32], [1, 2]]
    assert all(set(row) == {"prompt_ids", "tokens", "text"} and len(row["tokens"]) <= 3 for row in rows)


def test_ctrl_c_saves_and_ends_cleanly(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(dump_config(run_config(tmp_path, steps=100_000, log_every=1)))
    command = [sys.executable, str(ROOT / "train.py"), str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    folder, deadline = tmp_path / "run", time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in out, out
    assert "ended after step" in out
    load_run(folder)


def merge(table: dict, changes: dict) -> None:
    for key, value in changes.items():
        if isinstance(value, dict):
            merge(table.setdefault(key, {}), value)
        else:
            table[key] = value


BAD_CONFIGS = {
    "model.hidden_sizes = 3": "unknown key hidden_sizes; allowed: vocab_size, hidden_size",
    "data.batch_size = 2.5": "2.5 is not an int",
    'data.roles = "assistant"': "'assistant' is not a list",
    "run.folder = 3": "3 is not a str",
    "model.layer_types = ['full_attention']": "layer_types has 1 entries; num_hidden_layers is 4",
    "model.num_key_value_heads = 3": "num_attention_heads is 4; it must be a multiple of num_key_value_heads, 3",
    "compute.remat.placement = 'everywhere'": "compute.remat.placement 'everywhere' is unknown; allowed: none, block",
    "typo.x = 1": "unknown key typo; allowed: model, data, optimizer, compute, mesh, lora, run",
}


@pytest.mark.parametrize("line", BAD_CONFIGS)
def test_a_bad_config_is_one_line_that_names_the_key(tmp_path, line):
    path = tmp_path / "config.toml"
    path.write_text(dump_config(run_config(tmp_path)))
    values = tomllib.loads(path.read_text())
    for section, section_values in tomllib.loads(line).items():
        merge(values.setdefault(section, {}), section_values)
    path.write_text(tomli_w.dumps(values))
    with pytest.raises(InputError) as caught:
        load_config(path)
    assert BAD_CONFIGS[line] in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_of_the_model_have_no_default(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("[model]\nvocab_size = 257\n")
    with pytest.raises(InputError, match=r"required keys are missing: model.hidden_size, model.num_hidden_layers"):
        load_config(path)


def test_a_config_without_a_model_is_refused():
    with pytest.raises(InputError, match="required key 'model' is missing"):
        structure({"run": {"steps": 3}}, TrainConfig)


@pytest.mark.parametrize(
    "arguments, names",
    [
        ([], "first argument must be a config"),
        (["none.toml"], "none.toml: not a readable TOML file"),
        (["configs/tiny.toml", "--run.stepz", "3"], "--run.stepz"),
        (["configs/tiny.toml", "--run.steps", "many"], "--run.steps"),
        (["configs/tiny.toml", "--compute.remat.placement", "all"], "placement 'all' is unknown; allowed: none, block"),
        (["configs/tiny.toml", "--model.num-experts-per-tok", "9"], "num_experts_per_tok is 9"),
    ],
)
def test_a_bad_command_line_is_one_line_and_exit_2(arguments, names, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(InputError) as caught:
        train.parse(["train.py", *arguments])
    assert names in str(caught.value) and "\n" not in str(caught.value)


def test_scripts_exit_with_2_and_one_line(tmp_path):
    for command in (["train.py", "none.toml"], ["decode.py", str(tmp_path), "--prompt", "x"]):
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_overrides_reach_every_section_and_the_preset_stays():
    flags = "--model.num-hidden-layers 8 --run.eval-every 7 --optimizer.learning-rate 0.5 --data.batch-size 12"
    flags += " --compute.remat.placement both"
    config = train.parse(["train.py", str(ROOT / "configs/tiny.toml"), *flags.split()])
    assert len(config.model.layer_kinds) == 8 and config.run.eval_every == 7
    assert config.optimizer.learning_rate == 0.5 and config.compute.remat.placement == "both"
    assert config.data.batch_size == 12 and config.model.vocab_size == 257


def test_too_little_text_names_the_data(tmp_path):
    config = run_config(tmp_path)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=4096))
    with pytest.raises(InputError, match=r"data.batch_size"):
        train.main(config)
    assert not Path(config.run.folder).exists()


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(tmp_path):
    config = run_config(tmp_path)
    with pytest.raises(InputError, match=r"model.vocab_size is 64; the tokenizer needs at least 257"):
        train.main(dataclasses.replace(config, model=tiny_config()))


def test_optimizer_state_exists_for_trainable_leaves_alone():
    model = tiny_model()
    params, _ = eqx.partition(model, trainable(model))
    state = optimizer(OptimizerConfig(), 1000).init(params)
    moments = [leaf for leaf in jax.tree.leaves(state) if getattr(leaf, "ndim", 0) > 0]
    assert len(moments) == 2 * len(jax.tree.leaves(params))
