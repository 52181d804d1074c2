"""The projection that every layer uses."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def normal(key: PRNGKeyArray, shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> Array:
    """N(0, std^2), drawn in float32 so that a dtype changes the rounding and not the draw."""
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


class Linear(eqx.Module):
    """`x W^T + b`, in the dtype of `x`: parameters are cast where they are used and nowhere else."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None

    def __init__(
        self, in_size: int, out_size: int, std: float, dtype: jnp.dtype, *, bias: bool = False, key: PRNGKeyArray
    ):
        self.weight = normal(key, (out_size, in_size), std, dtype)
        self.bias = jnp.zeros(out_size, dtype) if bias else None

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        y = jnp.einsum("...i,oi->...o", x, self.weight.astype(x.dtype))
        return y if self.bias is None else y + self.bias.astype(x.dtype)
