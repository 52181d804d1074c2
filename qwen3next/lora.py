"""LoRA: adapters on any matrix of the model, in every layer and expert (Hu et al. 2021, "LoRA: Low-Rank Adaptation").

An adapter's leaves stand where its matrix stands: stacked by layer and by expert like it, scanned and sharded like it.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Collection
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, PyTree

from qwen3next.config import LoRAConfig
from qwen3next.errors import InputError, require
from qwen3next.hf import table
from qwen3next.linear import AbstractEmbedding, AbstractLinear, Embedding, Linear, Product, product
from qwen3next.model import Qwen3Next
from qwen3next.tree import leaf_path, matches, near, stacked_axes, unnumbered

PRESETS: dict[str, tuple[str, ...]] = {
    "all-linear": ("self_attn.*", "linear_attn.*", "mlp.*"),  # every matrix of the layers
    "attention": ("self_attn.*",),
    "deltanet": ("linear_attn.*",),
    "experts": ("mlp.experts.*",),
    "shared_expert": ("mlp.shared_expert.*", "mlp.shared_expert_gate"),
    "router": ("mlp.gate",),
    "dense": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "head": ("lm_head",),
    "embedding": ("embed_tokens",),
}
LEAVES = ("lora_A", "lora_B")


class LoRALinear(AbstractLinear):
    """`base(x) + scale * B A x`, A and B in float32; over experts, each has its own.

    `key`, one a layer, makes `dropout` act on the x that A meets; without it, as in all but training, none does.
    """

    base: Linear
    lora_A: Float[Array, "*experts rank in"]
    lora_B: Float[Array, "*experts out rank"]
    key: Key[Array, "*layers"] | None
    scale: float = eqx.field(static=True)
    dropout: float = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*batch in"], product: Product = product) -> Float[Array, "*batch out"]:
        kept = x
        if self.key is not None:
            keep = jax.random.bernoulli(self.key, 1 - self.dropout, x.shape)
            kept = jnp.where(keep, x / (1 - self.dropout), 0)
        return self.base(x, product) + self.scale * product(product(kept, self.lora_A), self.lora_B)

    def merged(self) -> Linear:
        """The one matrix that does the same, in the base's dtype."""
        return eqx.tree_at(lambda base: base.weight, self.base, _sum(self.base.weight, self))


class LoRAEmbedding(AbstractEmbedding):
    """A table with `scale * (B A)^T` added to it, wherever it is used: as the head too, if it is tied."""

    base: Embedding
    lora_A: Float[Array, "rank vocab"]
    lora_B: Float[Array, "hidden rank"]
    scale: float = eqx.field(static=True)

    def __call__(self, ids: Int[Array, "*batch"], dtype: jnp.dtype) -> Float[Array, "*batch hidden"]:
        low = jnp.moveaxis(self.lora_A[:, ids], 0, -1).astype(dtype)
        return self.base(ids, dtype) + self.scale * product(low, self.lora_B)

    def logits(self, states: Float[Array, "*batch hidden"], product: Product = product) -> Float[Array, "*batch vocab"]:
        return self.base.logits(states, product) + self.scale * product(product(states, self.lora_B.T), self.lora_A.T)

    def merged(self) -> Embedding:
        """The one table that does the same, in the base's dtype."""
        return eqx.tree_at(lambda base: base.weight, self.base, _sum(self.base.weight.T, self).T)


Adapted = LoRALinear | LoRAEmbedding


def _sum(weight: Array, adapter: Adapted) -> Array:
    update = jnp.einsum("...or,...ri->...oi", adapter.lora_B, adapter.lora_A, precision="highest")
    return (weight.astype(jnp.float32) + adapter.scale * update).astype(weight.dtype)


def is_adapted(node: object) -> bool:
    """Whether a node of a model is a matrix with an adapter."""
    return isinstance(node, Adapted)


def adapters(model: PyTree) -> dict[str, Adapted]:
    """A model's adapters by the path of the matrix that each is on."""
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_adapted)
    return {leaf_path(path): node for path, node in nodes if is_adapted(node)}


def merge(model: Qwen3Next) -> Qwen3Next:
    """The model without adapters that computes the same: `W + scale * B A`, each of the matrices rounded once."""
    return jax.tree.map(lambda node: node.merged() if is_adapted(node) else node, model, is_leaf=is_adapted)


def strip(model: Qwen3Next) -> Qwen3Next:
    """The base model."""
    return jax.tree.map(lambda node: node.base if is_adapted(node) else node, model, is_leaf=is_adapted)


class Target(NamedTuple):
    """What an adapter is to be: of which rank, and by how much its update counts."""

    rank: int
    scale: float


