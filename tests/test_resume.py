"""Runs that stop and go on: exactly, from complete states alone, and only as the same run."""

import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import run_config, tiny_model
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file

import train
from qwen3next.cli import dump_config, load_config, parse
from qwen3next.config import OptimizerConfig, TrainConfig
from qwen3next.errors import InputError
from qwen3next.model import abstract_model
from qwen3next.monitor import StopRequest
from qwen3next.optim import optimizer
from qwen3next.pattern import Pattern, _runs
from qwen3next.resume import find_run
from qwen3next.train_state import Position, SavedState, StateWriter, TrainState, latest_state

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # of `arrays`, which asks for no placement


class StopAfter(StopRequest):
    """Asks for the end after so many steps of this process, as Ctrl-C would."""

    def __init__(self, steps: int):
        self.left = steps

    @property
    def wanted(self) -> bool:
        self.left -= 1
        return self.left == 0

    @wanted.setter
    def wanted(self, value: bool) -> None: ...


def changed(config: TrainConfig, section: str, **values) -> TrainConfig:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def short_config(folder: Path, **run) -> TrainConfig:
    """20 steps of 4 rows; an epoch is 26 rows, so that the first ends inside step 7 and the second with step 13."""
    folder.mkdir(exist_ok=True)
    defaults = {"steps": 20, "log_every": 1, "eval_every": 6, "save_every": 4, "sample_tokens": 0}
    config = run_config(folder, **{**defaults, **run})
    Path(config.data.source[0]).write_text("def greet(name):\n    return f'hello {name}'\n\n" * 21)
    return config


def simple_config(folder: Path, **run) -> TrainConfig:
    """One dense layer: these runs are about folders."""
    config = short_config(folder, **run)
    return changed(config, "model", num_hidden_layers=1, layer_types=("full_attention",), num_experts=0)


def records(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in ("time", "tokens_per_second")} for line in lines
    ]


def arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    with ocp.training.Checkpointer(str(folder.absolute() / "states")) as states:
        return jax.tree.map(np.asarray, states.load_checkpointables(step)["arrays"])


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "states").iterdir())


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The folder of a run of 20 steps without a stop."""
    config = short_config(tmp_path_factory.mktemp("straight") / "a")
    assert train.main(config) == 0
    return Path(config.run.folder)


def test_a_run_that_stops_goes_on_bit_for_bit(straight, tmp_path):
    config = short_config(tmp_path)
    for stop in (5, 3, 5):  # at 5, at 8, and at 13, which ends an epoch
        assert train.train(config, StopAfter(stop)) == 0
    assert train.main(config) == 0
    folder = Path(config.run.folder)
    assert records(folder) == records(straight)
    assert [record["step"] for record in records(folder)] == list(range(1, 21))
    assert len({record["tokens_crc32"] for record in records(folder)}) == 20
    one, other = arrays(straight, 20), arrays(folder, 20)
    assert one.keys() == other.keys() and any("adam.mu" in path for path in one) and "key" in one
    for path, array in one.items():
        assert array.dtype == other[path].dtype and np.array_equal(array, other[path]), path
    assert (folder / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


def test_weights_and_the_best_state_are_those_of_the_run(straight):
    losses = {record["step"]: record["held_out/loss"] for record in records(straight) if "held_out/loss" in record}
    assert sorted(losses) == [6, 12, 18, 20]
    assert min((6, 12, 18), key=losses.__getitem__) in saved_steps(straight) and saved_steps(straight)[-1] == 20
    weights, state = load_file(straight / "model.safetensors"), arrays(straight, 20)
    for path, array in weights.items():
        assert np.array_equal(array, state[f"params.{path}"]), path


def test_a_run_that_has_ended_is_left_alone(straight, capsys):
    config = load_config(straight / "config.toml")
    before = {path: path.read_bytes() for path in straight.rglob("*") if path.is_file()}
    assert train.main(config) == 0
    assert "resumed after step 20" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in straight.rglob("*") if path.is_file()} == before


def test_more_steps_and_other_rates_are_allowed(tmp_path, capsys):
    config = simple_config(tmp_path, steps=4)
    assert train.main(config) == 0
    longer = changed(changed(config, "run", steps=6, keep=1), "optimizer", learning_rate=1e-3, weight_decay=0.0)
    assert train.main(longer) == 0
    assert "resumed after step 4" in capsys.readouterr().out
    folder = Path(config.run.folder)
    assert [record["step"] for record in records(folder)] == [1, 2, 3, 4, 5, 6]
    assert load_config(folder / "config.toml") == longer and saved_steps(folder)[-1] == 6
    with pytest.raises(InputError, match=r"run.steps is 5; the run in .* is at step 6 already"):
        train.main(changed(config, "run", steps=5))


REFUSED = {
    "model.hidden_size 32, and 64": lambda c: changed(c, "model", hidden_size=64),
    "model.layer_types ": lambda c: changed(c, "model", layer_types=("full_attention", *["linear_attention"] * 3)),
    "run.seed 0, and 1": lambda c: changed(c, "run", seed=1),
    "data.batch_size 4, and 8": lambda c: changed(c, "data", batch_size=8),
    "data.sequence_length 32, and 16": lambda c: changed(c, "data", sequence_length=16),
    r"data.source: the text is not what the run .* \(data.held_out was 0.1\)": lambda c: changed(
        c, "data", held_out=0.3
    ),
    "already holds a run": lambda c: changed(c, "run", resume="never"),
    "give one": lambda c: changed(c, "run", resume="must", overwrite=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_another_run_is_refused_and_the_state_untouched(straight, message):
    config = load_config(straight / "config.toml")
    before = {path: path.read_bytes() for path in straight.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=message) as caught:
        train.main(REFUSED[message](config))
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in straight.rglob("*") if path.is_file()} == before


def test_changed_files_are_refused(tmp_path):
    config = simple_config(tmp_path, steps=3)
    assert train.main(config) == 0
    with Path(config.data.source[0]).open("a") as file:
        file.write("# one more line\n")
    with pytest.raises(InputError, match=r"the text is not what the run .* \(the files have changed\)"):
        train.main(changed(config, "run", steps=4))


def test_what_a_folder_without_a_state_allows(tmp_path):
    config = short_config(tmp_path)
    folder = Path(config.run.folder)
    must = changed(config, "run", resume="must")
    with pytest.raises(InputError, match="holds no saved state"):
        find_run(must)
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(config))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert find_run(config) is None  # killed before its first save: begun again
    with pytest.raises(InputError, match="holds no saved state"):
        find_run(must)
    with pytest.raises(InputError, match=r"with model.hidden_size 32, and 64"):
        find_run(changed(config, "model", hidden_size=64))
    (folder / "model.safetensors").write_text("trained elsewhere")
    with pytest.raises(InputError, match=r"without a state to go on from; allowed: another folder or --run.overwrite"):
        find_run(config)
    assert find_run(changed(config, "run", overwrite=True)) is None


def test_overwrite_leaves_nothing_of_the_old_run(tmp_path):
    config = simple_config(tmp_path, steps=4, save_every=1, keep=4)
    assert train.main(config) == 0
    assert train.main(changed(config, "run", steps=3, overwrite=True)) == 0
    folder = Path(config.run.folder)
    assert saved_steps(folder) == [1, 2, 3] and [record["step"] for record in records(folder)] == [1, 2, 3]


def test_resume_has_a_short_flag(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(dump_config(short_config(tmp_path)))
    for flags in (["--resume", "must"], ["--resume=must"], ["--run.resume", "must"]):
        assert parse(["train.py", str(path), *flags]).run.resume == "must"
    with pytest.raises(InputError, match="'auto', 'never', 'must'"):
        parse(["train.py", str(path), "--resume", "maybe"])


def test_a_folder_in_use_is_refused(straight):
    hold = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(1); input()"
    command = [sys.executable, "-u", "-c", hold, str(straight)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "1\n"
        with pytest.raises(InputError, match="is in use by another process"):
            train.main(load_config(straight / "config.toml"))
        other.communicate("\n")


# --- states by path ---------------------------------------------------------------------------------------------------


def make_state(**changes) -> TrainState:
    params, transform = tiny_model(**changes), optimizer(OptimizerConfig(warmup_steps=1), 10)
    moments = transform.init(params)
    moments["adam"] = moments["adam"]._replace(mu=tiny_model(seed=1, **changes), nu=tiny_model(seed=2, **changes))
    return TrainState(jnp.int32(3), jax.random.key(7), params, moments)


def save(folder: Path, state: TrainState) -> SavedState:
    with StateWriter(folder, keep=2) as states:
        states.save(state, Position("", "", {"next_index": 3}, 0, stacks_of(state)))
    saved = latest_state(folder)
    assert saved is not None and saved.step == 3 and saved.position.data == {"next_index": 3}
    return saved


def stacks_of(state: TrainState) -> dict:
    return state.params.decoder.pattern.layer_numbers()


def restore(saved: SavedState, like: TrainState) -> TrainState:
    return saved.restore(jax.eval_shape(lambda: like), stacks_of(like))


def test_the_last_states_stay_and_the_best(tmp_path):
    with StateWriter(tmp_path, keep=2) as states:
        for step, loss in enumerate((3.0, 1.0, 2.0, None, 5.0, None)):
            state = TrainState(jnp.int32(step), jax.random.key(0), {"x": jnp.ones(2)}, None)
            states.save(state, Position("", "", {}, 0, {}), loss)
        assert states.best == 1.0
    assert saved_steps(tmp_path) == [1, 4, 5]
    with StateWriter(tmp_path, keep=2) as states:
        assert states.best == 1.0  # a resumed run knows it


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_comes_back_bit_for_bit(tmp_path, dtype):
    state = make_state(num_hidden_layers=6, dtype=dtype)
    again = restore(save(tmp_path, state), state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        assert a.dtype == b.dtype and bool((a == b).all())


def test_leaves_are_known_by_their_paths(tmp_path):
    state = make_state()
    saved = save(tmp_path, state)
    bias = make_state(attention_bias=True)
    with pytest.raises(
        InputError, match=r"lacks leaves that the config asks for: \d+, the first is optimizer.adam.mu.*bias"
    ):
        restore(saved, bias)
    with pytest.raises(InputError, match=r"has leaves without a place .* the first is .*lm_head.weight"):
        restore(saved, make_state(tie_word_embeddings=True))
    with pytest.raises(InputError, match=r"leaf .*embed_tokens.weight is float32\[64, 32\]; it must be .*\[65, 32\]"):
        restore(saved, make_state(vocab_size=65))
    with pytest.raises(InputError, match=r"leaf .* is float32\[.*\]; it must be bfloat16"):
        restore(saved, make_state(dtype="bfloat16"))


@pytest.mark.parametrize("layers", [7, 8])
def test_a_state_moves_to_another_cut_of_the_layers(tmp_path, monkeypatch, request, layers):
    state = make_state(num_hidden_layers=layers)
    saved = save(tmp_path, state)

    def one_prefix(kinds):  # no cycle but the last layer
        return Pattern(_runs(kinds[:-1]), _runs(kinds[-1:]), 1, ())

    monkeypatch.setattr("qwen3next.stack.find_pattern", one_prefix)
    abstract_model.cache_clear()  # it knows the old cut
    request.addfinalizer(abstract_model.cache_clear)
    other = make_state(num_hidden_layers=layers)
    assert stacks_of(other) != stacks_of(state)
    moved = restore(saved, other)
    for tree in (lambda s: s.params, lambda s: s.optimizer["adam"].mu, lambda s: s.optimizer["adam"].nu):
        for a, b in zip(tree(state).decoder.layers(), tree(moved).decoder.layers(), strict=True):
            assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))
        assert bool((tree(state).embed_tokens.weight == tree(moved).embed_tokens.weight).all())
    assert int(moved.step) == 3 and int(moved.optimizer["adam"].count) == int(state.optimizer["adam"].count)
    with pytest.raises(InputError, match=r"lacks .*layers\.3\..*bias, which the config asks for"):
        restore(saved, make_state(num_hidden_layers=layers, attention_bias=True))


def test_the_state_is_not_what_a_later_step_made_of_its_buffers(tmp_path):
    """The save runs in the background, on a CPU from the very buffers that the next step is given to reuse."""
    state = make_state(vocab_size=4096)
    before, stacks = jax.tree.map(np.array, state.params), stacks_of(state)
    with StateWriter(tmp_path, keep=2) as states:
        states.save(state, Position("", "", {}, 0, stacks))
        double = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)
        params = state.params
        for _ in range(20):
            params = double(params)
        jax.block_until_ready(params)
    saved = latest_state(tmp_path)
    assert saved is not None
    after = restore(saved, make_state(vocab_size=4096)).params
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax leaves its other reads behind
def test_a_damaged_state_is_named(tmp_path):
    saved = save(tmp_path, make_state())
    data = max((tmp_path / "states" / "3" / "arrays").rglob("d/*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(InputError, match=r"states/3 is damaged .*; remove it to go on from the state before"):
        restore(saved, make_state())
    (tmp_path / "states" / "3" / "_CHECKPOINT_METADATA").write_text("{")
    with pytest.raises(InputError, match=r"states/3 is damaged"):
        latest_state(tmp_path)
    gc.collect()


def test_half_a_state_is_no_state(tmp_path):
    save(tmp_path, make_state())
    half = tmp_path / "states" / "4.orbax-checkpoint-tmp"  # the name under which orbax writes
    shutil.copytree(tmp_path / "states" / "3", half)
    shutil.rmtree(half / "arrays")
    saved = latest_state(tmp_path)
    assert saved is not None and saved.step == 3 and half.exists()
    with StateWriter(tmp_path, keep=2):
        pass
    assert not half.exists() and saved_steps(tmp_path) == [3]


def test_a_full_disk_ends_in_one_line_and_keeps_the_complete_states(tmp_path):
    """A limit on the size of files stands for a full disk."""
    config = simple_config(tmp_path, steps=4)
    assert train.main(config) == 0
    folder = Path(config.run.folder)
    path = tmp_path / "longer.toml"
    longer = changed(config, "run", steps=6, compilation_cache="off")  # a program would be too large as well
    path.write_text(dump_config(longer))
    script = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000));"
        "sys.argv = ['train.py', sys.argv[1]]; runpy.run_path('train.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert saved_steps(folder) == [4]
    assert train.main(changed(config, "run", steps=6)) == 0


def test_runs_that_are_killed_end_as_if_they_had_not_been():
    command = [sys.executable, "benchmarks/kill_and_resume.py", "--kills", "1", "--steps", "48"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
