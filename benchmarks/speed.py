"""Speed, side by side with what a user would pick instead: transformers' Qwen3-Next in torch.

python benchmarks/speed.py                                        # everything: about an hour on two cores
python benchmarks/speed.py train decode --repeats 9 --peer-python OTHER/bin/python
python benchmarks/speed.py start --config configs/tiny.toml

Each contestant is a process of its own, warmed up at least twice (what compiles does not count), and all of an item
take turns, so that a change in the machine's load meets all of them. Figures are medians. `peak` is the process's
largest resident memory, imports and compilation included. Both sides compute in float32 on the CPU. Gradients are those
of a weighted sum of the outputs. In `start` train.py also reads its text, which transformers does not; it uses no
Weights & Biases.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from comparisons import HERE, ITEMS, PEERS, Block, Contestant, Settings
from rich.console import Console
from rich.table import Table
from turns import Child, Facts, Failed

from qwen3next.cli import load_config
from qwen3next.errors import InputError, Parser, exit_on_input_error, require

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH", "")))),
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the process itself: no others are left over
}
_PROBE = "import torch, transformers; print(torch.__version__, transformers.__version__)"
_ABSENT = "-"
_COLUMNS = ("median", "min", "a step", "tokens/s", "peer/this", "goal", "this/bare", "peak MB")


def usable_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    usable = usable_cores()
    parser = Parser(prog="speed.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="*", metavar="ITEM", help=f"of {', '.join(ITEMS)}; default: all")
    parser.add_argument("--config", type=Path, default=HERE.parent / "configs" / "bench.toml")
    parser.add_argument("--repeats", type=int, default=5, help="of each contestant (default 5)")
    parser.add_argument("--peer-python", default=sys.executable, help="a Python with torch and transformers")
    parser.add_argument("--threads", type=int, default=len(usable), help=f"of each side (default {len(usable)})")
    parser.add_argument("--json", type=Path, default=Path("speed.json"), help="every repetition (default speed.json)")
    args = parser.parse_args(argv)
    for item in args.items:
        require(item in ITEMS, f"item {item!r} is unknown; allowed: {', '.join(ITEMS)}")
    require(args.repeats > 0, f"--repeats is {args.repeats}; it must be above 0")
    require(0 < args.threads <= len(usable), f"--threads is {args.threads}; it must be 1 to {len(usable)}")
    require(args.json.absolute().parent.is_dir(), f"--json {args.json}: there is no such folder to write to")
    return args


def limit_threads(threads: int) -> None:
    """Confines this process and those it starts to so many cores, which is how XLA is told."""
    if not hasattr(os, "sched_setaffinity"):
        require(
            threads == len(usable_cores()), f"--threads {threads}: this system cannot confine a process to some cores"
        )
        return
    os.sched_setaffinity(0, usable_cores()[:threads])


def peer_versions(python: str) -> dict[str, str]:
    """Versions of torch and transformers. Raises `InputError` where they cannot be imported."""
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, env=os.environ | _ENVIRONMENT)
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    except OSError as error:
        raise InputError(f"{python}: {error.strerror}") from error
    require(done.returncode == 0, f"{python}: {said}")
    return dict(zip(("torch", "transformers"), done.stdout.split(), strict=True))


def machine(threads: int, versions: dict[str, str]) -> Facts:
    """Where and with what this is measured."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    kinds = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    own = {"Python": platform.python_version()} | {name: version(name) for name in ("jax", "jaxlib", "equinox")}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": kinds[0] if kinds else platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "versions": own | versions,
    }


def measure(block: Block, settings: Settings, repeats: int, peers: bool) -> list[Facts]:
    """A row a contestant, with every repetition; `error` is there if it failed, and says how."""
    with ExitStack() as stack:

        def begin(contestant: Contestant) -> Child:
            print(f"{block.title}: {contestant.name} warms up", file=sys.stderr, flush=True)
            python = settings.peer_python if contestant.script == PEERS else sys.executable
            child = stack.enter_context(Child([python, contestant.script], contestant.spec, _ENVIRONMENT))
            child.answer()
            return child

        children = dict[int, Child]()
        rows = [
            {"name": c.name, "side": c.side, "tokens": c.tokens, "goal": c.goal, "repetitions": []}
            for c in block.contestants
        ]
        for contestant in block.before:
            try:
                begin(contestant).ask("end")
            except Failed as error:
                return [row | {"error": f"{contestant.name}: {error}"} for row in rows]
        for number, contestant in enumerate(block.contestants):
            if contestant.side == "peer" and not peers:
                rows[number]["error"] = _ABSENT
                continue
            try:
                children[number] = begin(contestant)
            except Failed as error:
                rows[number]["error"] = str(error)
        for word in [*["go"] * repeats, "end"]:
            for number, child in list(children.items()):
                try:
                    answer = child.ask(word)
                except Failed as error:
                    rows[number]["error"] = str(error)
                    del children[number]
                    continue
                if word == "go":
                    rows[number]["repetitions"].append(answer)
                else:
                    rows[number] |= answer
    return [row if "error" in row else summarised(row) for row in rows]


