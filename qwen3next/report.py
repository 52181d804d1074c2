"""What a run costs, counted on the program itself: parameters, and the FLOPs of its matrix products."""

import math
from typing import Any

import jax
from jax.extend.core import Jaxpr
from jaxtyping import PyTree

from qwen3next.config import ModelConfig
from qwen3next.jaxprs import equations


def _product_flops(equation: Any) -> int:
    left, out = (variable.aval.shape for variable in (equation.invars[0], equation.outvars[0]))
    if equation.primitive.name == "dot_general":
        contracting = equation.params["dimension_numbers"][0][0]
        return 2 * math.prod(out) * math.prod(left[axis] for axis in contracting)
    # Each row meets one group's matrix, also where rows are contracted and every group gets a matrix.
    rows, inner = left
    return 2 * rows * inner * out[-1] if len(out) == 2 else 2 * rows * out[-2] * out[-1]


def jaxpr_flops(jaxpr: Jaxpr) -> int:
    """Floating-point operations of a traced program's matrix products, loops counted as often as they run.

    (XLA's own analysis counts a loop's body once.) Elementwise work is left out.
    """
    products = ("dot_general", "ragged_dot_general")
    walked = equations(jaxpr)
    return sum(times * _product_flops(equation) for equation, times in walked if equation.primitive.name in products)


def count_parameters(model: PyTree) -> int:
    """Elements of the array leaves, concrete or abstract."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model) if hasattr(leaf, "shape"))


def active_parameters(model: PyTree, config: ModelConfig) -> int:
    """Parameters that one token meets: all but the experts that it is not sent to."""
    moe_layers = sum(kind.mlp == "moe" for kind in config.layer_kinds)
    idle = config.num_experts - config.num_experts_per_tok
    return count_parameters(model) - moe_layers * idle * 3 * config.hidden_size * config.moe_intermediate_size
