"""Reading and writing Hugging Face folders: time and memory, next to the safetensors library's own reader and writer.

python benchmarks/checkpoints.py                          # 3 GB in 8 shards, some minutes
python benchmarks/checkpoints.py --repeats 3 --json out.json

Makes a checkpoint of random bfloat16 tensors in a temporary folder. Each measurement is a process of its own, and the
kinds take turns, so that a change in the machine's load meets all of them. The files stay in the page cache, and as
much memory as the checkpoint needs is used and freed right before: what is measured is this program, neither the disk
nor a virtual machine that first has to fetch memory from its host (at 0.4 GB/s, where this was written). `peak` is the
process's largest resident memory from then on, Python and JAX included.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qwen3next.config import ModelConfig

# The published widths, with fewer layers and experts.
CONFIG = ModelConfig(
    intermediate_size=5120, num_hidden_layers=8, num_experts=32, num_experts_per_tok=10, dtype="bfloat16"
)
SHARDS = 8
KINDS = {
    "library reads": "safetensors: every tensor once, none kept",
    "library keeps": "safetensors: every tensor in memory",
    "load_pretrained": "the model in memory",
    "library writes": "safetensors: the same shards, all tensors in memory",
    "save_pretrained": "from a model in memory",
    "to a run": "python -m qwen3next.convert FOLDER RUN",
    "to hf": "python -m qwen3next.convert FOLDER FOLDER --to hf",
}


def make(folder: Path) -> dict[str, int]:
    """The checkpoint, by the library: shards of about equal size. Its bytes, and those of its largest stacked leaf."""
    import numpy as np
    from safetensors.numpy import save_file

    from qwen3next.hf import table
    from qwen3next.hf_config import config_values
    from qwen3next.model import abstract_model

    model = abstract_model(CONFIG)
    leaves = list(table(model))
    dtypes = {
        leaf.path: np.dtype("float32" if leaf.path.endswith(("A_log", "dt_bias")) else CONFIG.dtype) for leaf in leaves
    }
    shapes = {name: (leaf.tensor_shape, dtypes[leaf.path]) for leaf in leaves for _, name in leaf.parts()}
    sizes = {leaf.path: int(np.prod(leaf.shape)) * dtypes[leaf.path].itemsize for leaf in leaves}
    total, done, weight_map, rng = sum(sizes.values()), 0, {}, np.random.default_rng(0)
    shard: dict[str, Any] = {}
    files = [f"model-{number + 1:05}-of-{SHARDS:05}.safetensors" for number in range(SHARDS)]
    for number, (name, (shape, dtype)) in enumerate(sorted(shapes.items()), 1):
        shard[name] = rng.standard_normal(shape, np.float32).astype(dtype)
        done += shard[name].nbytes
        if done >= total * (len(set(weight_map.values())) + 1) / SHARDS or number == len(shapes):
            file = files[len(set(weight_map.values()))]
            save_file(shard, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_values(CONFIG)))
    return {"bytes": total, "largest_leaf": max(sizes.values()), "tensors": len(shapes)}


def _peak() -> int:
    """Largest resident memory of this program, and not, as `getrusage` has it, of what started it too."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def measure(kind: str, folder: Path, out: Path) -> dict[str, float]:
    """Seconds and peak memory of one job, imports not counted."""
    import jax
    import numpy as np
    import safetensors.numpy
    from safetensors import safe_open

    from qwen3next.convert import convert, parse
    from qwen3next.hf import load_pretrained, save_pretrained

    jax.block_until_ready(jax.numpy.zeros(1))
    files, held = sorted(folder.glob("*.safetensors")), None
    if kind == "save_pretrained":
        held = load_pretrained(folder)
    if kind == "library writes":
        held = {file: safetensors.numpy.load_file(file) for file in files}
        out.mkdir()
    np.ones(sum(file.stat().st_size for file in files) + 10**9, np.uint8)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before, started = _peak(), time.perf_counter()
    if kind == "library reads":
        for file in files:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    tensors.get_tensor(name)
    elif kind == "library keeps":
        held = [safetensors.numpy.load_file(file) for file in files]
    elif kind == "load_pretrained":
        held = load_pretrained(folder)
    elif kind == "library writes":
        for file, arrays in held.items():
            safetensors.numpy.save_file(arrays, out / file.name)
    elif kind == "save_pretrained":
        save_pretrained(held, out, max_shard_size="300MB")
    elif kind == "to a run":
        convert(parse([str(folder), str(out)]))
    else:
        convert(parse([str(folder), str(out), "--to", "hf", "--max-shard-size", "300MB"]))
    return {"seconds": time.perf_counter() - started, "peak": _peak(), "before": before}


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    cpus = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = ("jax", "numpy", "safetensors")
    cores, kind = len(os.sched_getaffinity(0)), cpus[0] if cpus else platform.machine()
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{cores} cores, {kind}, {memory / 1e9:.0f} GB",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
    }


def run(*args: str) -> dict[str, Any]:
    """This script in a new process; the JSON of its last line."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, __file__, *args], env=env, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """The whole benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # a measurement, in its own process
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make or args.one:
        print(json.dumps(make(args.make) if args.make else measure(args.one[0], *map(Path, args.one[1:]))))
        return
    console, samples = Console(width=120, highlight=False), {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        folder.mkdir()
        made = run("--make", str(folder))
        for number in range(args.repeats * len(KINDS)):
            kind, out = list(KINDS)[number % len(KINDS)], Path(temporary) / f"out{number}"
            samples[kind].append(run("--one", kind, str(folder), str(out)))
            subprocess.run(["rm", "-rf", str(out)], check=True)
    report = machine() | {"checkpoint": made | {"shards": SHARDS}, "repeats": args.repeats, "samples": samples}
    size, leaf, versions = made["bytes"], made["largest_leaf"], report["versions"]
    console.print(f"{report['date']}, {report['machine']}; {', '.join(' '.join(item) for item in versions.items())}")
    console.print(f"checkpoint: {size / 1e9:.2f} GB, {made['tensors']:,} tensors in {SHARDS} shards, page cache warm")
    console.print(f"largest stacked leaf: {leaf / 1e9:.2f} GB; medians of {args.repeats}")
    shown = Table("job", "what", "seconds", "min-max", "MB/s", "peak MB", "peak - checkpoint MB")
    middle = {}
    for kind, found in samples.items():
        seconds = [sample["seconds"] for sample in found]
        middle[kind] = {key: statistics.median(sample[key] for sample in found) for key in ("seconds", "peak")}
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        speed, peak = size / middle[kind]["seconds"] / 1e6, middle[kind]["peak"]
        row = (
            f"{middle[kind]['seconds']:.2f}",
            spread,
            f"{speed:,.0f}",
            f"{peak / 1e6:,.0f}",
            f"{(peak - size) / 1e6:,.0f}",
        )
        shown.add_row(kind, KINDS[kind], *row)
    console.print(shown)
    for kind, words in (("library reads", "and keeps none (wanted: at most 2)"), ("library keeps", "and keeps it")):
        ratio = middle["load_pretrained"]["seconds"] / middle[kind]["seconds"]
        console.print(f"load_pretrained takes {ratio:.2f} x the time in which the library reads every tensor {words}")
    over = middle["load_pretrained"]["peak"] - size - leaf
    console.print(f"its peak is the checkpoint + the largest leaf {over / 1e6:+,.0f} MB (wanted: at most +300)")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
