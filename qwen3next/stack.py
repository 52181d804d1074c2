"""Layers stacked and scanned: the one helper, and the hybrid decoder made of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from qwen3next.cache import LayerCache
from qwen3next.config import ModelConfig
from qwen3next.context import Context
from qwen3next.layer import Layer, LayerStats
from qwen3next.mesh import ALIKE, HEADS, ROWS, axis_sizes, tokens_travel
from qwen3next.mixer import MixerStats
from qwen3next.pattern import Grouped, Pattern, Run, find_pattern
from qwen3next.shards import Shards, on_devices

M = TypeVar("M", bound=eqx.Module)
Hidden = Float[Array, "batch seq hidden"]
_MIXER: tuple[Any, Any, Any] = (HEADS, HEADS, ALIKE)
_STATS: tuple[Any, Any] = (ALIKE, MixerStats(*_MIXER))  # how a layer's sums lie on the devices


def _barrier(wanted: bool) -> AbstractContextManager[Any]:
    """Keeps a loop of one iteration a loop, so that the compiler cannot merge its body with what stands around it."""
    return set_xla_metadata(**{"skip-simplify-while-loops_trip-count-one": "true"}) if wanted else nullcontext()


class Stacked(eqx.Module, Generic[M]):
    """`length` modules of one structure: a module whose array leaves have a leading axis."""

    modules: M
    length: int = eqx.field(static=True)

    def __init__(self, make: Callable[[PRNGKeyArray], M], length: int, *, key: PRNGKeyArray):
        self.modules = eqx.filter_vmap(make)(jax.random.split(key, length))
        self.length = length

    def scan(
        self,
        apply: Callable[[M, Hidden, PyTree], tuple[Hidden, PyTree]],
        h: Hidden,
        xs: PyTree,
        context: Context,
        *,
        wrap: Callable[..., Any] = lambda body, straight: body,
    ) -> tuple[Hidden, PyTree]:
        """`h, y = apply(module, h, x)` for each module in turn; returns the last `h` and the `y`s, stacked.

        Only `h` is carried and only `y` returned: the parameters are inputs of the scan and come out of it nowhere.
        `wrap` makes a step a unit of rematerialisation.
        """
        compute = context.compute
        arrays, static = eqx.partition(self.modules, eqx.is_array)

        def body(h: Hidden, step: tuple[PyTree, PyTree]) -> tuple[Hidden, PyTree]:
            arrays, x = step
            return apply(eqx.combine(arrays, static), h, x)

        with _barrier(compute.remat.barrier and not compute.unroll and self.length == 1):
            step = wrap(body, straight=compute.unroll)
            return jax.lax.scan(step, h, (arrays, xs), length=self.length, unroll=compute.unroll)


def _view(leaf: Array) -> Any:
    """An array whose slices are views of its memory, where that can be."""
    return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.asarray(leaf)


def _of(kind: type[M], **fields: Any) -> M:
    """A module of these fields, none drawn."""
    module = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(module, name, value)
    return module


def _call(shards: Shards, h: Hidden, context: Context, cache: LayerCache | None) -> PyTree:
    layer = shards.gather(h.dtype, h, stay=("expert",) if tokens_travel(context.compute, axis_sizes()) else ())
    return layer(h, context, cache)


class HybridBlock(eqx.Module):
    """Runs of layers, one after another: a cycle, or what stands before or after the cycles."""

    runs: tuple[Stacked[Layer], ...]

    def __init__(self, config: ModelConfig, runs: tuple[Run, ...], *, key: PRNGKeyArray):
        keys = jax.random.split(key, max(len(runs), 1))
        self.runs = tuple(
            Stacked(lambda key, kind=run.kind: Layer(config, kind, key=key), run.length, key=key)
            for run, key in zip(runs, keys, strict=False)
        )

    def __call__(self, h: Hidden, caches: tuple[PyTree, ...], context: Context) -> tuple[Hidden, tuple[PyTree, ...]]:
        """Residual stream, and for each run the stacked (cache, sums) of its layers."""

        def apply(layer: Layer, h: Hidden, cache: LayerCache | None) -> tuple[Hidden, PyTree]:
            h, cache, stats = on_devices(_call, layer, "layer", (h, context, cache), (ROWS, ROWS, LayerStats(*_STATS)))
            return h, (cache, stats)

        outputs = []
        for run, cache in zip(self.runs, caches, strict=True):
            wrap = partial(context.compute.remat.wrap_layer, mixer=run.modules.kind.mixer)
            h, output = run.scan(apply, h, cache, context, wrap=wrap)
            outputs.append(output)
        return h, tuple(outputs)


class Decoder(eqx.Module):
    """All layers, in the order that the config gives: a prefix, a scanned stack of cycles, a remainder."""

    prefix: HybridBlock
    cycles: Stacked[HybridBlock]
    remainder: HybridBlock
    pattern: Pattern = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        self.pattern = find_pattern(config.layer_kinds)
        prefix_key, cycles_key, remainder_key = jax.random.split(key, 3)
        self.prefix = HybridBlock(config, self.pattern.prefix, key=prefix_key)
        self.cycles = Stacked(
            lambda key: HybridBlock(config, self.pattern.cycle, key=key), self.pattern.repeats, key=cycles_key
        )
        self.remainder = HybridBlock(config, self.pattern.remainder, key=remainder_key)

    def layers(self) -> list[Layer]:
        """The layers one by one, in order, each with its own arrays."""
        blocks = (self.prefix, self.cycles.modules, self.remainder)
        return self.pattern.flatten(Grouped(*(tuple(run.modules for run in block.runs) for block in blocks)))

    def apart(self) -> "Decoder":
        """The same decoder, each layer a stack of its own: no layer's weights are copied out of a stack, and no cache
        into one, which is most of what a step of one token takes on a CPU. There the arrays share their memory.
        """
        views = jax.tree.map(_view, self, is_leaf=eqx.is_array)
        *others, last = (jax.tree.map(lambda leaf: leaf[None], layer) for layer in views.layers())
        runs = tuple(Run(layer.kind, 1) for layer in (*others, last))
        pattern = Pattern(prefix=runs[:-1], cycle=runs[-1:], repeats=1, remainder=())
        cycles = _of(HybridBlock, runs=(_of(Stacked, modules=jax.tree.map(lambda leaf: leaf[None], last), length=1),))
        decoder = _of(
            Decoder,
            prefix=_of(HybridBlock, runs=tuple(_of(Stacked, modules=layer, length=1) for layer in others)),
            cycles=_of(Stacked, modules=cycles, length=1),
            remainder=_of(HybridBlock, runs=()),
            pattern=pattern,
        )
        return jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=True), decoder)

    def __call__(
        self, h: Hidden, caches: tuple[LayerCache | None, ...], context: Context
    ) -> tuple[Hidden, tuple[LayerCache | None, ...], tuple[LayerStats, ...]]:
        """Residual stream after the last layer; a cache and sums for each layer, in order."""
        wrap = context.compute.remat.wrap_block
        grouped = self.pattern.group(caches)

        def apply(block: HybridBlock, h: Hidden, caches: tuple[PyTree, ...]) -> tuple[Hidden, tuple[PyTree, ...]]:
            return block(h, caches, context)

        def once(block: HybridBlock, h: Hidden, caches: tuple[PyTree, ...]) -> tuple[Hidden, tuple[PyTree, ...]]:
            return (wrap(apply, straight=True) if block.runs else apply)(block, h, caches)

        h, before = once(self.prefix, h, grouped.prefix)
        h, cycle = self.cycles.scan(apply, h, grouped.cycle, context, wrap=wrap)
        h, after = once(self.remainder, h, grouped.remainder)
        outputs = self.pattern.flatten(Grouped(before, cycle, after))
        return h, tuple(cache for cache, _ in outputs), tuple(stats for _, stats in outputs)
