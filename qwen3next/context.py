"""What one call knows about its tokens, worked out once and the same for every layer."""

import dataclasses
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from qwen3next.cache import Cache
from qwen3next.config import Compute, ModelConfig
from qwen3next.rotary import rotary_tables


class Packing(eqx.Module):
    """Rows that hold padding or several documents.

    `age`: tokens of the same document before this one. `first`, `last`: a row's real tokens lie in [first, last).
    `length`: tokens of the row's last document so far, those of earlier calls among them.
    """

    real: Bool[Array, "batch seq"]
    age: Int[Array, "batch seq"]
    documents: Int[Array, "batch seq"]
    first: Int[Array, " batch"]
    last: Int[Array, " batch"]
    length: Int[Array, " batch"]

    @property
    def resets(self) -> Bool[Array, "batch seq"]:
        """Where a document begins."""
        return self.real & (self.age == 0)


class Slots(eqx.Module):
    """Where the call's keys lie among the cache's slots, and the document of each slot after the call."""

    documents: Int[Array, "batch slot"]
    offset: Int[Array, ""]


class Context(eqx.Module):
    """Rotary tables for all; `packing` and `slots` where there are segment ids and a cache."""

    cos: Float[Array, "batch seq 1 freq"]
    sin: Float[Array, "batch seq 1 freq"]
    packing: Packing | None
    slots: Slots | None
    compute: Compute = eqx.field(static=True)

    @property
    def keys_are_own(self) -> bool:
        """Whether the call's own keys are all: there is no cache, or one known to be empty while this is traced."""
        offset = None if self.slots is None else self.slots.offset
        return offset is None or (not isinstance(offset, Tracer) and int(offset) == 0)

    def attention_mask(self, queries: Int[Array, " rows"]) -> Bool[Array, "#batch rows slot"]:
        """Rows of the mask, those of the call's tokens `queries`: each sees the slots up to its own of its document."""
        seq = self.cos.shape[1]
        if self.slots is not None and not self.keys_are_own:
            held, offset = self.slots.documents, self.slots.offset
        elif self.packing is not None:
            held, offset = self.packing.documents, 0
        else:
            return jnp.arange(seq)[None, None, :] <= queries[None, :, None]
        causal = jnp.arange(held.shape[1])[None, :] <= offset + queries[:, None]
        if self.packing is not None:
            own = self.packing.documents
        else:  # all tokens belong to the document that the last slot belongs to
            own = jax.lax.dynamic_slice_in_dim(held, offset, seq, axis=1)
        own = own[:, queries]
        return causal & (held[:, None, :] == own[:, :, None]) & (own > 0)[:, :, None]


@dataclass(frozen=True)
class _Position:
    """Where a row stands before or after a call; the fields of the same names in `Cache`."""

    segment: Int[Array, " batch"]
    document: Int[Array, " batch"]
    count: Int[Array, " batch"]


def _pack(segment_ids: Int[Array, "batch seq"], start: _Position) -> tuple[Packing, _Position]:
    index = jnp.arange(segment_ids.shape[1])
    real = segment_ids > 0
    latest = jax.lax.cummax(jnp.where(real, index, -1), axis=1)  # of the real tokens up to here
    before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    previous = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    previous = jnp.where(before < 0, start.segment[:, None], previous)
    begins = real & (segment_ids != previous)
    seen = jnp.cumsum(real, axis=1, dtype=jnp.int32)
    at_begin = jax.lax.cummax(jnp.where(begins, seen - 1, -start.count[:, None]), axis=1)
    document = start.document[:, None] + jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    length = seen[:, -1] - at_begin[:, -1]
    packing = Packing(
        real=real,
        age=jnp.where(real, seen - 1 - at_begin, 0),
        documents=jnp.where(real, document, 0),
        first=jnp.argmax(real, axis=1).astype(jnp.int32),
        last=latest[:, -1] + 1,
        length=length,
    )
    final = jnp.take_along_axis(segment_ids, jnp.maximum(latest[:, -1:], 0), axis=1)[:, 0]
    segment = jnp.where(latest[:, -1] < 0, start.segment, final)
    return packing, _Position(segment, document[:, -1], length)


def locate(
    config: ModelConfig,
    compute: Compute,
    shape: tuple[int, ...],
    segment_ids: Int[Array, "batch seq"] | None,
    positions: Int[Array, "batch seq"] | None,
    cache: Cache | None,
) -> tuple[Context, Cache | None]:
    """The context of a call, and the cache with its bookkeeping moved past the call (its layers are still the old)."""
    batch, seq = shape
    zero = jnp.zeros(batch, jnp.int32)
    start = _Position(zero, zero, zero) if cache is None else _Position(cache.segment, cache.document, cache.count)
    if segment_ids is None:
        packing = None
        age = start.count[:, None] + jnp.arange(seq, dtype=jnp.int32)
        opens = start.count == 0
        end = _Position(jnp.maximum(start.segment, 1), jnp.where(opens, 1, start.document), start.count + seq)
        documents = jnp.broadcast_to(end.document[:, None], shape)
    else:
        packing, end = _pack(segment_ids, start)
        age, documents = packing.age, packing.documents

    slots = None
    if cache is not None:
        cache.require_room(seq)
        held = jax.lax.dynamic_update_slice(cache.documents, documents, (0, cache.used))
        slots = Slots(held, cache.used)
        cache = dataclasses.replace(
            cache, documents=held, used=cache.used + seq, segment=end.segment, document=end.document, count=end.count
        )
    cos, sin = rotary_tables(config, age if positions is None else positions, jnp.dtype(compute.dtype))
    if slots is not None:  # past the capacity a write would land on other tokens: better NaN than wrong
        cos = jnp.where(slots.offset + seq <= slots.documents.shape[1], cos, jnp.nan)
    return Context(cos, sin, packing, slots, compute), cache
