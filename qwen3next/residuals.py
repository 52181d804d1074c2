"""What the backward pass finds kept of each kind of layer, read off the traced derivative."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal
from jaxtyping import PyTree

from qwen3next.config import Compute, ModelConfig
from qwen3next.context import Context, locate
from qwen3next.jaxprs import inner_jaxprs
from qwen3next.layer import Layer
from qwen3next.pattern import find_pattern
from qwen3next.stack import HybridBlock

# Wrappers that pass a value on: the outer one, as JAX puts it around a kept value, and calls.
_THROUGH = ("reduce_precision", "copy", "optimization_barrier")


class Saved(NamedTuple):
    """An array that a unit keeps: its name, or the primitive that made it; `source` is the scope of the code."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    source: str


def _origin(variable: Any, jaxpr: Jaxpr) -> tuple[str, str]:
    """Name and scope of what made a variable."""
    for equation in jaxpr.eqns:
        if variable not in equation.outvars:
            continue
        kind, scope = equation.primitive.name, str(equation.source_info.name_stack)
        if kind == "name":
            return equation.params["name"], scope
        if kind == "device_put":
            name, deeper = _origin(equation.invars[equation.outvars.index(variable)], jaxpr)
            return f"offloaded {name}", deeper
        if kind in _THROUGH:
            return _origin(equation.invars[equation.outvars.index(variable) if len(equation.invars) > 1 else 0], jaxpr)
        inner = inner_jaxprs(equation)
        if len(inner) == 1 and len(inner[0].outvars) == len(equation.outvars):
            name, deeper = _origin(inner[0].outvars[equation.outvars.index(variable)], inner[0])
            return name, deeper or scope
        return kind, scope
    return "input", ""


def kept(unit: Callable[..., PyTree], *args: PyTree) -> list[Saved]:
    """The arrays that the derivative of `unit(*args)` keeps besides its arguments; arguments may be abstract."""
    closed = jax.make_jaxpr(lambda *args: jax.vjp(unit, *args)[1])(*args)
    found, seen = [], set(map(id, closed.jaxpr.invars))
    for variable in closed.jaxpr.outvars:
        if isinstance(variable, Literal) or id(variable) in seen or variable in closed.jaxpr.constvars:
            continue
        seen.add(id(variable))
        shape, dtype = variable.aval.shape, jnp.dtype(variable.aval.dtype)
        name, scope = _origin(variable, closed.jaxpr)
        found.append(Saved(name, tuple(shape), dtype.name, math.prod(shape) * dtype.itemsize, scope))
    return sorted(found, key=lambda saved: -saved.bytes)


def saved_values(config: ModelConfig, compute: Compute, batch: int, length: int) -> dict[str, list[Saved]]:
    """By kind of layer, `linear_attention/moe`, what one layer keeps for rows of `batch` x `length` tokens.

    A unit's input is kept as well: the first entry, `unit input`. Under `cycle` stands what a cycle keeps, if cycles
    are units; what its layers keep then lives only while the cycle's backward pass runs.
    """
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    context = eqx.filter_eval_shape(lambda ids: locate(config, compute, (batch, length), ids, None, None)[0], ids)
    h = jax.ShapeDtypeStruct((batch, length, config.hidden_size), jnp.dtype(compute.dtype))
    given = Saved("unit input", h.shape, h.dtype.name, math.prod(h.shape) * h.dtype.itemsize, "")
    key, remat, found = jax.random.key(0), compute.remat, dict[str, list[Saved]]()

    def split(module: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        arrays, static = eqx.partition(module, lambda leaf: hasattr(leaf, "shape"))
        return arrays, lambda arrays: eqx.combine(arrays, static)

    pattern = find_pattern(config.layer_kinds)
    if remat.placement in ("block", "both"):
        block, whole = split(eqx.filter_eval_shape(HybridBlock, config, pattern.cycle, key=key))

        def cycle(arrays: PyTree, h: jax.Array, context: Context) -> PyTree:
            none = tuple(None for _ in pattern.cycle)
            return remat.wrap_block(lambda block, h: block(h, none, context), straight=False)(whole(arrays), h)

        found["cycle"] = [given, *kept(cycle, block, h, context)]
    for kind in dict.fromkeys(config.layer_kinds):
        layer, join = split(eqx.filter_eval_shape(Layer, config, kind, key=key))

        def apply(
            arrays: PyTree, h: jax.Array, context: Context, join: Callable[..., Any] = join, mixer: str = kind.mixer
        ) -> PyTree:
            def step(one: Layer, h: jax.Array) -> PyTree:
                out, _, stats = one(h, context, None)
                return out, stats

            return remat.wrap_layer(step, mixer, straight=False)(join(arrays), h)

        found["/".join(kind)] = [given, *kept(apply, layer, h, context)]
    return found
