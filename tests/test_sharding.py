"""Meshes of devices: how arrays are cut, what does not divide, and that the numbers are those of one device."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from common import run_config
from jax.sharding import PartitionSpec as P

from qwen3next.cli import dump_config
from qwen3next.config import Compute, MeshConfig, RunConfig, TrainConfig
from qwen3next.errors import InputError
from qwen3next.mesh import check_mesh, leaf_spec

TESTS = Path(__file__).parent
DECODER = "params.decoder.cycles.modules.runs.0.modules"
ONE = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
FSDP, EXPERT, MIXED = ONE | {"fsdp": 128}, ONE | {"expert": 128}, ONE | {"fsdp": 8, "expert": 4, "tensor": 2}


@pytest.mark.parametrize(
    ("path", "shape", "sizes", "spec"),
    [
        ("embed_tokens.weight", (151936, 2048), FSDP, P("fsdp", None)),
        ("optimizer.adam.mu.embed_tokens.weight", (151936, 2048), EXPERT, P("expert", None)),
        ("lm_head.weight", (151936, 2048), MIXED, P(("tensor", "fsdp", "expert"), None)),
        (
            "lm_head.base.weight",
            (151937, 2048),
            MIXED,
            P(None, ("fsdp", "expert")),
        ),  # a vocabulary that does not divide
        ("lm_head.lora_B", (151936, 4), MIXED, P(("tensor", "fsdp", "expert"), None)),
        ("lm_head.lora_A", (4, 2048), MIXED, P(None, None)),
        (f"{DECODER}.mlp.experts.down_proj.weight", (12, 3, 512, 2048, 512), FSDP, P(None, None, "fsdp", None, None)),
        (
            f"{DECODER}.mlp.experts.down_proj.weight",
            (12, 3, 512, 2048, 512),
            EXPERT,
            P(None, None, "expert", None, None),
        ),
        (
            f"{DECODER}.mlp.experts.down_proj.weight",
            (12, 3, 512, 2048, 512),
            MIXED,
            P(None, None, ("expert", "fsdp"), None, "tensor"),
        ),
        (f"{DECODER}.mlp.experts.up_proj.lora_B", (12, 3, 8, 24, 4), MIXED, P(None, None, "expert", "tensor", None)),
        (
            f"{DECODER}.mlp.shared_expert.up_proj.weight",
            (12, 3, 512, 2048),
            MIXED,
            P(None, None, ("tensor", "fsdp", "expert"), None),
        ),
        (f"{DECODER}.mixer.in_proj_ba.weight", (12, 3, 64, 2048), FSDP, P(None, None, None, "fsdp")),
        (f"{DECODER}.mixer.out_proj.weight", (12, 3, 2048, 4096), MIXED, P(None, None, ("fsdp", "expert"), "tensor")),
        (f"{DECODER}.mixer.A_log", (12, 3, 32), FSDP, P(None, None, None)),  # small
        (f"{DECODER}.mixer.A_log", (12, 3, 32), MIXED, P(None, None, "tensor")),  # but of heads
        (f"{DECODER}.mlp.gate.weight", (12, 3, 511, 2047), FSDP, P(None, None, None, None)),  # nothing divides
        ("step", (), MIXED, P()),
    ],
)
def test_an_array_is_cut_behind_the_axes_that_count_layers(path, shape, sizes, spec):
    assert leaf_spec(path, shape, sizes) == spec
    assert leaf_spec(path, shape, ONE) == P(*[None] * len(shape))


def test_an_axis_takes_what_is_left():
    assert MeshConfig(data=2, fsdp=-1, tensor=2).sizes(16) == ONE | {"data": 2, "fsdp": 4, "tensor": 2}
    for config, devices in ((MeshConfig(data=3), 8), (MeshConfig(fsdp=4), 8), (MeshConfig(fsdp=1, expert=16), 8)):
        with pytest.raises(InputError, match=rf"does not come out even with {devices} devices"):
            config.sizes(devices)
    with pytest.raises(InputError, match=r"fsdp and expert are -1; one axis at most"):
        MeshConfig(expert=-1)
    with pytest.raises(InputError, match=r"mesh.tensor is 0; it must be above 0"):
        MeshConfig(tensor=0)


@pytest.mark.parametrize(
    ("sizes", "changes", "told"),
    [
        ({"expert": 8}, {}, "model.num_experts is 4; it must be a multiple of mesh.expert, 8"),
        ({"tensor": 4}, {}, "model.num_key_value_heads is 2; it must be a multiple of mesh.tensor, 4"),
        ({"data": 8}, {}, "data.batch_size is 4; it must be a multiple of run.accumulate, 1, times the 8 devices"),
        ({"tensor": 2}, {"attention_bias": True}, "model.attention_bias with mesh.tensor 2"),
        ({}, {"expert_chunks": 5}, "compute.expert_chunks is 5; a device's 128 tokens must be a multiple of it"),
    ],
)
def test_what_does_not_divide_is_named(tmp_path, sizes, changes, told):
    config: TrainConfig = run_config(tmp_path)
    check_mesh(config, ONE)
    for name, value in changes.items():
        if name == "expert_chunks":
            config = dataclasses.replace(config, compute=Compute(dispatch="all_to_all", expert_chunks=value))
        else:
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, **{name: value}))
    with pytest.raises(InputError, match=told):
        check_mesh(config, ONE | sizes)


def _run(*command, devices=8):
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(TESTS.parent), "COLUMNS": "200"}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, cwd=TESTS.parent)


def test_eight_devices_compute_what_one_does():
    meshes = ("fsdp", "expert", "mixed", "tensor")  # `data` alone besides, by hand
    done = _run(TESTS / "sharded_step.py", *meshes)
    assert done.returncode == 0, done.stderr
    assert "Involuntary full rematerialization" not in done.stderr
    reports = json.loads(done.stdout)
    assert set(reports) == set(meshes)
    for name, report in reports.items():
        assert report["loss"] < 1e-5 and report["balance"] < 1e-5 and report["training"] < 2e-5, (name, report)
        assert report["gradients"] < 1e-4 and report["moved"] == 0, (name, report)
        assert report["cut"] > 30, (name, report)


def test_a_mesh_that_does_not_fit_is_one_line_and_nothing_on_disk(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(dump_config(run_config(tmp_path)))
    done = _run("train.py", path, "--mesh.expert", "8", "--data.batch-size", "8")
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert done.stderr == "error: model.num_experts is 4; it must be a multiple of mesh.expert, 8\n"


def test_the_plan_says_where_leaves_lie(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(dump_config(run_config(tmp_path)))
    done = _run("train.py", path, "--mesh.expert", "4", "--data.batch-size", "8", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "shards, mesh data 1 x fsdp 2 x expert 4 x tensor 1" in done.stdout
    assert any("experts.gate_proj.weight" in line and "expert" in line for line in done.stdout.splitlines())


def test_a_compilation_alone_says_what_a_step_sends_and_holds(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(dump_config(run_config(tmp_path)))
    layers = ("--model.num-hidden-layers", "1", "--model.layer-types", "full_attention")
    done = _run("train.py", path, "--mesh.expert", "2", "--compile-only", *layers, devices=2)
    assert done.returncode == 0 and not (tmp_path / "run").exists(), done.stderr
    for word in ("temporaries", "FLOPs", "network", "all-to-all", "all-reduce"):
        assert word in done.stdout, word
    with pytest.raises(InputError, match=r"run.topology is 'v5p-256': that machine is not here"):
        RunConfig(topology="v5p-256")
