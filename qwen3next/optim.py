"""The optimizer: AdamW under a warm-up and cosine schedule, with rules by a parameter's path.

A rule sees one layer's array: how many layers are stacked in a leaf changes nothing.
"""

import dataclasses
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from qwen3next.config import OptimizerConfig
from qwen3next.errors import InputError, require
from qwen3next.lora import LEAVES
from qwen3next.tree import leaf_path, matches, near, stacked_axes


class Rule(NamedTuple):
    """What holds for one leaf: whether it is trained, whether it decays, and its learning rate by the schedule's."""

    trained: bool
    decay: bool
    learning_rate: float


def _exception(text: str) -> tuple[str, dict[str, bool | float]]:
    """A pattern and what it changes, of `PATTERN SETTING ...`."""
    pattern, *settings = text.split() or [""]
    require(bool(settings), f"optimizer.rules: {text!r} must be a pattern of leaves and what holds for them")
    changes: dict[str, bool | float] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if setting == "frozen":
            changes["trained"] = False
        elif name == "decay" and value in ("yes", "no"):
            changes["decay"] = value == "yes"
        elif name == "learning_rate" and re.fullmatch(r"\d+(\.\d*)?(e[+-]?\d+)?", value):
            changes["learning_rate"] = float(value)
        else:
            allowed = "frozen, decay=yes, decay=no, learning_rate=FACTOR"
            raise InputError(f"optimizer.rules: {setting!r} in {text!r} is unknown; allowed: {allowed}")
    return pattern, changes


def leaf_rules(model: PyTree, config: OptimizerConfig) -> dict[str, Rule]:
    """The rule of each array of a model (or of its shape), by path.

    If there are adapters, they alone are trained, otherwise every array of floats. Matrices decay; what is less in one
    layer (norms, biases, `A_log`, `dt_bias`) does not.
    """
    exceptions = [_exception(text) for text in config.rules]
    leaves = {leaf_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model)}
    adapted, rules = any(path.endswith(LEAVES) for path in leaves), {}
    for path, leaf in leaves.items():
        trained = path.endswith(LEAVES) if adapted else jnp.issubdtype(leaf.dtype, jnp.inexact)
        rules[path] = Rule(bool(trained), leaf.ndim - stacked_axes(path) >= 2, 1.0)
        for pattern, changes in exceptions:
            if matches(pattern, path):
                rules[path] = rules[path]._replace(**changes)
    return rules


def trainable(model: PyTree, config: OptimizerConfig = OptimizerConfig()) -> PyTree[bool]:
    """True at each leaf that gradients and optimizer state exist for.

    Raises `InputError` for an exception to the rules that matches no leaf to train, and if none is left to train.
    """
    rules = leaf_rules(model, config)
    plain = leaf_rules(model, dataclasses.replace(config, rules=()))
    leaves = [path for path, rule in plain.items() if rule.trained]
    for text in config.rules:
        pattern, _ = _exception(text)
        found = any(matches(pattern, path) for path in leaves)
        require(found, f"optimizer.rules: {pattern!r} is no leaf that is trained; allowed: {near(pattern, leaves)}")
    require(any(rule.trained for rule in rules.values()), "optimizer.rules freeze every leaf; at least one must train")
    return jax.tree_util.tree_map_with_path(lambda path, _: rules[leaf_path(path)].trained, model)


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

    def decayed(params: PyTree) -> PyTree[bool]:
        rules = leaf_rules(params, config)
        return jax.tree_util.tree_map_with_path(lambda path, _: rules[leaf_path(path)].decay, params)

    def scaled(updates: PyTree, params: PyTree) -> PyTree:
        rules = leaf_rules(params, config)
        return jax.tree_util.tree_map_with_path(
            lambda path, update: update * rules[leaf_path(path)].learning_rate, updates
        )

    parts = [
        ("clip", optax.clip_by_global_norm(config.clip_norm)),
        ("adam", optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)),
        ("decay", optax.add_decayed_weights(config.weight_decay, mask=decayed)),
    ]
    if config.rules:
        parts.append(("rules", optax.stateless(scaled)))
    return optax.named_chain(*parts, ("schedule", optax.scale_by_learning_rate(schedule(config, steps))))
