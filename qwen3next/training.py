"""The optimizer step: gradients of trainable leaves alone, over microbatches weighted by their real tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from qwen3next.config import IGNORED_LABEL, Compute, TrainConfig
from qwen3next.lora import add_adapters, with_dropout
from qwen3next.loss import balance_loss
from qwen3next.mesh import alike, constrain, shard_rows, state_shardings
from qwen3next.model import Qwen3Next
from qwen3next.optim import trainable
from qwen3next.programs import COMPILER_OPTIONS, quick_options
from qwen3next.train_state import TrainState

Batch = dict[str, Int[Array, "rows seq"]]
Metrics = dict[str, Any]  # scalars, and under `layers` the sums of each layer


def loss(
    params: PyTree,
    frozen: PyTree,
    batch: Batch,
    total: Float[Array, ""],
    compute: Compute,
    key: PRNGKeyArray | None,
    z_loss_coef: float = 0.0,
) -> tuple[Float[Array, ""], Metrics]:
    """A microbatch's share of the step's loss: cross-entropy over `total` labels, balance loss by its labels.

    `key` is that of the adapters' dropout, `None` for none. `z_loss_coef` weights the mean squared logsumexp of the
    logits (Zoph et al. 2022, ST-MoE, eq. 5, there of the router's).
    """
    model: Qwen3Next = eqx.combine(params, frozen)
    if key is not None:
        model = with_dropout(model, key)
    hidden = model.hidden(batch["input_ids"], batch["segment_ids"], compute=compute)
    losses = model.cross_entropy(hidden.states, batch["labels"])
    parts = {"loss": losses.nats / total, "balance": balance_loss(hidden.router) * losses.labels / total}
    objective = parts["loss"] + model.config.router_aux_loss_coef * parts["balance"]
    if z_loss_coef:
        parts["z"] = losses.z / total
        objective += z_loss_coef * parts["z"]
    return objective, {**parts, "layers": hidden.stats}


def gradients(
    params: PyTree,
    frozen: PyTree,
    batch: Batch,
    microbatches: int,
    compute: Compute,
    key: PRNGKeyArray | None = None,
    z_loss_coef: float = 0.0,
) -> tuple[PyTree, Metrics]:
    """Gradients of the mean over all real tokens of the batch, taken in `microbatches` parts one after another."""
    total = jnp.maximum(jnp.sum(batch["labels"] != IGNORED_LABEL, dtype=jnp.float32), 1)

    def part(batch: Batch, key: PRNGKeyArray | None) -> tuple[PyTree, Metrics]:
        grads, metrics = jax.grad(loss, has_aux=True)(params, frozen, batch, total, compute, key, z_loss_coef)
        return constrain(grads), metrics

    if microbatches == 1:
        return part(batch, key)
    batches = jax.tree.map(lambda x: shard_rows(x.reshape(microbatches, -1, *x.shape[1:]), axis=1), batch)
    keys = None if key is None else jax.random.split(key, microbatches)
    shapes = jax.eval_shape(part, *jax.tree.map(lambda x: x[0], (batches, keys)))
    zeros, sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    zeros = (constrain(zeros), sums)

    def add(sums: PyTree, step: tuple[Batch, PRNGKeyArray | None]) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, sums, part(*step)), None

    return jax.lax.scan(add, zeros, (batches, keys))[0]


def initial_state(
    config: TrainConfig, transform: optax.GradientTransformation, key: PRNGKeyArray, base: Qwen3Next | None = None
) -> tuple[TrainState, PyTree]:
    """The state before the first step, and the frozen rest of the model: of `base`, or of one that is drawn."""
    model = Qwen3Next(config.model, key=key) if base is None else base
    if config.lora.targets:
        model = add_adapters(model, config.lora, key=jax.random.fold_in(key, 1))
    params, frozen = eqx.partition(model, trainable(model, config.optimizer))
    return TrainState(jnp.int32(0), key, params, transform.init(params)), frozen


def draw_state(
    config: TrainConfig, transform: optax.GradientTransformation, key: PRNGKeyArray
) -> tuple[TrainState, PyTree]:
    """`initial_state`, each array made where it lies on the mesh that is set."""
    begin = partial(initial_state, config, transform)
    places = state_shardings(eqx.filter_eval_shape(begin, key))
    # Drawing the parameters is all compilation; this takes a fraction of the time, for the same numbers.
    return jax.jit(begin, compiler_options=quick_options(), out_shardings=places)(key)


def make_train_step(
    config: TrainConfig, transform: optax.GradientTransformation
) -> Callable[[tuple[PyTree, Batch], TrainState], tuple[TrainState, Metrics]]:
    """`step((frozen, batch), state)`: one optimizer step. Metrics are float32, losses in nats a token."""

    def train_step(inputs: tuple[PyTree, Batch], state: TrainState) -> tuple[TrainState, Metrics]:
        frozen, batch = inputs
        key = jax.random.fold_in(state.key, state.step) if config.lora.targets and config.lora.dropout else None
        grads, metrics = gradients(
            state.params, frozen, batch, config.run.accumulate, config.compute, key, config.run.z_loss_coef
        )
        with jax.numpy_dtype_promotion("standard"):  # optax counts on it
            metrics = {**metrics, "gradient_norm": optax.tree.norm(grads)}
            updates, optimizer = transform.update(grads, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
            return TrainState(state.step + 1, state.key, constrain(params), constrain(optimizer)), alike(metrics)

    return train_step


def jit_train_step(config: TrainConfig, transform: optax.GradientTransformation, **how: Any) -> Any:
    """`make_train_step`, compiled as `train.py` does it: the state is donated."""
    step = make_train_step(config, transform)
    return jax.jit(step, donate_argnums=1, compiler_options=COMPILER_OPTIONS, **how)
