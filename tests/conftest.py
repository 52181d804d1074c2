"""Every test runs with shape and type checks on the package, and with strict dtype promotion."""

import os
import shutil
import tempfile
from collections.abc import Iterator

# Compiled programs, which the workers and the processes that tests start have from each other. Before JAX is imported.
# A run would keep them in the user's own folder.
if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    OWN = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jax-programs-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
else:
    OWN = ""

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_platforms", "cpu")


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Thousands of compiled programs in one process exhaust its memory maps, and XLA then dies in the next one."""
    yield
    jax.clear_caches()


def pytest_unconfigure() -> None:
    """The process that made the folder removes it."""
    if OWN:
        shutil.rmtree(OWN, ignore_errors=True)
