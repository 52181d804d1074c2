"""What a layer asks of its token mixer."""

import abc
from typing import Generic, TypeVar

import equinox as eqx
from jaxtyping import Array, Float

from qwen3next.cache import LayerCache
from qwen3next.context import Context

C = TypeVar("C", bound=LayerCache)


class AbstractMixer(eqx.Module, Generic[C]):
    """Mixes tokens of a row. The cache that comes out has the structure of the one that went in, `None` included."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq hidden"], context: Context, cache: C | None
    ) -> tuple[Float[Array, "batch seq hidden"], C | None]:
        """Output of the mixer and the cache moved past the call."""
