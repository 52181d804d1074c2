"""Prompts and completions from Python's own source: a function's head, and the first paragraph of its docstring."""

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

_LONGEST = 400  # bytes of a prompt and of a completion


def read_docstrings(path: Path) -> Iterator[tuple[str, bytes, bytes]]:
    """(`file:line`, completion, prompt) for each function of a source file that has a docstring and is short enough.

    The prompt is the head on one line and the quotes that open the docstring, the completion its first paragraph and
    the quotes that close it. A file that does not parse has none.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # old escapes in string literals
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        said = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        prompt = f'def {node.name}({ast.unparse(node.args)}){returns}:\n    """'.encode(errors="replace")
        completion = f'{said}"""'.encode(errors="replace")  # a lone surrogate has no bytes
        if said and max(len(prompt), len(completion)) <= _LONGEST:
            yield f"{path}:{node.lineno}", completion, prompt
