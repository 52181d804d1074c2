"""Compiled programs: how they are compiled, and a folder that keeps them for the next start of a run."""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import jax

from qwen3next.errors import InputError, require

# In XLA's order for concurrency, its default on CPUs, more arrays live at once and the same pages are used less often.
# The compiler for TPUs takes the option and ignores it.
COMPILER_OPTIONS = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
_MOST = 2 * 10**9  # bytes in the user's cache folder


def quick_options() -> dict[str, bool | int | str]:
    """How to compile what runs once, or not at all: several times as fast, for the same numbers."""
    options: dict[str, bool | int | str] = {"xla_backend_optimization_level": 0}
    if jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11):  # later XLA has none but the slow emitters
        options["xla_cpu_use_fusion_emitters"] = False
    return options


def keep_programs(where: str) -> None:
    """From here on JAX looks for programs in a folder before it compiles them, and leaves there what it compiles.

    `where` is `run.compilation_cache`. Call it before anything is compiled. Raises `InputError` for a folder that was
    asked for and cannot be written; without the user's own cache folder it goes on.
    """
    if where == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if where == "auto" and os.environ.get(_VARIABLE):  # JAX reads it, and other variables of how it keeps programs
        return
    told = f"the compilation cache {where!r} cannot be written"
    require(bool(where) and "://" not in where, f"{told}; allowed: auto, off or a folder (a URL in {_VARIABLE})")
    try:
        folder = _user_folder() if where == "auto" else Path(where).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # who can write there decides what is run
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # the latter where there is no home
        if where != "auto":
            raise InputError(f"{told} ({error}); allowed: auto, off or a folder") from error
        print(f"compiled programs are not kept: {error}", file=sys.stderr)
        return
    if where == "auto":
        _trim(folder, _MOST)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small ones add up, and are small to keep


def _user_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qwen3next"


def _trim(folder: Path, most: int) -> None:
    """Removes the files that were used longest ago, so that those that stay have `most` bytes at most.

    JAX's own limit needs another package, and a process that is killed in a write leaves it unable to count.
    """
    found = list[tuple[float, int, Path]]()
    for path in folder.glob("*-cache"):
        with suppress(OSError):  # another process removes it as well
            facts = path.stat()
            found.append((max(facts.st_atime, facts.st_mtime), facts.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            return
        with suppress(OSError):
            path.unlink()
        total -= size
