"""An ablation's row in a process of its own: whatever happens to it, there is an answer and no process is left."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from qwen3next.ablation import Facts, Request, peak_bytes
from qwen3next.collectives import network_facts
from qwen3next.errors import InputError
from qwen3next.tpu import compile_environment, dumped_files, read_buffers

_POLL = 0.5  # seconds


def _told(returncode: int, errors: str) -> str:
    """How a process failed, in a line: its last exception, or else what it said last."""
    lines = [line for line in errors.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    said = (raised or lines or ["it said nothing"])[-1].strip()[:300]
    if returncode < 0:
        memory = ", as the system does when memory runs out" if returncode == -9 else ""
        return (
            f"killed by signal {-returncode}{memory}: {said}" if raised else f"killed by signal {-returncode}{memory}"
        )
    return said


class _Dump:
    """What the compiler writes about its buffers and its program into a folder."""

    def __init__(self, folder: Path):
        self._folder, self._size = folder, 0

    def read(self) -> Facts:
        """Bytes by use, the largest buffers, and what goes over the network; nothing if the files are not there."""
        files = dumped_files(self._folder)
        if not files:
            return {}
        assignment, program = (path.read_text("utf-8", "replace") for path in files)
        return read_buffers(assignment, program) | network_facts(program)

    def settled(self) -> bool:
        """Whether the files are there and have not grown since the last call."""
        files, before = dumped_files(self._folder), self._size
        self._size = sum(path.stat().st_size for path in files) if files else 0
        return 0 < self._size == before


def ask(request: Request, *, full_compile: bool = False) -> Facts:
    """What a child finds out about a request; `error` is there if it failed, and says how.

    For a topology it is ended as soon as the compiler has assigned the buffers, unless `full_compile` is asked for.
    Raises `InputError` for what the child takes to be bad input.
    """
    with tempfile.TemporaryDirectory(prefix="ablation-") as name:
        folder = Path(name)
        given, out, errors = (folder / part for part in ("request.json", "out.jsonl", "errors.txt"))
        given.write_text(json.dumps(dataclasses.asdict(request)), encoding="utf-8")
        environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # a program from it has no statistics
        paths = (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        dump = _Dump(folder)
        if request.topology is not None:
            environment |= compile_environment(folder)
        with given.open() as stdin, out.open("w") as stdout, errors.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "qwen3next.ablation"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                start_new_session=True,  # Ctrl-C ends it through this process, below
            )
            try:
                while process.poll() is None and (full_compile or not dump.settled()):
                    time.sleep(_POLL)
                ended = process.returncode
            finally:
                process.kill()
                process.wait()
        facts: Facts = {}
        for line in out.read_text(encoding="utf-8").splitlines():
            facts |= json.loads(line)
        said = errors.read_text(encoding="utf-8", errors="replace")
        if ended == 2:
            raise InputError(said.strip().splitlines()[-1].removeprefix("error: "))
        if ended:
            return facts | {"error": _told(ended, said)}
        try:
            facts = dump.read() | facts  # of a finished compilation the facts are its own
        except ValueError as error:
            return facts | {"error": str(error)}
        return {"peak": peak_bytes(facts)} | facts
