"""TPUs that are not there: names of machines, and what a compilation for one has told before it ends.

The compiler assigns buffers within a minute and generates code for many. `XLA_FLAGS` make it write the assignment to a
folder. Arguments, outputs and aliases in it are those of `Compiled.memory_analysis`; temporaries there are larger by
what code generation adds, 37 of 163 MB and 68 of 696 MB for `tiny` on four v5e chips.
"""

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from jax.experimental.topologies import get_topology_desc

from qwen3next.errors import InputError, require

# Machines with the names they are rented under. v4 and v5p count cores, two a chip.
_CORES = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8", 1024: "8x8x8"}
_CHIPS = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_MACHINES: dict[str, tuple[str, dict[int, str]]] = {
    "v4": ("v4", _CORES),
    "v5p": ("v5", _CORES),
    "v5e": ("v5e", _CHIPS),
    "v6e": ("v6e", _CHIPS),
}
_MEGACORE: dict[str, Any] = {
    "chip_config_name": "megacore",  # a chip's two cores are one device
    "chips_per_host_bounds": (2, 2, 1),
    "num_slices": 1,
}
_LARGEST = 5  # buffers that a row names
_HOPS = 4

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (color \d+, )?page \d+, (.*?):?$")
_SOURCE = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = .*?op_name=\"([^\"]*)\"", re.M)
_OPERAND = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = .*? [\w-]+\(%([\w.-]+)", re.M)
_VALUE = re.compile(r"^ value: <\d+ ([\w.-]+)\S* .*\(size=(\d+),offset=(\d+)\): (\S+?)(?:\{|$)")


def require_tpu_extra() -> None:
    """`InputError` that names the extra, if the TPU compiler is not installed."""
    require(
        importlib.util.find_spec("libtpu") is not None,
        "--topology needs the TPU compiler: pip install -e '.[tpu]'",
    )


def topology_name(name: str) -> tuple[str, dict[str, Any]]:
    """JAX's name for a machine like `v5p-256`, and its settings; any other name is taken for JAX's own.

    Raises `InputError` for a size that a kind of machine does not come in.
    """
    kind, dash, size = name.partition("-")
    if not dash or kind not in _MACHINES:
        return name, _MEGACORE if re.match("v(4|5):", name) else {}
    generation, sizes = _MACHINES[kind]
    known = {str(number): shape for number, shape in sizes.items()}
    require(size in known, f"topology {name!r} is unknown; {kind} comes as {', '.join(f'{kind}-{n}' for n in sizes)}")
    return f"{generation}:{known[size]}", _MEGACORE if sizes is _CORES else {}


def topology_devices(name: str) -> list[Any]:
    """The devices of a machine that need not be there. Raises `InputError` for one that the compiler does not know."""
    require_tpu_extra()
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    full, settings = topology_name(name)
    try:
        return list(get_topology_desc(platform="tpu", topology_name=full, **settings).devices)
    except Exception as error:
        machines = ", ".join(f"{kind}-{size}" for kind, (_, sizes) in _MACHINES.items() for size in sizes)
        told = str(error).strip().splitlines()[0]
        raise InputError(
            f"topology {name!r} is unknown ({told}); allowed: {machines}, or v5e:4x4 and the like"
        ) from error


def compile_environment(dump: Path) -> dict[str, str]:
    """The variables of a process that compiles for a TPU on a plain CPU and writes its buffers to the folder `dump`."""
    flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*step.*"
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # no machine to ask what it is
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
    }


def dumped_files(dump: Path) -> tuple[Path, Path] | None:
    """The buffer assignment and the program that it is for, once both are there; they may not be complete yet."""
    buffers = next(dump.glob("*.after_optimizations-buffer-assignment.txt"), None)
    program = next(dump.glob("*.after_optimizations.txt"), None)
    return (buffers, program) if buffers and program else None


def read_buffers(assignment: str, program: str) -> dict[str, Any]:
    """Bytes of one device's main memory by use, and its largest temporaries: bytes, shape, operation.

    Raises `ValueError` for a text in which no temporaries are found.
    """
    sums, inside = dict.fromkeys(("temporaries", "arguments", "outputs", "aliased"), 0), False
    places: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for line in assignment.splitlines():
        if found := _ALLOCATION.match(line):
            size, color, kind = int(found[1]), found[2], found[3]
            argument, output = kind.startswith("parameter"), "maybe-live-out" in kind
            inside = kind.startswith("preallocated-temp") and not color  # colors are memories inside the chip
            sums["temporaries"] += size * inside
            sums["arguments"] += size * (argument and not color)
            sums["outputs"] += size * (output and not color)
            sums["aliased"] += size * (argument and output and not color)
        elif inside and (found := _VALUE.match(line)):
            places.setdefault((int(found[2]), int(found[3])), []).append((found[1], found[4]))
    if not sums["temporaries"]:
        raise ValueError("no temporaries in the compiler's buffer assignment; its format may have changed")
    sources, operands = dict(_SOURCE.findall(program)), dict(_OPERAND.findall(program))
    largest = []
    for (size, _), values in sorted(places.items(), reverse=True)[:_LARGEST]:
        name, shape = next((value for value in values if value[0] in sources), values[0])
        for _ in range(_HOPS):  # a copy has no source but what it copies
            name = name if name in sources else operands.get(name, name)
        largest.append({"bytes": size, "shape": shape, "operation": sources.get(name, name)})
    return sums | {"largest": largest}
