"""One training run, from a preset and overrides to a folder that decode.py reads.

python train.py configs/tiny.toml
python train.py configs/tiny.toml --run.folder runs/longer --run.steps 2000 --optimizer.learning-rate 1e-3
python train.py configs/tiny.toml --help
python train.py configs/qwen3_next_80b_a3b.toml --compile-only --topology v5p-256
"""

import math
import sys
import time
import zlib
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp

from qwen3next import hosts
from qwen3next.checkpoint import check_base, fingerprint, load_base
from qwen3next.cli import dump_config, parse
from qwen3next.config import TrainConfig
from qwen3next.data.batches import TrainBatches, eval_batches
from qwen3next.data.texts import bytes_per_label, held_out_text, read_texts, text_fingerprint
from qwen3next.errors import exit_on_input_error, require
from qwen3next.evaluate import compressed_bits_per_byte, evaluate
from qwen3next.generate import check_prompts, generate
from qwen3next.lora import strip
from qwen3next.mesh import axis_sizes, check_mesh, current_mesh, describe_mesh, place, state_shardings, use_mesh
from qwen3next.monitor import Monitor, StopRequest
from qwen3next.optim import optimizer, schedule
from qwen3next.plan import compile_only, show_plan
from qwen3next.programs import keep_programs
from qwen3next.report import active_parameters, count_parameters, jaxpr_flops
from qwen3next.resume import check_frozen, check_text, find_run, open_run
from qwen3next.run_folder import METRICS, save_trained
from qwen3next.statistics import layer_figures
from qwen3next.tokenizer import load_tokenizer
from qwen3next.tracker import make_tracker
from qwen3next.train_state import Position, StateWriter
from qwen3next.training import draw_state, initial_state, jit_train_step


def main(config: TrainConfig) -> int:
    """The run; its exit status. Ctrl-C or SIGTERM ends it after the step that it meets."""
    check(config)
    if config.run.dry_run:
        show_plan(config)
        return 0
    if config.run.compile_only:
        return compile_only(config)
    keep_programs(config.run.compilation_cache)
    if config.mesh.distributed:
        hosts.join()
    with StopRequest() as stop, use_mesh(config.mesh):
        check_mesh(config, axis_sizes())
        return train(config, stop)


def check(config: TrainConfig) -> None:
    """Raises `InputError` for settings that do not go together, and for a start that does not fit."""
    run = config.run
    require(not config.lora.targets or bool(run.init_from), "lora.targets need run.init_from, the folder of the base")
    same = run.init_from and Path(run.init_from).resolve() == Path(run.folder).resolve()
    require(not same, f"run.init_from and run.folder are both {run.folder}; allowed: another folder to write to")
    if run.init_from:
        check_base(Path(run.init_from), config.model, "run.init_from ")
    schedule(config.optimizer, run.steps)


