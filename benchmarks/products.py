"""The matrix products that a program contains, each timed by itself: what is left when all else costs nothing."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array

from qwen3next.jaxprs import equations

_LONG_ENOUGH = 0.01  # seconds; a shorter product is run several times, so that neither clock nor dispatch counts much
_MOST_CALLS = 200


class Product(NamedTuple):
    """One kind of `dot_general`, and how often the program runs it."""

    left: jax.ShapeDtypeStruct
    right: jax.ShapeDtypeStruct
    params: dict[str, Any]
    times: int

    @property
    def flops(self) -> int:
        """Of one of them."""
        (contracting, _), _ = self.params["dimension_numbers"]
        out = jax.eval_shape(self.apply, self.left, self.right)
        return 2 * math.prod(out.shape) * math.prod(self.left.shape[axis] for axis in contracting)

    def apply(self, left: Array, right: Array) -> Array:
        """The very operation of the program."""
        return jax.lax.dot_general_p.bind(left, right, **self.params)


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def products(function: Callable[..., Any], *args: Any) -> list[Product]:
    """The products of one call, loops counted as often as they run. Arguments may be abstract.

    Raises `ValueError` for grouped products, whose time depends on the groups.
    """
    found = dict[str, Product]()
    for equation, times in equations(eqx.filter_make_jaxpr(function)(*args)[0].jaxpr):
        if equation.primitive.name == "ragged_dot_general":
            raise ValueError("the program contains ragged products; needed: compute.dispatch blocks or dense")
        if equation.primitive.name == "dot_general":
            left, right = (_shape(variable.aval) for variable in equation.invars)
            key = f"{left} {right} {equation.params}"
            before = found[key].times if key in found else 0
            found[key] = Product(left, right, equation.params, before + times)
    return list(found.values())


def prepare(product: Product) -> Callable[[], float]:
    """A function that returns the seconds of one such product on random operands; compiled."""
    left, right = (
        jax.random.normal(jax.random.key(number), side.shape, side.dtype)
        for number, side in enumerate((product.left, product.right))
    )
    apply = jax.jit(product.apply)
    jax.block_until_ready(apply(left, right))

    def run(calls: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready([apply(left, right) for _ in range(calls)])
        return (time.perf_counter() - began) / calls

    calls = min(_MOST_CALLS, math.ceil(_LONG_ENOUGH / run(1)))
    return lambda: run(calls)


def time_products(found: list[Product]) -> Callable[[], dict[str, float]]:
    """A function that times each product once; `seconds` is the sum over all, as often as each is run."""
    runs = [(prepare(product), product.times) for product in found]
    flops = sum(product.flops * product.times for product in found)
    return lambda: {"seconds": sum(run() * times for run, times in runs), "flops": flops, "kinds": len(runs)}
