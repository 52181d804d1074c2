"""What each choice of rematerialisation costs, before a run: memory, FLOPs, time to compile and, on request, to run.

python ablate.py configs/tiny.toml                                           # twelve choices, compiled for this machine
python ablate.py configs/tiny.toml --remat none layer layer/dots --batch 4 8 --length 512 --run 3
python ablate.py configs/qwen3_next_80b_a3b.toml --topology v5p-256 --remat layer both --budget 95GB
"""

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from qwen3next.ablation import Facts, Request
from qwen3next.ablation_table import can_draw, draw, fitting, relate, show, twins, write_csv
from qwen3next.child import ask
from qwen3next.cli import dump_config, parse
from qwen3next.config import TrainConfig
from qwen3next.errors import InputError, Parser, exit_on_input_error, require
from qwen3next.remat import MIXERS, MLPS, WORDS, Remat
from qwen3next.tpu import require_tpu_extra, topology_name

CHOICES = (
    "none",
    "block",
    "layer",
    "both",
    "layer/no-barrier",
    "both/no-barrier",
    "layer/dots",
    "layer/everything",
    "layer/names:mixer_out",
    "layer/names:qkvz_proj,conv_out,delta_out,q_proj,k_proj,v_proj,attention_out",
    "linear_attention",
    "moe",
)
UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
EPILOG = "Besides, every --section.key VALUE of train.py overrides the config."


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of this script, and the rest, which are the config's."""
    parser = Parser("ablate.py", description=str(__doc__).splitlines()[0], epilog=EPILOG, allow_abbrev=False)
    several: dict[str, Any] = {"action": "extend", "nargs": "+"}
    parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument("--remat", **several, metavar="CHOICE", help="placement/policy, as for --compute.remat")
    parser.add_argument("--batch", **several, metavar="ROWS", help="rows of one device; by default the config's")
    parser.add_argument("--length", **several, metavar="TOKENS", help="tokens of a row; by default the config's")
    parser.add_argument("--baseline", metavar="CHOICE", help="what the others are compared with; by default the first")
    parser.add_argument("--run", type=int, default=0, metavar="N", help="steps to run as well, after one that warms up")
    parser.add_argument("--topology", metavar="NAME", help="compile for a TPU, such as v5p-256 or v5e:4x4, on this CPU")
    parser.add_argument("--full-compile", action="store_true", help="for a TPU also generate code, which takes minutes")
    parser.add_argument("--budget", metavar="BYTES", help="memory of a device, such as 16GB: name the choice that fits")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="by default ablations/NAME of the config")
    parser.add_argument("--picture", action="store_true", help="fail without matplotlib, which ablation.png needs")
    return parser.parse_known_args(argv)


def split_choices(texts: list[str] | None) -> list[Remat]:
    """Choices from lists with spaces or commas between them; a comma within a list of names is not between choices."""
    words = "|".join((*WORDS, *MIXERS, *MLPS))
    parts = [part for text in texts or CHOICES for part in re.split(rf",?\s+|,(?=(?:{words})(?:[+/,]|$))", text)]
    return list(dict.fromkeys(Remat.of(part) for part in parts if part))


def split_numbers(flag: str, texts: list[str]) -> list[int]:
    """Numbers above 0 from lists with spaces or commas between them."""
    parts = [part for text in texts for part in re.split(r"[,\s]+", text) if part]
    for part in parts:
        require(part.isdecimal() and int(part) > 0, f"{flag} {part!r} is not a whole number above 0")
    return list(dict.fromkeys(map(int, parts)))


