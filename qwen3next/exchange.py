"""Tokens travel to the devices that hold their experts, and back (GShard, Lepikhin et al. 2020): `all_to_all`.

In a pass each device sends every other at most `capacity` rows. What is over waits for the next pass, as many as the
fullest pair needs, so that nothing is dropped whatever the balance and no buffer is larger; or it is dropped. The
number of passes depends on data, so the derivative is written by hand: it sends rows and cotangents the same ways.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from qwen3next.blocks import filled
from qwen3next.config import Overflow
from qwen3next.mesh import axis_sizes

_ALIGNED = 8  # rows of a tile
Apply = Callable[[Any, Array, Array], Array]  # (experts, rows, which expert of this device's each row meets)


@dataclasses.dataclass(frozen=True)
class Route:
    """Which assignment goes where: sorted by device. Those of padding go nowhere, last in the order.

    `place` is an assignment's rank in that order, `first` and `count` are those of a device's.
    """

    order: Int[Array, " assignments"]
    place: Int[Array, "tokens top_k"]
    device: Int[Array, "tokens top_k"]
    first: Int[Array, " devices"]
    count: Int[Array, " devices"]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What is fixed: devices of the `expert` axis, experts of each, and rows that a pair sends in a pass."""

    devices: int
    held: int
    capacity: int
    on_overflow: Overflow

    @classmethod
    def plan(cls, assignments: int, experts: int, factor: float, on_overflow: Overflow) -> "Exchange":
        """For `assignments` of this device; `factor` is the capacity by the rows of a pair in perfect balance."""
        devices = axis_sizes()["expert"]
        capacity = min(max(1, math.ceil(factor * assignments / devices)), assignments)
        if capacity > _ALIGNED:
            capacity = -(-capacity // _ALIGNED) * _ALIGNED
        return cls(devices, experts // devices, capacity, on_overflow)

    def route(self, chosen: Int[Array, "tokens top_k"]) -> Route:
        """Where the assignments go; one whose expert is past the last goes nowhere."""
        device = chosen // self.held
        order = jnp.argsort(device.reshape(-1), stable=True)
        count = jnp.bincount(device.reshape(-1), length=self.devices).astype(jnp.int32)
        return Route(order, jnp.argsort(order).reshape(chosen.shape), device, jnp.cumsum(count) - count, count)

    def overflow(self, route: Route) -> Float[Array, ""]:
        """Assignments of this device that its first pass has no room for."""
        return jnp.sum(jnp.maximum(route.count - self.capacity, 0)).astype(jnp.float32)

    def _passes(self, route: Route) -> Int[Array, ""]:
        """As many as the fullest pair of all devices needs."""
        needed = -(-jnp.max(route.count) // self.capacity)
        return needed if self.devices == 1 else jax.lax.pmax(needed, "expert")

    def repeat(self, route: Route, one: Callable[[Any, Any], PyTree], start: PyTree) -> PyTree:
        """`carry = one(number, carry)` for each pass, on all devices of the axis as often."""
        if self.on_overflow == "drop":
            return one(0, start)
        passes = self._passes(route)

        def body(carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            return carry[0] + 1, one(carry[0], carry[1])

        return jax.lax.while_loop(lambda carry: carry[0] < passes, body, (jnp.int32(0), start))[1]

    def source(self, route: Route, number: Any) -> Int[Array, " places"]:
        """The assignment at each place of the buffer that is sent in a pass; past the last one for an empty place."""
        rank = number * self.capacity + jnp.arange(self.capacity)
        place = route.first[:, None] + rank
        sent = rank < route.count[:, None]
        return jnp.where(sent, route.order[jnp.minimum(place, route.order.size - 1)], route.order.size).reshape(-1)

    def target(self, route: Route, number: Any) -> tuple[Int[Array, "tokens top_k"], Bool[Array, "tokens top_k"]]:
        """Each assignment's place in that buffer, and whether it is sent in this pass."""
        rank = route.place - route.first[route.device] - number * self.capacity
        sent = (rank >= 0) & (rank < self.capacity) & (route.device < self.devices)
        return jnp.where(sent, route.device * self.capacity + rank, 0), sent

    def swap(self, x: Array) -> Array:
        """Each device's part of the buffer to it; its own inverse."""
        if self.devices == 1:
            return x
        return jax.lax.all_to_all(x, "expert", split_axis=0, concat_axis=0, tiled=True)

    def owner(self, route: Route, source: Array, chosen: Array) -> Int[Array, " places"]:
        """Of the rows that arrive, which expert of this device's they meet: the last one, where there is no row."""
        flat = chosen.reshape(-1)
        return self.swap(flat.at[source].get(mode="fill", fill_value=-1).astype(jnp.int32) % self.held)


def _gathered(y: Array, place: Array, weights: Array) -> Array:
    """`sum_k weights[t, k] y[place[t, k]]` in float32, one k at a time: all at once are k times the memory."""

    def add(total: Array, step: tuple[Array, Array]) -> tuple[Array, None]:
        place, weight = step
        return total + weight[:, None].astype(jnp.float32) * y[place].astype(jnp.float32), None

    total = jnp.zeros((place.shape[0], y.shape[1]), jnp.float32)
    return jax.lax.scan(add, total, (place.T, weights.T))[0]


@eqx.filter_custom_vjp
def _exchange(
    moving: tuple[Any, Array, Array], chosen: Array, exchange: Exchange, apply: Apply
) -> Float[Array, "tokens hidden"]:
    experts, x, weights = moving
    route = exchange.route(chosen)

    def one(number: Any, total: Array) -> Array:
        source = exchange.source(route, number)
        rows = exchange.swap(filled(x, source // chosen.shape[1]))
        y = exchange.swap(apply(experts, rows, exchange.owner(route, source, chosen)))
        place, sent = exchange.target(route, number)
        return total + _gathered(y, place, jnp.where(sent, weights, 0))

    return exchange.repeat(route, one, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)


@_exchange.def_fwd
def _forward(perturbed: Any, moving: Any, chosen: Array, exchange: Exchange, apply: Apply) -> tuple[Array, None]:
    return _exchange(moving, chosen, exchange, apply), None


@_exchange.def_bwd
def _backward(
    _: None, cotangent: Array, perturbed: Any, moving: Any, chosen: Array, exchange: Exchange, apply: Apply
) -> tuple[Any, Array, Array]:
    """`y = E(x)` and `out = sum_k w y` give `dE, dx = E'(w c)` and `dw = <c, y>`, of rows where their expert is."""
    experts, x, weights = moving
    route, top_k = exchange.route(chosen), chosen.shape[1]
    trained, rest = eqx.partition(experts, perturbed[0])
    flat_weights = weights.reshape(-1)

    def one(number: Any, sums: tuple[PyTree, Array, Array]) -> tuple[PyTree, Array, Array]:
        d_trained, dx, dweights = sums
        source = exchange.source(route, number)
        owner = exchange.owner(route, source, chosen)
        rows, c = (exchange.swap(filled(value, source // top_k)) for value in (x, cotangent))
        weight = exchange.swap(filled(flat_weights, source))
        y, pull = jax.vjp(lambda trained, rows: apply(eqx.combine(trained, rest), rows, owner), trained, rows)
        d_experts, d_rows = pull(c * weight[:, None])
        d_weight = jnp.sum(c.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
        d_rows, d_weight = exchange.swap(d_rows), exchange.swap(d_weight)
        place, sent = exchange.target(route, number)
        dx = dx + _gathered(d_rows, place, sent)
        dweights = dweights + jnp.where(sent, d_weight[place], 0)
        d_trained = jax.tree.map(lambda total, slope: total + slope.astype(jnp.float32), d_trained, d_experts)
        return d_trained, dx, dweights

    sums = exchange.repeat(route, one, jax.tree.map(lambda y: jnp.zeros(y.shape, jnp.float32), (trained, x, weights)))
    return jax.tree.map(lambda total, y: total.astype(y.dtype), sums, (trained, x, weights))


def over_devices(
    apply: Apply,
    experts: Any,
    x: Float[Array, "tokens hidden"],
    weights: Float[Array, "tokens top_k"],
    chosen: Int[Array, "tokens top_k"],
    *,
    exchange: Exchange,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, ""]]:
    """`sum_k weights[t, k] * expert_{chosen[t, k]}(x_t)`, and how many assignments the first pass had no room for.

    `experts` are this device's, `apply(experts, rows, owner)` computes them on rows. `chosen` counts all devices', and
    is past the last expert for padding, of which nothing is sent. All devices of the axis call this together.
    """
    overflow = exchange.overflow(exchange.route(chosen))
    return _exchange((experts, x, weights), chosen, exchange, apply), overflow
