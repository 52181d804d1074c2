"""Walking a traced program."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

INTERNAL = "internal"  # the scope of what is computed again, whatever the choice of remat, to be there once at a time
CHECKPOINT = jax.make_jaxpr(jax.checkpoint(jnp.sin))(0.0).eqns[0].primitive.name


def inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    """The programs inside an equation: of a loop's body, a call, a unit of rematerialisation."""

    def found(value: Any) -> list[Jaxpr]:
        if isinstance(value, ClosedJaxpr):
            return [value.jaxpr]
        if isinstance(value, Jaxpr):
            return [value]
        return [jaxpr for item in value for jaxpr in found(item)] if isinstance(value, (tuple, list)) else []

    return [jaxpr for value in equation.params.values() for jaxpr in found(value)]


def equations(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Every equation, however deep, and how often it runs: a loop's as often as it goes round, a kernel's by its grid.

    A loop whose length depends on data counts once.
    """
    for equation in jaxpr.eqns:
        yield equation, times
        length = equation.params["length"] if equation.primitive.name == "scan" else 1
        if equation.primitive.name == "pallas_call":
            length = math.prod(equation.params["grid_mapping"].grid)
        for inner in inner_jaxprs(equation):
            yield from equations(inner, times * length)


def remat_regions(jaxpr: Jaxpr) -> int:
    """Units of rematerialisation in a program, counted as they run, that a choice of remat makes."""
    return sum(times for equation, times in equations(jaxpr) if is_unit(equation))


def is_unit(equation: JaxprEqn) -> bool:
    """Whether an equation is a unit of rematerialisation that a choice makes."""
    return equation.primitive.name == CHECKPOINT and INTERNAL not in str(equation.source_info.name_stack)