def parse_bytes(text: str) -> int:
    """`16GB`, `16GiB`, `500 MB` or plain bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?b|)", text.strip().lower())
    require(found is not None, f"--budget {text!r} is not an amount of memory, such as 16GB or 16GiB")
    assert found
    return int(float(found[1]) * UNITS[found[2]])


class Reporter:
    """A progress bar on a terminal, a line a row elsewhere; both with the time that is left."""

    def __init__(self, console: Console, total: int):
        self._console, self._total, self._started, self._done = console, total, time.perf_counter(), 0
        columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.bar.add_task("", total=total)

    def begin(self, name: str) -> None:
        """A row begins."""
        self.bar.update(self._task, description=f"{name}{self._left()}")

    def end(self, name: str, row: Facts) -> None:
        """A row has ended."""
        self._done += 1
        self.bar.update(self._task, completed=self._done)
        told = f"failed: {row['error']}" if "error" in row else f"{row['seconds']:.0f} s"
        self._console.print(f"{self._done}/{self._total}  {name}  {told}{self._left()}", markup=False, soft_wrap=True)

    def _left(self) -> str:
        if not self._done:
            return ""
        left = (time.perf_counter() - self._started) / self._done * (self._total - self._done)
        return f", {left / 60:.1f} min left" if left else ""


def main(argv: list[str]) -> int:
    """The ablation; 0 if a row succeeded, 1 if none did, 130 after Ctrl-C."""
    # --- arguments ----------------------------------------------------------------------------------------------------
    arguments, overrides = parse_arguments(argv[1:])
    clashing = [flag for flag in overrides if flag.startswith("--compute.remat")]
    require(not clashing, f"{' '.join(clashing)}: the choices to compare are given by --remat")
    config = parse([argv[0], arguments.config, *overrides])
    choices = split_choices(arguments.remat)
    batches: list[int | None] = [None]
    if arguments.batch:
        batches = [*split_numbers("--batch", arguments.batch)]
    lengths = split_numbers("--length", arguments.length or [str(config.data.sequence_length)])
    baseline = str(Remat.of(arguments.baseline)) if arguments.baseline else str(choices[0])
    budget = parse_bytes(arguments.budget) if arguments.budget else None
    parts = config.run.accumulate
    for batch in batches:
        require(not batch or batch % parts == 0, f"--batch {batch} must be a multiple of run.accumulate, {parts}")
    require(baseline in map(str, choices), f"--baseline {baseline} is not among the choices")
    require(arguments.run >= 0, f"--run is {arguments.run}; it must not be negative")
    require(can_draw() or not arguments.picture, "--picture needs matplotlib: pip install -e '.[plots]'")
    if arguments.topology:
        require(not arguments.run, "--run needs a machine that is there; --topology compiles for one that is not")
        require_tpu_extra()
        topology_name(arguments.topology)

    # --- rows ---------------------------------------------------------------------------------------------------------
    out = arguments.out or Path("ablations") / Path(arguments.config).stem
    try:
        out.mkdir(parents=True, exist_ok=True)
        lines = (out / "rows.jsonl").open("a", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {out} cannot be written ({error})") from error
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 140
    grid = [(batch, length, choice) for batch in batches for length in lengths for choice in choices]
    default = "default" if arguments.topology else config.data.batch_size
    reporter, rows, plain_flops = Reporter(console, len(grid)), list[Facts](), dict[tuple[int | None, int], int]()
    digest = hashlib.sha256(dump_config(config).encode()).hexdigest()[:16]
    interrupted = False
    try:
        with lines, reporter.bar:
            for batch, length, choice in grid:
                name, started = f"{choice}, {batch or default} x {length}", time.perf_counter()
                reporter.begin(name)
                request = make_request(config, choice, batch, length, arguments, plain_flops.get((batch, length)))
                row: Facts = {"choice": str(choice), "batch": batch, "length": length, "config": digest}
                row["time"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                row |= ask(request, full_compile=arguments.full_compile)
                row["seconds"] = time.perf_counter() - started
                if "plain_flops" in row:
                    plain_flops[batch, length] = row["plain_flops"]
                rows.append(row)
                lines.write(json.dumps(row) + "\n")
                lines.flush()
                reporter.end(name, row)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        rows = relate(rows, baseline)
        if rows:
            (out / "ablation.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            write_csv(rows, out / "ablation.csv")

    # --- table --------------------------------------------------------------------------------------------------------
    if rows:
        show(rows, console)
    said = [*twins(rows), *(fitting(rows, budget) if budget is not None else [])]
    if arguments.topology and not arguments.full_compile:
        said.append("peaks are without generated code; --full-compile waits for it")
    if any(row.get("peak") is not None for row in rows) and can_draw():
        draw(rows, out / "ablation.png")
    elif not can_draw():
        said.append("no picture: it needs matplotlib, pip install -e '.[plots]'")
    said.append(f"{'interrupted after' if interrupted else 'wrote'} {len(rows)} of {len(grid)} rows: {out}")
    for line in said:
        console.print(line, markup=False, soft_wrap=True)
    return 130 if interrupted else 0 if any("error" not in row for row in rows) else 1


def make_request(
    config: TrainConfig,
    remat: Remat,
    batch: int | None,
    length: int,
    arguments: argparse.Namespace,
    plain_flops: int | None,
) -> Request:
    """A row's config and what is wanted of it."""
    compute = dataclasses.replace(config.compute, remat=remat)
    data = dataclasses.replace(config.data, sequence_length=length)
    text = dump_config(dataclasses.replace(config, compute=compute, data=data))
    return Request(text, batch, arguments.topology, arguments.run, plain_flops)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with exit_on_input_error(), contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv))
