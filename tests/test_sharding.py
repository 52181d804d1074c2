"""One axis of devices: how arrays are cut, and that the numbers are those of one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec as P

from qwen3next.sharding import leaf_spec

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("embed_tokens.weight", (151936, 2048), P("fsdp")),
        ("optimizer.adam.mu.embed_tokens.weight", (151936, 2048), P("fsdp")),
        (
            "decoder.cycles.modules.runs.0.modules.mlp.experts.down_proj.weight",
            (12, 3, 512, 2048, 512),
            P(None, None, "fsdp"),
        ),
        ("decoder.remainder.runs.0.modules.mixer.in_proj_ba.weight", (2, 64, 2048), P(None, None, "fsdp")),
        ("params.decoder.prefix.runs.1.modules.mixer.out_proj.weight", (2, 2048, 4096), P(None, "fsdp")),
        ("decoder.cycles.modules.runs.0.modules.mixer.A_log", (12, 3, 128), P()),  # small
        ("decoder.cycles.modules.runs.0.modules.mlp.gate.weight", (12, 3, 511, 2047), P()),  # nothing divides
        ("step", (), P()),
    ],
)
def test_an_array_is_cut_behind_the_axes_that_count_layers(path, shape, spec):
    assert leaf_spec(path, shape, 128) == spec
    assert leaf_spec(path, shape, 1) == P()


def test_eight_devices_compute_what_one_does():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run([sys.executable, TESTS / "sharded_step.py"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Involuntary full rematerialization" not in done.stderr
    for report in json.loads(done.stdout).values():
        assert report["loss"] < 1e-5 and report["balance"] < 1e-5 and report["cut"] > 30
        worst = max(report["gradients"], key=report["gradients"].get)
        assert report["gradients"][worst] < 1e-4, worst
