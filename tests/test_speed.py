"""The benchmark of speeds: what it counts, what it writes, and how it ends when something is missing."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.products import products, time_products

ROOT = Path(__file__).resolve().parent.parent
SMALL = """
[model]
vocab_size = 32
hidden_size = 16
num_hidden_layers = 4
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
linear_num_key_heads = 1
linear_num_value_heads = 2
linear_key_head_dim = 8
linear_value_head_dim = 8
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 8
shared_expert_intermediate_size = 8
"""


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "speed.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def test_products_are_counted_as_often_as_they_run():
    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return carry @ y, None

        return jnp.einsum("ij,jk->ik", jax.lax.scan(step, x, None, length=5)[0], y) + jnp.sum(x @ x.T)

    found = products(function, jnp.ones((2, 3)), jnp.ones((3, 3)))
    counted = {(product.left.shape, product.right.shape): (product.times, product.flops) for product in found}
    # 5 in the loop and the einsum's, which is the same; 2 * 2 * 3 * 3 operations each.
    assert counted == {((2, 3), (3, 3)): (6, 36), ((2, 3), (3, 2)): (1, 24)}
    facts = time_products(found)()
    assert facts["flops"] == 6 * 36 + 24 and facts["kinds"] == 2 and facts["seconds"] > 0


def test_a_grouped_product_is_refused():
    def grouped(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, y, sizes)

    with pytest.raises(ValueError, match="ragged"):
        products(grouped, jnp.ones((4, 3)), jnp.ones((2, 3, 5)), jnp.array([1, 3]))


def test_an_item_without_peers(tmp_path: Path):
    config, out = tmp_path / "small.toml", tmp_path / "out.json"
    config.write_text(SMALL)
    done = run("experts", "--config", config, "--repeats", "2", "--json", out, "--peer-python", tmp_path / "none")
    assert done.returncode == 0, done.stderr
    told = next(line for line in done.stderr.splitlines() if line.startswith("peers are left out"))
    assert "pip install torch transformers" in told
    report = json.loads(out.read_text())
    assert {"date", "machine", "cores", "threads", "versions", "config", "repeats", "blocks"} == report.keys()
    (block,) = report["blocks"]
    rows = {row["name"]: row for row in block["rows"]}
    for name in ("MoE", "bare products"):
        row = rows.pop(name)
        assert len(row["repetitions"]) == 2 and row["tokens"] > 0 and row["peak"] > 0
        seconds = [repetition["seconds"] for repetition in row["repetitions"]]
        assert 0 < row["minimum"] == min(seconds) <= row["seconds"] <= max(seconds)
    assert rows and all(row["side"] == "peer" and row["error"] == "-" for row in rows.values())
    assert "MoE" in done.stdout and "GFLOP" in done.stdout


def test_a_contestant_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for the command
    from turns import Child, Failed

    script = tmp_path / "child.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nfrom turns import serve\n"
        "def make(spec):\n    print('noise')\n    return lambda: {'seconds': 1 / spec['divisor']}\nserve(make)\n"
    )
    with Child([sys.executable, script], {"divisor": 2}, {}) as child:
        assert child.answer() == {"ready": True}
        assert child.ask("go") == {"seconds": 0.5}
        assert child.ask("end")["peak"] > 0
    with Child([sys.executable, script], {"divisor": 0}, {}) as child, pytest.raises(Failed, match="ZeroDivisionError"):
        child.answer()
    slow = tmp_path / "slow.py"
    slow.write_text("import subprocess, sys\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\ninput()\n")
    with Child([sys.executable, slow], {}, {}) as child:
        other = child.answer()
    deadline = time.monotonic() + 10
    while _runs(int(str(other))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(int(str(other)))  # what a contestant has started is ended too


def test_a_missed_goal_says_by_how_much(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from rich.console import Console
    from speed import show

    def row(name: str, side: str, seconds: float, goal: float | None) -> dict[str, object]:
        facts = {"tokens": 0, "repetitions": [], "minimum": seconds, "peak": 0}
        return facts | {"name": name, "side": side, "seconds": seconds, "goal": goal}

    rows = [row("near", "ours", 0.8, 1.5), row("there", "ours", 0.5, 1.5), row("peer", "peer", 1.0, None)]
    report = {"date": "", "machine": "", "cores": 1, "threads": 1, "versions": {}, "config": "", "repeats": 1}
    console = Console(width=140, record=True, file=io.StringIO())
    show(report | {"blocks": [{"title": "step", "steps": 1, "rows": rows}]}, console)
    near, there = (line for line in console.export_text().splitlines() if "near" in line or "there" in line)
    assert "1.25" in near and "1.5 (-16.7%)" in near
    assert "2.00" in there and "1.5" in there and "%" not in there


def _runs(process: int) -> bool:
    """Whether a process is there, and not only as an entry that nobody has collected."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["speeds"], "item 'speeds' is unknown; allowed: train, prefill"),
        (["train", "--repeats", "0"], "--repeats is 0"),
        (["train", "--threads", "9999"], "--threads is 9999"),
        (["train", "--config", "none.toml"], "none.toml"),
        (["train", "--json", "no/such/folder.json"], "no such folder"),
    ],
)
def test_bad_arguments_end_in_one_line(args: list[str], told: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from speed import main

    from qwen3next.errors import InputError

    with pytest.raises(InputError) as error:
        main(args)
    assert told in str(error.value)
