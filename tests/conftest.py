"""Every test runs with shape and type checks on the package, and with strict dtype promotion."""

from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_platforms", "cpu")


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Thousands of compiled programs in one process exhaust its memory maps, and XLA then dies in the next one."""
    yield
    jax.clear_caches()
