"""Leaves and modules of a model by the names of their paths."""

import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import jax

_SOME = 30


def leaf_path(path: tuple[Any, ...]) -> str:
    """A leaf's path as text, `decoder.cycles.modules.runs.0.modules.mixer.A_log`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def stacked_axes(path: str) -> int:
    """Leading axes of a leaf that count layers; what follows them is the shape of one layer's array."""
    return 2 if re.search(r"(^|\.)cycles\.modules\.runs\.", path) else int(".runs." in path)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern with `*` and `?` is the name or what the name ends in after a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def unnumbered(name: str) -> str:
    """A published name without the numbers of layer and expert: `mlp.experts.up_proj`, `lm_head`."""
    return re.sub(r"^model\.(layers\.\d+\.)?|(?<=experts\.)\d+\.|\.weight$", "", name)


def near(word: str, known: Iterable[str]) -> str:
    """The names that a word may have meant, each a few letters away as a whole or in its last part; some, if none."""
    tails = {name.rsplit(".", dots)[-1] if dots else name: name for name in known for dots in (1, 0)}
    found = difflib.get_close_matches(word.replace("*", ""), tails, n=3, cutoff=0.6)
    names = list(dict.fromkeys(tails[tail] for tail in found)) or sorted(set(tails.values()))
    return ", ".join(names[:_SOME]) + (f" and {len(names) - _SOME} more" if len(names) > _SOME else "")
