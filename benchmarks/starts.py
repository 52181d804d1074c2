"""A contestant whose repetition is another command, from its start until it prints a certain text; then it is ended.

The memory is that of the command, at that moment.
"""

import os
import subprocess
import sys
import tempfile
import time

from turns import Facts, Repetition, peak_bytes, serve


def make(spec: Facts) -> Repetition:
    """`command`, in which FOLDER stands for a new empty folder, and `until`. `programs` is where JAX keeps compiled
    programs: a folder of the specification's, `new` for an empty one each time, or null."""

    def repetition() -> Facts:
        with tempfile.TemporaryDirectory(prefix="speed-", ignore_cleanup_errors=True) as folder:
            environment = os.environ | {"PYTHONUNBUFFERED": "1"}
            if spec["programs"]:
                own = os.path.join(folder, "programs")
                environment["JAX_COMPILATION_CACHE_DIR"] = own if spec["programs"] == "new" else spec["programs"]
            command = [os.path.join(folder, "run") if part == "FOLDER" else part for part in spec["command"]]
            began = time.perf_counter()
            pipe = subprocess.PIPE  # as input too, for one that ended would end a contestant
            process = subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe)
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if spec["until"] in line:
                        return {"seconds": time.perf_counter() - began, "peak": peak_bytes(process.pid)}
            finally:
                process.kill()
                process.wait()
        sys.exit(1)  # the last line on standard error is the command's own

    return repetition


if __name__ == "__main__":
    serve(make)
