"""An ablation's rows side by side: what they say of each other, as tables for a console, as CSV and as a picture."""

import csv
import importlib
import importlib.util
import json
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from qwen3next.ablation import Facts
from qwen3next.errors import require
from qwen3next.progress import human_bytes

COMPARED = (
    "temporaries",
    "arguments",
    "outputs",
    "aliased",
    "code",
    "peak",
    "flops",
    "network",
    "compile_seconds",
    "step_seconds",
)
_MISSING = "n/a"
_WRAPPED = ("choice", "kept")
_NARROWEST = 24  # characters that a wrapped column needs
_MARKS = "os^Dv<>PX*hd"
_NAMED = 4  # kept values that a row names


def _place(row: Facts) -> tuple[int | None, int]:
    return row.get("batch"), row["length"]


def relate(rows: list[Facts], baseline: str) -> list[Facts]:
    """The rows, each with `relative`: its figures over those of the `baseline` choice for the same batch and length.

    With losses, `loss_difference` is the largest one to the baseline's, in nats a token.
    """
    bases = {_place(row): row for row in rows if row["choice"] == baseline}
    related = []
    for row in rows:
        base = bases.get(_place(row), {})
        relative = {name: row[name] / base[name] for name in COMPARED if row.get(name) and base.get(name)}
        losses = zip(row.get("losses", ()), base.get("losses", ()), strict=False)
        related.append(row | {"relative": relative})
        if differences := [abs(a - b) for a, b in losses]:
            related[-1]["loss_difference"] = max(differences)
    return related


def twins(rows: list[Facts]) -> list[str]:
    """A line for each choice that costs to the byte what an earlier one costs: it may have changed nothing."""
    seen: dict[tuple[Any, ...], str] = {}
    lines = []
    for row in rows:
        if row.get("temporaries") is not None:
            figures = (*_place(row), *(row.get(name) for name in ("temporaries", "outputs", "flops")))
            first = seen.setdefault(figures, row["choice"])
            if first != row["choice"]:
                lines.append(f"warning: {row['choice']} costs exactly what {first} does; it may have changed nothing")
    return lines


def fitting(rows: list[Facts], budget: int) -> list[str]:
    """For each batch and length a line: the choice of least FLOPs, then least memory, with a peak of at most `budget`
    bytes; or how much the smallest is above it."""
    groups: dict[tuple[int | None, int], list[Facts]] = {}
    for row in rows:
        if row.get("peak") is not None:
            groups.setdefault(_place(row), []).append(row)
    lines = []
    for (batch, length), group in groups.items():
        start = f"budget {human_bytes(budget)}, {batch} x {length}:"
        if fit := [row for row in group if row["peak"] <= budget]:
            best = min(fit, key=lambda row: (row["flops"], row["peak"]))
            lines.append(
                f"{start} {best['choice']} is the cheapest that fits, peak {human_bytes(best['peak'])}, "
                f"{best['recompute']:.1%} recomputed"
            )
        else:
            best = min(group, key=lambda row: row["peak"])
            needs, above = human_bytes(best["peak"]), human_bytes(best["peak"] - budget)
            lines.append(
                f"{start} none of {len(group)} fits; the smallest, {best['choice']}, needs {needs}, {above} more"
            )
    return lines or [f"budget {human_bytes(budget)}: no choice has a known peak"]


class _Column(NamedTuple):
    heading: str
    text: Callable[[Facts], str]
    rank: int  # the highest goes first where the console is too narrow; 0 stays


def _figure(name: str, form: Callable[[Any], str], relative: bool = False) -> Callable[[Facts], str]:
    def text(row: Facts) -> str:
        value = row.get(name)
        if value is None:
            return "failed" if "error" in row else _MISSING
        ratio = row.get("relative", {}).get(name) if relative else None
        return form(value) + (f" {ratio:.2f}x" if ratio else "")

    return text


_COLUMNS = (
    _Column("choice", lambda row: row["choice"], 0),
    _Column("rows x length", lambda row: f"{row.get('batch') or '?'} x {row['length']}", 0),
    _Column("temporaries", _figure("temporaries", human_bytes, True), 0),
    _Column("peak", _figure("peak", human_bytes, True), 1),
    _Column("recompute", _figure("recompute", lambda value: f"{value:+.1%}"), 0),
    _Column("step", _figure("step_seconds", lambda value: f"{value:.3f} s", True), 2),
    _Column("loss differs", _figure("loss_difference", lambda value: f"{value:.1e}"), 3),
    _Column("network", _figure("network", human_bytes, True), 4),
    _Column("FLOPs", _figure("flops", lambda value: f"{value:.3g}"), 6),
    _Column("units", _figure("regions", str), 5),
    _Column("compile", _figure("compile_seconds", lambda value: f"{value:.0f} s"), 7),
    _Column("arguments", _figure("arguments", human_bytes), 9),
    _Column("outputs", _figure("outputs", human_bytes), 11),
    _Column("aliased", _figure("aliased", human_bytes), 10),
    _Column("code", _figure("code", human_bytes), 8),
    _Column("host", _figure("host_temporaries", human_bytes), 12),
)


