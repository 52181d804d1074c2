"""What the devices send each other in a step, counted in the text of the compiled program.

The compiler decides that, not the source: it joins collectives, drops some, and for a TPU it makes an all-gather over
many devices an all-reduce of an array that is zero outside the device's slice, which sends twice as much.
"""

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_WHOLE = ("collective-permute", "collective-broadcast")  # a device receives all of it
_HOPS = 4  # from an instruction to what it works on, and on
_NAMED = 3  # operations that a kind names

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,<=]*)\]")
_OPERAND = re.compile(r"%([\w.-]+)(?:#(\d+))?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|condition|body|branch_computations|true_computation|false_computation|called_computations)="
    r"(\{[^}]*\}|%[\w.-]+)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CONTINUED = re.compile(r'"flag_start":"(?!-1")')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)+)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")


@dataclass(frozen=True)
class Collective:
    """All collectives of a kind in one step of one device."""

    kind: str
    count: int  # executions
    bytes: int  # that a device receives, all executions together
    operations: list[str]  # the source operations that receive most, the largest first
    open_loops: int  # loops of unknown length that hold some of them; each is counted as if it ran once


def count_collectives(program: str) -> list[Collective]:
    """The collectives of a compiled program's text, by kind, those that receive most first.

    Bytes of an execution in a group of n devices, of operands and results of one device, all of a tuple together:

    - all-gather: result * (n - 1) / n; reduce-scatter: operand * (n - 1) / n
    - all-reduce: 2 * operand * (n - 1) / n, as a reduce-scatter and an all-gather of its sums
    - all-to-all: operand * (n - 1) / n; ragged-all-to-all: at most that of its result
    - collective-permute, collective-broadcast: operand

    That is what the best algorithms on a ring receive; how far it travels is not counted. Groups of one device are left
    out. Of a conditional the branch that receives most is taken. Raises `ValueError` for a text without a program.
    """
    found = _Program(program).executions()
    collectives = []
    for kind in dict.fromkeys(execution.kind for execution in found):
        same = [execution for execution in found if execution.kind == kind]
        sums: dict[str, int] = {}
        for execution in same:
            sums[execution.operation] = sums.get(execution.operation, 0) + execution.bytes * execution.times
        collectives.append(
            Collective(
                kind,
                sum(execution.times for execution in same),
                sum(sums.values()),
                sorted(sums, key=lambda name: -sums[name])[:_NAMED],
                len(frozenset().union(*(execution.open_loops for execution in same))),
            )
        )
    return sorted(collectives, key=lambda collective: -collective.bytes)


def network_facts(program: str) -> dict[str, Any]:
    """What a row tells of a compiled program's collectives: `network`, the bytes of all, and them by kind."""
    collectives = count_collectives(program)
    return {
        "network": sum(collective.bytes for collective in collectives),
        "collectives": [asdict(collective) for collective in collectives],
    }


class _Instruction(NamedTuple):
    shape: str
    opcode: str
    rest: str  # operands and attributes

    def operands(self) -> list[tuple[str, str]]:
        """Name and, where it is part of a tuple, index."""
        return _OPERAND.findall(self.rest.split("), ", 1)[0])

    def called(self) -> list[str]:
        return [name for names in _CALLED.findall(self.rest) for name in re.findall(r"[\w.-]+", names)]


class _Execution(NamedTuple):
    kind: str
    operation: str
    bytes: int  # of one
    times: int
    open_loops: frozenset[str]


_NOTHING = _Instruction("", "", "")


class _Program:
    def __init__(self, text: str):
        self._computations: dict[str, list[str]] = {}
        self._roots: dict[str, str] = {}
        self._instructions: dict[str, _Instruction] = {}
        self._entry, name = "", ""
        for line in text.splitlines():
            if found := _INSTRUCTION.match(line):
                self._instructions[found[2]] = _Instruction(found[3], found[4], found[5])
                self._computations.setdefault(name, []).append(found[2])
                if found[1]:
                    self._roots[name] = found[2]
            elif found := _COMPUTATION.match(line):
                name = found[2]
                self._entry = name if found[1] else self._entry
        if not self._entry:
            raise ValueError("no computation of the compiler's program is its entry; its format may have changed")
        self._devices = math.prod(int(number) for number in _DEVICES.findall(text.lstrip().split("\n", 1)[0]))

    def executions(self, computation: str = "", source: str = "") -> list[_Execution]:
        """What a computation, by default the entry, and all it calls execute; `source`: the operation that calls it."""
        computation, found = computation or self._entry, list[_Execution]()
        for name in self._computations.get(computation, ()):
            instruction = self._instructions[name]
            operation = self._operation(name, source)
            if instruction.opcode.removesuffix("-start") in _KINDS:
                found += self._execution(computation, instruction, operation)
            elif not instruction.opcode.endswith(("-done", "-update")):  # they name what their start has called
                inside = [self.executions(called, operation) for called in instruction.called()]
                if instruction.opcode == "conditional":
                    inside = [max(inside, key=lambda parts: sum(part.times * part.bytes for part in parts), default=[])]
                parts = [part for parts in inside for part in parts]
                if instruction.opcode == "while":
                    known = self._trips(instruction)
                    trips, open_loops = (1, {name}) if known is None else (known, set[str]())
                    parts = [
                        part._replace(times=part.times * trips, open_loops=part.open_loops | open_loops)
                        for part in parts
                    ]
                found += parts
        return found

    def _execution(self, computation: str, instruction: _Instruction, operation: str) -> list[_Execution]:
        """One execution of a collective; none in a group of one device.

        A TPU begins a collective in one fusion and moves it on in others, each with a copy: only the first counts.
        """
        kind, shape, devices = instruction.opcode, instruction.shape, self._group_size(instruction.rest)
        if devices == 1 or _CONTINUED.search(instruction.rest):
            return []
        if kind.endswith("-start"):
            kind, parts = kind.removesuffix("-start"), _tuple_parts(shape)
            if len(parts) > 1 and (kind != "all-reduce" or parts[0].startswith("(")):
                shape = parts[1]  # of operands, results and what else a start gives
        size = _shape_bytes(shape)
        if kind == "reduce-scatter":
            size *= devices
        elif kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # a TPU's is a fusion of an all-reduce and a slice
        if kind not in _WHOLE:
            size = (2 if kind == "all-reduce" else 1) * size * (devices - 1) // devices
        return [_Execution(kind, operation, size, 1, frozenset())]

    def _group_size(self, attributes: str) -> int:
        """Devices of the largest group; of a permutation 2 if anything leaves its device."""
        if pairs := _PAIRS.search(attributes):
            moved = (pair.split(",") for pair in re.findall(r"\d+,\d+", pairs[1]))
            return 1 + any(source != target for source, target in moved)
        if listed := _LISTED.search(attributes):
            return max(group.count(",") + 1 for group in re.findall(r"\{([\d,]*)\}", listed[1]))
        if iota := _IOTA.search(attributes):
            return int(iota[1])
        if mesh := _MESH.search(attributes):
            sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh[1]))
            axes = re.findall(r"'([^':]+)(?:'?:\(\d+\)(\d+))?'?", mesh[2])  # a second number: a part of an axis
            return math.prod(int(part or sizes[name]) for name, part in axes)
        return self._devices

    def _operation(self, name: str, source: str) -> str:
        """The source operation of an instruction, or of what it works on, or of what calls it, or else its name."""
        current = name
        for _ in range(_HOPS):
            if current not in self._instructions:
                break
            instruction = self._instructions[current]
            if found := _OP_NAME.search(instruction.rest):
                return found[1]
            current = next((operand for operand, _ in instruction.operands()), "")
        return source or name

    # --- loops --------------------------------------------------------------------------------------------------------

    def _trips(self, loop: _Instruction) -> int | None:
        """How often a loop's body runs; `None` if that is not known. For a TPU it is not said, but the loop says it."""
        if known := _TRIPS.search(loop.rest):
            return int(known[1])
        condition, body = (self._root(loop, role) for role in ("condition", "body"))
        start = self._instructions.get(loop.operands()[0][0], _NOTHING)
        if (condition.opcode, body.opcode, start.opcode) != ("compare", "tuple", "tuple"):
            return None
        counter, limit = condition.operands()
        index = self._index(counter)
        if index is None or "direction=LT" not in condition.rest:
            return None
        step = self._copied(body.operands()[index][0])
        steps = [self._constant(operand) for operand in step.operands() if step.opcode == "add"]
        first, last = self._constant(start.operands()[index]), self._constant(limit)
        by = next((number for number in steps if number), None)
        return None if first is None or last is None or by is None else len(range(first, last, by))

    def _root(self, loop: _Instruction, role: str) -> _Instruction:
        found = re.search(rf"\b{role}=%([\w.-]+)", loop.rest)
        return self._instructions.get(self._roots.get(found[1], ""), _NOTHING) if found else _NOTHING

    def _copied(self, name: str) -> _Instruction:
        """An instruction, or what it copies."""
        instruction = self._instructions.get(name, _NOTHING)
        for _ in range(_HOPS):
            if instruction.opcode == "copy":
                instruction = self._instructions.get(instruction.operands()[0][0], _NOTHING)
        return instruction

    def _index(self, operand: tuple[str, str]) -> int | None:
        """The place in its tuple of an operand like `%tuple#2`, or of what takes one out of a tuple."""
        name, index = operand
        instruction = self._copied(name)
        if not index and instruction.opcode == "get-tuple-element":
            index = instruction.rest.split("index=", 1)[1].split(",", 1)[0]
        return int(index) if index else None

    def _constant(self, operand: tuple[str, str]) -> int | None:
        instruction = self._copied(operand[0])
        number = re.match(r"-?\d+(?=\))", instruction.rest)
        return int(number[0]) if number and instruction.opcode == "constant" else None


def _tuple_parts(shape: str) -> list[str]:
    """The shapes in a tuple's, one level deep."""
    parts, depth = [""], 0
    for character in re.sub(r"/\*.*?\*/|\s", "", shape):
        depth += (character in "([{") - (character in ")]}")
        if depth == 1 and character == ",":
            parts.append("")
        elif depth > 1 or (depth == 1 and character != "("):
            parts[-1] += character
    return parts


def _shape_bytes(shape: str) -> int:
    """Bytes of an array's shape or of all in a tuple's."""
    bits = 0
    for kind, width, sizes in _ARRAY.findall(shape):
        each = 8 if kind == "pred" else int(width or 0)
        bits += each * math.prod(int(size.strip("<=")) for size in sizes.split(",") if size)
    return bits // 8
