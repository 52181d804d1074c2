"""Kills a run at random moments and lets it go on each time; it must end as a run that was never killed.

python benchmarks/kill_and_resume.py --kills 20

Half of the kills (SIGKILL) come at a random time of the process, half while a save is under way. The training text, the
config and the folders are temporary. Exit status 1, and the difference, if any parameter, metric or batch differs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from qwen3next.cli import dump_config
from qwen3next.config import Compute, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig

ROOT = Path(__file__).parent.parent
TEXT = "".join(f"def add_{n}(x):\n    return x + {n * n}\n\n" for n in range(300))


def make_config(folder: Path, name: str, steps: int) -> Path:
    """A config of a small hybrid that saves its state every third step."""
    (folder / "text.txt").write_text(TEXT)
    model = ModelConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=("linear_attention", "full_attention"),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    data = DataConfig(source=(str(folder / "text.txt"),), sequence_length=32, batch_size=4, held_out=0.02)
    run = RunConfig(
        folder=str(folder / name), steps=steps, log_every=1, eval_every=10, save_every=3, sample_tokens=0, wandb="off"
    )
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=5)
    path = folder / f"{name}.toml"
    path.write_text(dump_config(TrainConfig(model, data, optimizer, Compute(), run=run)))
    return path


def start(config: Path) -> subprocess.Popen[bytes]:
    """The run in a process of its own; what a kill leaves of a compiled program is temporary as well."""
    programs = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(config.parent / "programs")
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": programs}
    with config.with_suffix(".log").open("ab") as log:
        return subprocess.Popen([sys.executable, ROOT / "train.py", config], stdout=log, stderr=log, env=environment)


def saves_under_way(states: Path) -> bool:
    """Whether orbax is writing a state just now."""
    return states.is_dir() and any(path.name.endswith("tmp") for path in states.iterdir())


def run_straight(config: Path, folder: Path) -> float:
    """The run without a kill; returns the seconds until its first step was done."""
    process, began, first = start(config), time.monotonic(), 0.0
    while process.poll() is None:
        if not first and (folder / "metrics.jsonl").is_file() and (folder / "metrics.jsonl").stat().st_size:
            first = time.monotonic() - began
        time.sleep(0.01)
    if process.returncode != 0:
        sys.exit(config.with_suffix(".log").read_text())
    return first


def kill_once(config: Path, folder: Path, seconds: float, in_save: bool, rng: random.Random) -> bool:
    """Starts the run and kills it, in a save or within `seconds`; `False` if it had ended before."""
    process, began = start(config), time.monotonic()
    delay = rng.uniform(0, seconds)
    skipped = rng.randrange(4)  # saves to let pass
    while process.poll() is None:
        if in_save and saves_under_way(folder / "states"):
            if skipped == 0:
                time.sleep(rng.uniform(0, 0.05))
                break
            skipped -= 1
            while process.poll() is None and saves_under_way(folder / "states"):
                time.sleep(0.001)
        elif not in_save and time.monotonic() - began > delay:
            break
        time.sleep(0.001)
    process.kill()
    return process.wait() < 0


def outcome(folder: Path) -> tuple[bytes, list[dict[str, float]]]:
    """The weights' file and the metrics, without those that tell of time."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timing = ("time", "tokens_per_second")
    metrics = [{name: value for name, value in line.items() if name not in timing} for line in lines]
    return (folder / "model.safetensors").read_bytes(), metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="by default 40 for each kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.steps = args.steps or 40 * args.kills
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.monotonic()
        straight, killed = (make_config(folder, name, args.steps) for name in ("straight", "killed"))
        seconds, kills, resumed = 1 + run_straight(straight, folder / "straight"), 0, []
        while kills < args.kills:
            in_save = kills % 2 == 0
            if not kill_once(killed, folder / "killed", seconds, in_save, rng):
                print("the run ended before the next kill; more --steps are needed")
                return 1
            kills += 1
            states = folder / "killed" / "states"
            steps = [int(path.name) for path in states.iterdir() if path.name.isdecimal()] if states.is_dir() else []
            resumed.append(max(steps, default=0))
            print(
                f"kill {kills} {'in a save' if in_save else 'at random'}: resumes after step {resumed[-1]}", flush=True
            )
        status = start(killed).wait()
        log = killed.with_suffix(".log").read_text()
        if status != 0 or "Traceback" in log:
            print(log)
            return 1
        (weights, metrics), (other_weights, other_metrics) = (outcome(folder / name) for name in ("straight", "killed"))
    steps = [record["step"] for record in other_metrics]
    checks = {
        "the weights are the same bytes": weights == other_weights,
        "each step stands once in the metrics": steps == list(range(1, args.steps + 1)),
        "metrics and batches are the same": metrics == other_metrics,
        "saved steps never fall back": resumed == sorted(resumed),
    }
    for words, holds in checks.items():
        print(f"{words}: {holds}")
    print(f"{kills} kills, {args.steps} steps, {time.monotonic() - began:.0f} s")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