def _table(title: str, columns: Iterable[_Column], rows: list[Facts], console: Console) -> Table:
    """The table, less columns that no row has a figure for, and of the rest less those of highest rank until it fits.

    Where even that does not fit, names of choices and what is kept are broken over lines.
    """
    shown = [c for c in columns if c.rank == 0 or any(c.text(row) not in (_MISSING, "failed") for row in rows)]
    cells = {c.heading: [c.heading, *(c.text(row) for row in rows)] for c in shown}
    widths = {heading: max(map(len, texts)) + 2 for heading, texts in cells.items()}
    widths |= {heading: min(widths[heading], _NARROWEST) for heading in _WRAPPED if heading in widths}
    for column in sorted(shown, key=lambda column: -column.rank):
        if column.rank and sum(widths[c.heading] for c in shown) > console.width:
            shown.remove(column)
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for column in shown:
        wrapped = column.heading in _WRAPPED
        left = wrapped or column.heading == "layer"
        table.add_column(column.heading, justify="left" if left else "right", overflow="fold", no_wrap=not wrapped)
    for line in zip(*(cells[column.heading][1:] for column in shown), strict=True):
        table.add_row(*line)
    return table


def _kept(row: Facts) -> list[Facts]:
    """What a layer of each kind keeps: bytes in all, and by name, the largest first."""
    lines = []
    for kind, values in row.get("saved", {}).items():
        sums: dict[str, int] = {}
        for value in values:
            sums[value["name"]] = sums.get(value["name"], 0) + value["bytes"]
        named = sorted(sums.items(), key=lambda item: -item[1])
        kept = ", ".join(f"{name} {human_bytes(size)}" for name, size in named[:_NAMED])
        kept += f", {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        lines.append(row | {"layer": kind, "bytes": sum(sums.values()), "kept": kept})
    return lines


def show(rows: list[Facts], console: Console) -> None:
    """Tables of what the choices cost, what they keep, and of their losses; then failures, largest buffers, network."""
    console.print(_table("cost of one device's step", _COLUMNS, rows, console))
    kept = [line for row in rows for line in _kept(row)]
    columns = (
        *_COLUMNS[:2],
        _Column("layer", lambda line: line["layer"], 0),
        _Column("bytes", lambda line: human_bytes(line["bytes"]), 0),
        _Column("kept", lambda line: line["kept"], 0),
    )
    if kept:
        console.print(_table("\nkept of one layer for the backward pass", columns, kept, console))
    steps = max((len(row.get("losses", ())) for row in rows), default=0)
    if steps:
        ran = [row for row in rows if row.get("losses")]
        losses = [
            _Column(f"step {step + 1}", lambda row, step=step: f"{row['losses'][step]:.6f}", steps - step)
            for step in range(steps)
        ]
        console.print(_table("\nlosses, nats a token", (*_COLUMNS[:2], *losses), ran, console))
    for row in rows:
        start = f"{row['choice']}, {row.get('batch') or '?'} x {row['length']}"
        if "error" in row:
            console.print(f"failed: {start}: {row['error']}", markup=False)
        if row.get("largest"):
            console.print(f"largest temporaries of {start}:", markup=False)
        for buffer in row.get("largest", ()):
            text = f"  {human_bytes(buffer['bytes'])} {buffer['shape']} {buffer['operation']}"
            console.print(text, markup=False, overflow="ellipsis", no_wrap=True)
        if row.get("collectives"):
            console.print(f"received over the network in a step of {start}:", markup=False)
        for collective in row.get("collectives", ()):
            text = f"  {human_bytes(collective['bytes'])} by {collective['count']} x {collective['kind']}"
            if collective["open_loops"]:
                text += f" at least ({collective['open_loops']} loops of unknown length, each counted once)"
            text += f", most for {collective['operations'][0]}"
            console.print(text, markup=False, overflow="ellipsis", no_wrap=True)


def write_csv(rows: list[Facts], path: Path) -> None:
    """One line a row, the union of their fields; lists and tables as JSON; what is not known is empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(names)
        for row in rows:
            values = (row.get(name) for name in names)
            lines.writerow([json.dumps(v) if isinstance(v, (dict, list)) else "" if v is None else v for v in values])


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(rows: list[Facts], path: Path) -> None:
    """Peak memory against recomputed FLOPs, a labelled mark for each choice. `InputError` without matplotlib."""
    require(can_draw(), "a picture needs matplotlib: pip install -e '.[plots]'")
    importlib.import_module("matplotlib").use("Agg")
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(figsize=(11, 6))
    known = [row for row in rows if row.get("peak") is not None]
    for number, row in enumerate(known):
        look = {"marker": _MARKS[number % len(_MARKS)], "s": 90, "alpha": 0.7, "color": f"C{number % 10}"}
        label = textwrap.shorten(row["choice"].replace(",", ", "), 40, placeholder=" ..")
        place = f"{row['batch']} x {row['length']}"
        axes.scatter(100 * row["recompute"], row["peak"] / 1e9, label=f"{label}, {place}", **look)
    peaks = [row["peak"] for row in known]
    if peaks and max(peaks) > 10 * min(peaks):
        axes.set_yscale("log")
    axes.set(xlabel="FLOPs computed again, % of a step without rematerialisation", ylabel="peak memory of a device, GB")
    axes.legend(title="choice, rows x length", loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=150, bbox_inches="tight")
