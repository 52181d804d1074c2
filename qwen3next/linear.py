"""Matrices: the projection that every layer uses, one or as many as there are experts, and the embedding."""

import abc
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

Product = Callable[[Array, Array], Array]

_FEW = 16  # rows of a product


def normal(key: PRNGKeyArray, shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> Array:
    """N(0, std^2), drawn in float32 so that a dtype changes the rounding and not the draw."""
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def product(x: Float[Array, "*batch in"], weight: Float[Array, "out in"]) -> Float[Array, "*batch out"]:
    """`x W^T` in the dtype of `x`: parameters are cast where they are used and nowhere else."""
    weight = weight.astype(x.dtype)
    if not 1 < math.prod(x.shape[:-1]) <= _FEW:
        return jnp.einsum("...i,oi->...o", x, weight)
    # XLA on CPUs rearranges a product's right side first: few rows, not the weight. A barrier, or it turns them back.
    return jnp.moveaxis(jax.lax.optimization_barrier(jnp.einsum("oi,...i->o...", weight, x)), 0, -1)


class AbstractLinear(eqx.Module):
    """A linear map of the last axis."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*batch in"], product: Product = product) -> Float[Array, "*batch out"]:
        """`product(rows, weight)` says how rows meet a weight: with experts, each row has one of its own."""


class Linear(AbstractLinear):
    """`x W^T + b`; with `experts`, that many of them, stacked."""

    weight: Float[Array, "*experts out in"]
    bias: Float[Array, " out"] | None

    def __init__(
        self,
        in_size: int,
        out_size: int,
        std: float,
        dtype: jnp.dtype,
        *,
        experts: int | None = None,
        bias: bool = False,
        key: PRNGKeyArray,
    ):
        leading = () if experts is None else (experts,)
        self.weight = normal(key, (*leading, out_size, in_size), std, dtype)
        self.bias = jnp.zeros(out_size, dtype) if bias else None

    def __call__(self, x: Float[Array, "*batch in"], product: Product = product) -> Float[Array, "*batch out"]:
        y = product(x, self.weight)
        return y if self.bias is None else y + self.bias.astype(x.dtype)


class AbstractEmbedding(eqx.Module):
    """Rows of a table by token, and, where it is tied to the head, products with all of them."""

    @abc.abstractmethod
    def __call__(self, ids: Int[Array, "*batch"], dtype: jnp.dtype) -> Float[Array, "*batch hidden"]:
        """Each token's row."""

    @abc.abstractmethod
    def logits(self, states: Float[Array, "*batch hidden"], product: Product = product) -> Float[Array, "*batch vocab"]:
        """Each state's product with every row."""


class Embedding(AbstractEmbedding):
    """A table of one row a token."""

    weight: Float[Array, "vocab hidden"]

    def __init__(self, vocab_size: int, hidden_size: int, std: float, dtype: jnp.dtype, *, key: PRNGKeyArray):
        self.weight = normal(key, (vocab_size, hidden_size), std, dtype)

    def __call__(self, ids: Int[Array, "*batch"], dtype: jnp.dtype) -> Float[Array, "*batch hidden"]:
        return self.weight[ids].astype(dtype)

    def logits(self, states: Float[Array, "*batch hidden"], product: Product = product) -> Float[Array, "*batch vocab"]:
        return product(states, self.weight)
