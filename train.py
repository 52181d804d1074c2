"""One training run, from a preset and overrides to a folder that decode.py reads.

python train.py configs/tiny.toml
python train.py configs/tiny.toml --run.folder runs/longer --run.steps 2000 --optimizer.learning-rate 1e-3
python train.py configs/tiny.toml --help
"""

import math
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp

from qwen3next.cli import parse
from qwen3next.config import TrainConfig
from qwen3next.data import eval_batches, read_documents, split_documents, tokenize, train_batches
from qwen3next.errors import exit_on_input_error, require
from qwen3next.evaluate import compressed_bits_per_byte, evaluate
from qwen3next.generate import check_prompts, generate
from qwen3next.model import Qwen3Next
from qwen3next.monitor import Monitor, StopRequest
from qwen3next.optim import optimizer, schedule, trainable
from qwen3next.report import active_parameters, count_flops, count_parameters
from qwen3next.run_folder import check_run_folder, create_run, save_weights
from qwen3next.tokenizer import load_tokenizer
from qwen3next.tracker import make_tracker
from qwen3next.training import TrainState, make_train_step


def main(config: TrainConfig) -> int:
    """The run; its exit status. Ctrl-C or SIGTERM ends it after the step that it meets."""
    with StopRequest() as stop:
        return train(config, stop)


def train(config: TrainConfig, stop: StopRequest) -> int:
    """Everything from text to weights."""
    run, data, started = config.run, config.data, time.perf_counter()
    check_run_folder(config)

    # --- data ---------------------------------------------------------------------------------------------------------
    tokenizer = load_tokenizer(data.tokenizer)
    require(
        tokenizer.vocab_size <= config.model.vocab_size,
        f"model.vocab_size is {config.model.vocab_size}; the tokenizer needs at least {tokenizer.vocab_size}",
    )
    documents = split_documents(read_documents(data), data.held_out, run.seed)
    train_corpus, held_out = (tokenize(side, tokenizer) for side in documents)
    batches = iter(train_batches(train_corpus, data, run.seed))

    # --- model --------------------------------------------------------------------------------------------------------
    # Drawing the parameters is all compilation; unoptimised it takes a third of the time and gives the same numbers.
    unoptimised = {"xla_backend_optimization_level": 0}
    initialise = jax.jit(lambda key: Qwen3Next(config.model, key=key), compiler_options=unoptimised)
    model = initialise(jax.random.key(run.seed))
    params, frozen = eqx.partition(model, trainable(model))
    parameters, active = count_parameters(model), active_parameters(model, config.model)
    prompt = tokenizer.encode(run.sample_prompt).tolist() or [tokenizer.end_of_text]
    if run.sample_tokens:
        check_prompts(model, [prompt], run.sample_tokens)

    # --- optimizer ----------------------------------------------------------------------------------------------------
    learning_rate = schedule(config.optimizer, run.steps)
    transform = optimizer(config.optimizer, run.steps)
    state = TrainState(params, eqx.filter_jit(transform.init)(params))
    del model, params  # the first step takes their buffers

    # --- step ---------------------------------------------------------------------------------------------------------
    train_step = make_train_step(config, transform)
    step = eqx.filter_jit(train_step, donate="all-except-first")
    shape = jax.ShapeDtypeStruct((data.batch_size, data.sequence_length), jnp.int32)
    flops = count_flops(train_step, (frozen, dict.fromkeys(("input_ids", "labels", "segment_ids"), shape)), state)

    # --- loop ---------------------------------------------------------------------------------------------------------
    folder = create_run(config)
    tracker, wandb = make_tracker(folder, config)
    monitor = Monitor(run.steps, data.batch_size * data.sequence_length)
    sides = zip(("train on", "held out"), documents, (train_corpus, held_out), strict=True)
    for name, side, corpus in sides:
        monitor.say(f"{name}: {len(side):,} documents, {corpus.text_bytes:,} bytes, {len(corpus.tokens):,} tokens")
    monitor.say(f"model: {parameters:,} parameters, {active:,} of them active for a token, {config.compute.dtype}")
    monitor.say(f"step: {data.batch_size} x {data.sequence_length} tokens, {flops / 1e9:.1f} GFLOP of matrix products")
    monitor.say(f"run: {run.steps} steps into {folder}; Weights & Biases: {wandb}")

    def evaluate_and_sample(number: int, limit: int | None) -> float:
        model = eqx.combine(state.params, frozen)
        rows = eval_batches(held_out, data.batch_size, data.sequence_length)
        result = evaluate(model, held_out, rows, limit, config.compute)
        tracker.log(number, {f"held_out/{name}": value for name, value in result.items()})
        text = f"step {number}: held-out loss {result['loss']:.3f}, {result['bits_per_byte']:.3f} bits per byte"
        if run.sample_tokens:
            made = [int(token[0]) for token in generate(model, [prompt], run.sample_tokens, compute=config.compute)]
            text += f"; sample:\n{run.sample_prompt}{tokenizer.decode(made)}\n"
        monitor.say(text)
        return result["bits_per_byte"]

    number, values = 0, dict[str, float]()
    with monitor:
        for number in range(1, run.steps + 1):
            state, metrics = step((frozen, jax.tree.map(jnp.asarray, next(batches))), state)
            if number == 1:
                jax.block_until_ready(metrics)
                monitor.say(f"first step after {time.perf_counter() - started:.1f} s")
                monitor.start_clock(number)
            last = number == run.steps or stop.wanted
            log, assess, save = (last or number % n == 0 for n in (run.log_every, run.eval_every, run.save_every))
            if log or save:
                values = {name: float(value) for name, value in metrics.items()}
                if not all(map(math.isfinite, values.values())):
                    monitor.say(f"stopped at step {number}, which is not finite: {values}; nothing was saved since")
                    return 1
            if log:
                speed = monitor.step(number, values["loss"])
                rate = float(jnp.asarray(learning_rate(number - 1)))
                tracker.log(number, {**values, "learning_rate": rate, "tokens_per_second": speed})
            if save:
                save_weights(folder, eqx.combine(state.params, frozen))
            if last:
                break
            if assess:
                evaluate_and_sample(number, run.eval_batches)
            if assess or save:
                monitor.start_clock(number)
        if number == run.steps:
            bits = {"this model": evaluate_and_sample(number, None)}
            bits |= compressed_bits_per_byte(b"".join(document.text for document in documents[1]))
            tracker.log(number, {f"held_out_bits_per_byte/{name}": value for name, value in bits.items()})
            monitor.say("held-out bits per byte: " + ", ".join(f"{name} {value:.3f}" for name, value in bits.items()))
    tracker.close()
    monitor.say(f"ended after step {number} of {run.steps} and {time.perf_counter() - started:.0f} s; decode from it:")
    monitor.say(f"  python decode.py {folder} --prompt {run.sample_prompt!r}")
    return 0


if __name__ == "__main__":
    with exit_on_input_error():
        sys.exit(main(parse(sys.argv)))
