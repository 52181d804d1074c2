"""Adapters as updates `scale * B A` of published tensors: taken from a model, put on one, merged into files."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from qwen3next.errors import InputError, require
from qwen3next.hf import EMBED, HEAD, table
from qwen3next.hosts import fetch
from qwen3next.leaves import Leaf
from qwen3next.linear import Embedding, Linear
from qwen3next.lora import Adapted, LoRAEmbedding, adapters, attach, replace, strip
from qwen3next.model import Qwen3Next
from qwen3next.tensor_files import CHUNK, Stored, read
from qwen3next.tensor_writer import write
from qwen3next.tree import near, unnumbered


class Factors(NamedTuple):
    """The update `scale * B A` of one published tensor."""

    A: Float[np.ndarray, "rank in"]
    B: Float[np.ndarray, "out rank"]
    scale: float

    def update(self) -> Float[np.ndarray, "out in"]:
        """What is added to the tensor."""
        return np.float32(self.scale) * (self.B @ self.A)

    def merge(self, tensor: Stored, target: Stored, *, allow_nonfinite: bool = False) -> None:
        """Writes `tensor + update` to its place in a new file, some rows at a time.

        Raises `InputError`, unless allowed, for NaN or infinity, whether stored or made by the sum or the cast.
        """
        rows, columns = tensor.shape
        step = max(CHUNK // (4 * columns), 1)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            part = np.empty((stop - start, columns), np.float32)
            read(tensor.rows(start, stop), part, allow_nonfinite=allow_nonfinite)
            with np.errstate(over="ignore"):
                merged = (part + self._replace(B=self.B[start:stop]).update()).astype(target.dtype)
            finite = allow_nonfinite or bool(np.isfinite(merged.astype(np.float32)).all())
            require(finite, f"{tensor.file}: tensor {tensor.name} is too large for {target.dtype} with its update")
            write(target.rows(start, stop), merged)


def factors_of(model: Qwen3Next) -> dict[str, Factors]:
    """A model's adapters, by published tensor."""
    leaves, found = {leaf.path: leaf for leaf in table(strip(model))}, {}
    for path, adapter in adapters(model).items():
        A, B = (fetch(leaf) for leaf in (adapter.lora_A, adapter.lora_B))
        if isinstance(adapter, LoRAEmbedding):
            A, B = B.T, A.T
        for at, name in leaves[f"{path}.weight"].parts():
            found[name] = Factors(A[at], B[at], adapter.scale)
    return found


def with_adapters(base: Qwen3Next, sets: Sequence[tuple[str, Mapping[str, Factors]]]) -> list[Qwen3Next]:
    """The base with each set of updates on it, all of one structure, so that none makes a program compile anew.

    A set comes with the name that errors call it by. A matrix has the largest rank that any set gives it in any layer;
    what is missing is 0. Raises `InputError` for an update of what the base has not, or of another shape.
    """
    leaves = list(table(base))
    given = [fitted(factors, leaves, place) for place, factors in sets]
    plans: list[dict[str, Any]] = [{} for _ in given]
    for leaf in leaves:
        parts = list(leaf.parts())
        met = [factors[name] for factors in given for _, name in parts if name in factors]
        if not met:
            continue
        out, inner = leaf.tensor_shape
        rank, scales = max(len(found.A) for found in met), {found.scale for found in met}
        scale = scales.pop() if len(scales) == 1 else 1.0
        for factors, plan in zip(given, plans, strict=True):
            A = np.zeros((*leaf.tensors.shape, rank, inner), np.float32)
            B = np.zeros((*leaf.tensors.shape, out, rank), np.float32)
            for at, name in parts:
                if name in factors:
                    found = factors[name]
                    A[at][: len(found.A)] = found.A
                    B[at][:, : len(found.A)] = found.B * np.float32(found.scale / scale)
            plan[leaf.path.removesuffix(".weight")] = (A, B, scale)

    def on(plan: dict[str, Any], path: str, matrix: Linear | Embedding) -> Adapted:
        A, B, scale = plan[path]
        one, other = (B.T, A.T) if isinstance(matrix, Embedding) else (A, B)
        return attach(matrix, jnp.asarray(one), jnp.asarray(other), scale)

    return [replace(base, plan, partial(on, plan)) for plan in plans]


def fitted(factors: Mapping[str, Factors], leaves: Iterable[Leaf], place: str) -> Mapping[str, Factors]:
    """The updates, in the shapes of a base's leaves. Where embedding and head are one table, both must be adapted,
    and alike: one of the two is left. Raises `InputError` for any that does not fit, naming `place`."""
    shapes = {name: leaf.tensor_shape for leaf in leaves for _, name in leaf.parts()}
    if HEAD not in shapes and {EMBED, HEAD} & factors.keys():
        embed, head = factors.get(EMBED), factors.get(HEAD)
        alike = embed is not None and head is not None and np.array_equal(embed.update(), head.update())
        require(alike, f"{place} adapts embed_tokens or lm_head, which the base ties; it must adapt both, alike")
        factors = {name: found for name, found in factors.items() if name != HEAD}
    for name, found in factors.items():
        if name not in shapes:
            known = near(unnumbered(name), map(unnumbered, shapes))
            raise InputError(f"{place} adapts {name}, which the base has not; allowed: {known}")
        shape = (found.B.shape[0], found.A.shape[1])
        require(shape == shapes[name], f"{place} adapts {name} as {shape}; the base's is {shapes[name]}")
    return factors