def train(config: TrainConfig, stop: StopRequest) -> int:
    """Everything from text to weights; from the folder's last saved state on if it holds one."""
    run, data, started = config.run, config.data, time.perf_counter()
    start = Path(run.init_from)
    learning_rate, transform = schedule(config.optimizer, run.steps), optimizer(config.optimizer, run.steps)
    saved = find_run(config)

    # --- data ---------------------------------------------------------------------------------------------------------
    tokenizer = load_tokenizer(data.tokenizer)
    require(
        tokenizer.vocab_size <= config.model.vocab_size,
        f"model.vocab_size is {config.model.vocab_size}; the tokenizer needs at least {tokenizer.vocab_size}",
    )
    texts = read_texts(data, tokenizer, config.model.vocab_size, run.seed)
    sources, host = [(text.train, text.weight) for text in texts], jax.process_index()
    batches = TrainBatches(sources, data, run.seed, host=host, hosts=jax.process_count())
    fingerprint_of_text, label_bytes = text_fingerprint(texts), bytes_per_label(texts)
    if saved is not None:
        check_text(saved, config, fingerprint_of_text)
        batches.set_state(saved.position.data)

    # --- model and optimizer ------------------------------------------------------------------------------------------
    begin = partial(initial_state, config, transform)
    key = jax.random.key(run.seed)
    state, frozen = eqx.filter_eval_shape(begin, key)
    places = state_shardings((state, frozen))
    if saved is None and not run.init_from:
        state, frozen = draw_state(config, transform, key)
    partly = bool(jax.tree.leaves(frozen))  # some leaves stay as they begin, and no saved state holds them
    base = fingerprint(start) if partly and run.init_from else ""
    if saved is not None:
        check_frozen(saved, config, base)
    if run.init_from and (saved is None or partly):
        state, frozen = begin(key, load_base(start, config.model, "run.init_from "))
        state, frozen = (state, frozen) if places is None else jax.device_put((state, frozen), places)
    elif saved is not None and partly:
        state, frozen = draw_state(config, transform, key)
    if saved is not None:
        state = saved.restore(state, state.params.decoder.pattern.layer_numbers())
    prompt = tokenizer.encode(run.sample_prompt).tolist() or [tokenizer.end_of_text]
    sampled = run.sample_tokens > 0 and current_mesh() is None
    if sampled:
        check_prompts(config.model, [prompt], run.sample_tokens)

    # --- step ---------------------------------------------------------------------------------------------------------
    step = jit_train_step(config, transform)
    shape = jax.ShapeDtypeStruct((data.batch_size, data.sequence_length), jnp.int32)
    tokens = dict.fromkeys(("input_ids", "labels", "segment_ids"), shape)
    flops = jaxpr_flops(step.trace((frozen, tokens), state).jaxpr.jaxpr)  # one device: JAX keeps the trace

    # --- loop ---------------------------------------------------------------------------------------------------------
    monitor = Monitor(run.steps, data.batch_size * data.sequence_length)
    with open_run(config, saved) as folder, monitor, StateWriter(folder, run.keep) as states, batches:
        tracker, wandb = make_tracker(folder, config)
        for line in describe_mesh():
            monitor.say(line)
        for text in texts:
            for line in text.describe():
                monitor.say(line)
        model = eqx.combine(state.params, frozen)
        parameters, active = count_parameters(model), active_parameters(strip(model), config.model)
        monitor.say(f"model: {parameters:,} parameters, {active:,} of them active for a token, {config.compute.dtype}")
        if partly:
            trained = count_parameters(state.params)
            monitor.say(f"trained: {trained:,} parameters, {trained / parameters:.2%}; the others are frozen")
        shape = f"{data.batch_size} x {data.sequence_length} tokens"
        monitor.say(f"step: {shape}, {flops / 1e9:.1f} GFLOP of matrix products a device")
        begun = f"resumed after step {saved.step}" if saved else "from the first step"
        monitor.say(f"run: {run.steps} steps into {folder}, {begun}; Weights & Biases: {wandb}")

        def evaluate_and_sample(number: int, limit: int | None) -> dict[str, float]:
            model = eqx.combine(state.params, frozen)
            rows = eval_batches([text.held_out for text in texts], data.batch_size)
            result = evaluate(model, rows, limit, config.compute, label_bytes)
            text = f"step {number}: held-out loss {result['loss']:.3f}"
            text += f", {result['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in result else ""
            if sampled:
                made = [int(token[0]) for token in generate(model, [prompt], run.sample_tokens, compute=config.compute)]
                text += f"; sample:\n{run.sample_prompt}{tokenizer.decode(made)}\n"
            monitor.say(text)
            return result

        drops = config.compute.on_overflow == "drop"
        first, stacks = saved.step if saved else 0, state.params.decoder.pattern.layer_numbers()
        number = first
        for number in range(first + 1, run.steps + 1):
            batch = next(batches)
            # Waited for, so that a stop that is asked for does not find further steps on their way.
            state, metrics = jax.block_until_ready(step((frozen, place(batch, own=True)), state))
            if number == first + 1:
                monitor.say(f"first step after {time.perf_counter() - started:.1f} s")
                monitor.start_clock(number)
            final, log = number == run.steps, number == run.steps or number % run.log_every == 0
            stopping = hosts.agreed(stop.wanted) if log or jax.process_count() == 1 else False
            assess = final or number % run.eval_every == 0
            save = final or stopping or number % run.save_every == 0
            values, record, held_out_loss = dict[str, float](), dict[str, float](), None
            if log or save:
                values = {name: float(value) for name, value in metrics.items() if name != "layers"}
                if not all(map(math.isfinite, values.values())):
                    monitor.say(f"stopped at step {number}, which is not finite: {values}; nothing was saved since")
                    return 1
            if log:
                record |= values | layer_figures(jax.device_get(metrics["layers"]), drops)
                record["learning_rate"] = float(jnp.asarray(learning_rate(number - 1)))
                record["tokens_per_second"] = monitor.step(number, record["loss"])
                record["tokens_crc32"] = zlib.crc32(batch["input_ids"].tobytes())  # to compare two runs' batches
            if assess:
                result = evaluate_and_sample(number, None if final else run.eval_batches)
                record |= {f"held_out/{name}": value for name, value in result.items()}
                # The last one is over all rows; for the best only those over the same rows are compared.
                held_out_loss = None if final else result["loss"]
                save = save or result["loss"] < states.best
            if final and "held_out/bits_per_byte" in record:
                bits = {"this model": record["held_out/bits_per_byte"]}
                plain = held_out_text(texts)
                bits |= {} if plain is None else compressed_bits_per_byte(plain)
                record |= {f"held_out_bits_per_byte/{name}": value for name, value in bits.items()}
                told = ", ".join(f"{name} {value:.3f}" for name, value in bits.items())
                monitor.say(f"held-out bits per byte: {told}")
            if record:
                tracker.log(number, record)
            if save:
                save_trained(folder, eqx.combine(state.params, frozen), config, base)
                size = (folder / METRICS).stat().st_size
                position = Position(dump_config(config), fingerprint_of_text, batches.get_state(), size, stacks, base)
                states.save(state, position, held_out_loss)
            if stopping:
                break
            if assess or save:
                monitor.start_clock(number)
        tracker.close()
    monitor.say(f"ended after step {number} of {run.steps} and {time.perf_counter() - started:.0f} s; decode from it:")
    monitor.say(f"  python decode.py {folder} --prompt {run.sample_prompt!r}")
    return 0


if __name__ == "__main__":
    with exit_on_input_error():
        sys.exit(main(parse(sys.argv)))
