"""What a layer asks of its token mixer."""

import abc
from typing import Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qwen3next.cache import LayerCache
from qwen3next.context import Context
from qwen3next.shards import summed

C = TypeVar("C", bound=LayerCache)


class MixerStats(NamedTuple):
    """Sums over the real tokens of a call for each head, float32, without a gradient.

    `gate` is how open a gate is, 0 to 1: of attention the output's, of Gated DeltaNet what is written, beta. `decay` is
    Gated DeltaNet's log-decay.
    """

    gate: Float[Array, "*layers heads"]
    decay: Float[Array, "*layers heads"] | None
    tokens: Float[Array, "*layers"]


def mixer_stats(
    gate: Float[Array, "batch seq heads"], decay: Float[Array, "batch seq heads"] | None, context: Context
) -> MixerStats:
    """The sums over all devices' rows."""
    real = jnp.ones(gate.shape[:2]) if context.packing is None else context.packing.real.astype(jnp.float32)

    def total(x: Array) -> Array:
        return jnp.einsum("bsh,bs->h", jax.lax.stop_gradient(x).astype(jnp.float32), real)

    return summed(MixerStats(total(gate), None if decay is None else total(decay), jnp.sum(real)))


class AbstractMixer(eqx.Module, Generic[C]):
    """Mixes tokens of a row. The cache that comes out has the structure of the one that went in, `None` included."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq hidden"], context: Context, cache: C | None
    ) -> tuple[Float[Array, "batch seq hidden"], C | None, MixerStats]:
        """Output of the mixer (of this device's heads), the cache moved past the call, and sums over its tokens."""
