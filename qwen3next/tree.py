"""Leaves of a model by the names of their paths."""

from typing import Any

import jax


def leaf_path(path: tuple[Any, ...]) -> str:
    """A leaf's path as text, `decoder.cycles.modules.runs.0.modules.mixer.A_log`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