def _matrices(model: Qwen3Next) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name, as in `matrix_names`, and shape of each matrix, by path."""
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda node: isinstance(node, Linear | Embedding))
    found = {leaf_path(path) for path, node in nodes if isinstance(node, Linear | Embedding)}
    leaves = {leaf.path.removesuffix(".weight"): leaf for leaf in table(model)}
    kept = {path: leaf for path, leaf in leaves.items() if path in found}
    return {path: (unnumbered(str(leaf.tensors.flat[0])), leaf.tensor_shape) for path, leaf in kept.items()}


def matrix_names(model: Qwen3Next) -> dict[str, str]:
    """Each matrix of a base model that can be adapted, by path: its published name without the numbers in it."""
    return {path: name for path, (name, _) in _matrices(model).items()}


def find_targets(model: Qwen3Next, config: LoRAConfig) -> dict[str, Target]:
    """The matrices of a base model that a config names, by path.

    Raises `InputError` for a pattern that matches nothing, with the names near it, and if nothing is left.
    """
    matrices, ranks = _matrices(model), dict[str, int]()
    known = sorted({*PRESETS, *(name for name, _ in matrices.values())})
    for text in config.targets:
        pattern, given, number = text.partition("=")
        require(not given or number.isdecimal(), f"lora.targets: {text!r} must be a name or NAME=RANK")
        words = PRESETS.get(pattern, (pattern,))
        found = [path for path, (name, _) in matrices.items() if any(matches(word, name) for word in words)]
        if not found:
            raise InputError(f"lora.targets: {pattern!r} is no matrix of the model; allowed: {near(pattern, known)}")
        rank, largest = int(number) if given else config.rank, max(max(matrices[path][1]) for path in found)
        require(rank <= largest, f"lora.targets: rank {rank} for {pattern!r}; allowed: at most {largest}")
        ranks |= dict.fromkeys(found, rank)
    ranks = {path: rank for path, rank in ranks.items() if rank}
    require(bool(ranks), "lora.targets leaves no matrix to adapt; give at least one with a rank above 0")
    power = 0.5 if config.rslora else 1.0
    return {path: Target(rank, config.alpha / rank**power) for path, rank in ranks.items()}


def replace(model: Qwen3Next, paths: Collection[str], make: Callable[[str, Linear | Embedding], Adapted]) -> Qwen3Next:
    """The model with an adapter, `make(path, matrix)`, on the matrices at these paths."""

    def visit(path: tuple, node: object) -> object:
        name = leaf_path(path)
        return make(name, node) if isinstance(node, Linear | Embedding) and name in paths else node

    return jax.tree_util.tree_map_with_path(visit, model, is_leaf=lambda node: isinstance(node, Linear | Embedding))


def attach(base: Linear | Embedding, lora_A: Array, lora_B: Array, scale: float, dropout: float = 0.0) -> Adapted:
    """A matrix with this adapter on it: A [.., rank, in] and B [.., out, rank], of an embedding's transpose."""
    if isinstance(base, Embedding):
        return LoRAEmbedding(base, lora_A, lora_B, scale)
    return LoRALinear(base, lora_A, lora_B, None, scale, dropout)


def _own_key(key: PRNGKeyArray, path: str) -> PRNGKeyArray:
    return jax.random.fold_in(key, zlib.crc32(path.encode()) & 0x7FFFFFFF)


def add_adapters(model: Qwen3Next, config: LoRAConfig, *, key: PRNGKeyArray) -> Qwen3Next:
    """A base model with new adapters, which leave it as it is: one side is 0, the other random, of its own in each
    layer and expert. B is 0 and A uniform within +-1/sqrt(in), but of an embedding A is 0 and B normal, as in PEFT.

    Raises `InputError` as `find_targets` does.
    """

    targets = find_targets(model, config)

    def make(path: str, base: Linear | Embedding) -> Adapted:
        own, (rank, scale) = _own_key(key, path), targets[path]
        *leading, rows, columns = base.weight.shape
        if isinstance(base, Embedding):
            normal = jax.random.normal(own, (columns, rank), jnp.float32)
            return attach(base, jnp.zeros((rank, rows), jnp.float32), normal, scale)
        bound = 1 / math.sqrt(columns)
        uniform = jax.random.uniform(own, (*leading, rank, columns), jnp.float32, -bound, bound)
        zeros = jnp.zeros((*leading, rows, rank), jnp.float32)
        return attach(base, uniform, zeros, scale, config.dropout)

    return replace(model, targets, make)


def with_dropout(model: PyTree, key: PRNGKeyArray) -> PyTree:
    """The model as it trains: each adapter with a key of its own in each layer."""

    def visit(path: tuple, node: object) -> object:
        if not isinstance(node, LoRALinear) or not node.dropout:
            return node
        name = leaf_path(path)
        keys = jax.random.split(_own_key(key, name), node.lora_A.shape[: stacked_axes(name)])
        return dataclasses.replace(node, key=keys)

    return jax.tree_util.tree_map_with_path(visit, model, is_leaf=is_adapted)
