"""The optimizer: AdamW under a warm-up and cosine schedule, with rules by a parameter's path."""

import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

from qwen3next.config import OptimizerConfig
from qwen3next.errors import require
from qwen3next.tree import leaf_path

_NO_DECAY = ("norm.weight", "layernorm.weight", "bias", "A_log")


def trainable(model: eqx.Module) -> PyTree[bool]:
    """True at each leaf that gradients and optimizer state exist for."""
    return jax.tree.map(eqx.is_inexact_array, model)


def decayed(params: PyTree) -> PyTree[bool]:
    """True at matrices. Norms, biases, decay parameters are told by name: stacked, every leaf looks like a matrix."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not leaf_path(path).endswith(_NO_DECAY), params)


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by optimizer step: linear from 0 to the peak, then a cosine to `final_fraction` of it."""
    require(
        config.warmup_steps < steps,
        f"optimizer.warmup_steps is {config.warmup_steps}; it must be below run.steps, {steps}",
    )
    peak = config.learning_rate
    return optax.warmup_cosine_decay_schedule(0.0, peak, config.warmup_steps, steps, peak * config.final_fraction)


def optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW. The parts have names, by which their states are saved."""
    return optax.named_chain(
        ("clip", optax.clip_by_global_norm(config.clip_norm)),
        ("adam", optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)),
        ("decay", optax.add_decayed_weights(config.weight_decay, mask=decayed)),
        ("schedule", optax.scale_by_learning_rate(schedule(config, steps))),
    )
