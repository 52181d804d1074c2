"""Every test runs with shape and type checks on the package, and with strict dtype promotion."""

import os

os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
