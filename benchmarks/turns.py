"""Contestants take turns: each is a process of its own, which runs one repetition whenever it is told to.

Standard library alone, for both ends are here and the two sides of a comparison may run in different environments. The
parent says `go` and `end`, the child answers each with a line of JSON; `{"ready": true}` comes first.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
Repetition = Callable[[], Facts]  # one repetition; `seconds` is among what it returns


def peak_bytes(process: int | str = "self") -> int:
    """Largest resident memory of a process; where there is no /proc, of this one and what it was started by."""
    status = Path(f"/proc/{process}/status")
    if status.is_file():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def timed(function: Callable[[], Any]) -> Facts:
    """Wall time of a call, which returns when its work is done, and processor time of all threads meanwhile."""
    began, used = time.perf_counter(), time.process_time()
    function()
    return {"seconds": time.perf_counter() - began, "processor": time.process_time() - used}


def serve(make: Callable[[Facts], Repetition]) -> None:
    """A child's whole life: makes what its argument, a JSON object, asks for, warms it up and waits for its turns.

    At its end it tells `peak`, the largest memory of that life.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between

    def answer(facts: Facts) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    spec = json.loads(sys.argv[1])
    repetition = make(spec)
    for _ in range(spec.get("warmups", 2)):
        repetition()
    answer({"ready": True})
    for word in sys.stdin:  # it ends too when the parent is gone
        if word.strip() == "end":
            answer({"peak": peak_bytes()})
            return
        answer(repetition())


class Failed(Exception):
    """A child that ended before its time; the message is one line, the last that it said."""


class Child:
    """The parent's end. On leaving, the process and whatever it has started is gone, whatever happened."""

    def __init__(self, command: Sequence[str | Path], spec: Facts, environment: dict[str, str]):
        self._command = [*map(str, command), json.dumps(spec)]
        self._environment = os.environ | environment

    def __enter__(self) -> "Child":
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self._environment,
            text=True,
            start_new_session=True,  # one group, which is ended as a whole; Ctrl-C ends it through its parent
        )
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess]

    def answer(self) -> Facts:
        """The child's next line. Raises `Failed` if there is none."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(self._why())
        return json.loads(line)

    def ask(self, word: str) -> Facts:
        """The child's answer to a word."""
        assert self._process.stdin is not None
        try:
            print(word, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed(self._why()) from None
        return self.answer()

    def _why(self) -> str:
        ended = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        said = lines[-1][:300] if lines else "it said nothing"
        return f"killed by signal {-ended}: {said}" if ended < 0 else said