def summarised(row: Facts) -> Facts:
    """With median and minimum. A repetition that tells the memory of another process counts more than the child's."""
    repetitions = row["repetitions"]
    seconds = [repetition["seconds"] for repetition in repetitions]
    row |= {"seconds": statistics.median(seconds), "minimum": min(seconds)}
    peaks = [repetition["peak"] for repetition in repetitions if "peak" in repetition]
    return row | ({"peak": max(peaks)} if peaks else {})


def duration(seconds: float) -> str:
    """Three digits or more, in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.{2 if seconds < 10 * size else 1 if seconds < 100 * size else 0}f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def label(row: Facts) -> str:
    """A row's name, and what a bound was worked out from."""
    facts = row["repetitions"][-1] if row["repetitions"] else {}
    if "flops" in facts:
        return f"{row['name']}: {facts['flops'] / 1e9:.1f} GFLOP"
    if "bytes" in facts:
        speed = statistics.median(repetition["bytes_per_second"] for repetition in row["repetitions"])
        return f"{row['name']}: {facts['bytes'] / 1e6:.0f} MB, {speed / 1e9:.1f} GB/s"
    return row["name"]


def against_goal(goal: float | None, reached: float | None) -> str:
    """A goal, and by how much it is missed."""
    if goal is None:
        return ""
    return f"{goal:g}" if reached is None or reached >= goal else f"{goal:g} ({reached / goal - 1:.1%})"


def add_rows(table: Table, block: Facts) -> None:
    """A block of the table."""
    table.add_row(f"[bold]{block['title']}")
    done = [row for row in block["rows"] if "error" not in row]
    peer = min((row["seconds"] for row in done if row["side"] == "peer"), default=None)
    bound = next((row["seconds"] for row in done if row["side"] == "bound"), None)
    for row in block["rows"]:
        if "error" in row:
            absent = row["error"] == _ABSENT
            table.add_row(
                f"  {row['name']}{'' if absent else ': ' + row['error']}", *[_ABSENT] * len(_COLUMNS), style="dim"
            )
            continue
        seconds, ours, bare = row["seconds"], row["side"] == "ours", row["side"] == "bound"
        table.add_row(
            f"  {label(row)}",
            duration(seconds),
            duration(row["minimum"]),
            duration(seconds / block["steps"]) if block["steps"] > 1 else "",
            f"{row['tokens'] / seconds:,.0f}" if row["tokens"] and not bare else "",
            f"{peer / seconds:.2f}" if ours and peer else _ABSENT if ours else "",
            against_goal(row["goal"], peer and peer / seconds),
            f"{seconds / bound:.2f}" if bound and not bare else "",
            "" if bare else f"{row['peak'] / 1e6:,.0f}",
        )
    table.add_section()


def show(report: Facts, console: Console) -> None:
    """The table of all that was measured."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    where = f"{report['date']}, {report['machine']}, {report['cores']} cores, {report['threads']} threads"
    table = Table(
        title=f"{where}\n{versions}\n{report['config']}; medians of {report['repeats']}, contestants in turn",
        caption="peer/this: above 1, this is faster than the fastest peer, and goal is what it should be, with what is "
        "missing. this/bare: the same work, bare, is 1.",
    )
    table.add_column("", max_width=64)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for block in report["blocks"]:
        add_rows(table, block)
    console.print(table)


def main(argv: Sequence[str]) -> None:
    """The whole command. What was measured before an interruption is shown, and kept."""
    args = parse(argv)
    config = load_config(args.config)
    limit_threads(args.threads)
    try:
        versions = peer_versions(args.peer_python)
    except InputError as error:
        needed = "needed: pip install torch transformers, and --peer-python if that is another Python"
        print(f"peers are left out: {error}; {needed}", file=sys.stderr)
        versions = dict[str, str]()
    report = machine(args.threads, versions) | {"config": str(args.config), "repeats": args.repeats, "blocks": []}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that contestants are ended
    with tempfile.TemporaryDirectory(prefix="speed-") as folder:
        settings = Settings(args.config.resolve(), config, args.threads, args.peer_python, Path(folder))
        try:
            for item in dict.fromkeys(args.items or ITEMS):
                for block in ITEMS[item](settings):
                    rows = measure(block, settings, args.repeats, bool(versions))
                    report["blocks"].append({"item": item, "title": block.title, "steps": block.steps, "rows": rows})
                    args.json.write_text(json.dumps(report, indent=2) + "\n")
        finally:
            if report["blocks"]:
                show(report, Console(width=None if sys.stdout.isatty() else 140, highlight=False))


if __name__ == "__main__":
    with exit_on_input_error():
        try:
            main(sys.argv[1:])
        except KeyboardInterrupt:
            sys.exit(130)
