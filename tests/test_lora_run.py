"""Fine-tuning from end to end: a base, a run on it that trains adapters, what it leaves, and how it goes on."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from common import run_config, tiny_config, tiny_model
from rich.console import Console
from test_lora import logits_of

import decode
import train
from qwen3next import check, convert, lora_checks, plan
from qwen3next.adapters import CONFIG, WEIGHTS, read_adapter, save_adapter
from qwen3next.checkpoint import fingerprint, load_base, load_checkpoint
from qwen3next.cli import dump_config, load_config, parse
from qwen3next.config import Compute, LoRAConfig, TrainConfig
from qwen3next.errors import InputError
from qwen3next.hf import load_pretrained, save_pretrained
from qwen3next.lora import adapters, add_adapters, replace, strip
from qwen3next.lora_checks import lora_checks as checks
from qwen3next.run_folder import save_weights
from qwen3next.tokenizer import byte_tokenizer_for_others
from qwen3next.tree import leaf_path

ROOT = Path(__file__).parent.parent
# Attention alone, which compiles sooner than the delta rule; what adapters do in other layers is tested elsewhere.
SIZES = {"vocab_size": 257, "num_hidden_layers": 2, "full_attention_interval": 1, "num_experts": 3}
DENSE = Compute(dispatch="dense")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A Hugging Face folder."""
    folder = tmp_path_factory.mktemp("base") / "model"
    save_pretrained(tiny_model(**SIZES), folder)
    return folder


def config_for(tmp_path: Path, base: Path, **changes) -> TrainConfig:
    tmp_path.mkdir(exist_ok=True)
    config = run_config(tmp_path)
    run = dataclasses.replace(config.run, init_from=str(base), folder=str(tmp_path / "run"), steps=4, save_every=2)
    run = dataclasses.replace(run, sample_tokens=0, eval_every=100, **changes)
    optimizer = dataclasses.replace(config.optimizer, learning_rate=0.02, warmup_steps=0)
    lora = LoRAConfig(("all-linear",), rank=2, dropout=0.1)
    model = tiny_config(**SIZES)
    return dataclasses.replace(config, model=model, lora=lora, run=run, optimizer=optimizer, compute=DENSE)


def test_a_run_trains_adapters_and_all_that_follows_works(tmp_path, base, capsys):
    config, before = config_for(tmp_path, base), (base / "model.safetensors").read_bytes()
    run = Path(config.run.folder)
    assert train.main(config) == 0
    said = capsys.readouterr().out
    assert "the others are frozen" in said and (base / "model.safetensors").read_bytes() == before
    assert not (run / "model.safetensors").exists()
    settings = json.loads((run / CONFIG).read_text())
    assert settings["r"] == 2 and settings["base_model_name_or_path"] == str(base)
    assert load_config(run / "config.toml").lora == config.lora  # no flag is typed twice

    model = load_checkpoint(run).model
    ids = np.arange(12, dtype=np.int32)[None]
    plain = load_pretrained(base)
    assert not np.array_equal(logits_of(model, ids), logits_of(plain, ids))
    for a, b in zip(*map(jax.tree.leaves, (plain, strip(model))), strict=True):
        np.testing.assert_array_equal(a, b)

    asked = ["--prompt-ids", "5,6,7", "--max-new-tokens", "4", "--json"]
    decode.main([str(run), *asked])
    own = json.loads(capsys.readouterr().out)[0]["tokens"]
    decode.main([str(base), "--adapter", str(run), *asked])
    assert json.loads(capsys.readouterr().out)[0]["tokens"] == own
    with pytest.raises(InputError, match="has an adapter already; give its base"):
        decode.main([str(run), "--adapter", str(run), *asked])

    convert.main([str(run), str(tmp_path / "merged")])
    merged = load_pretrained(tmp_path / "merged")
    assert not adapters(merged)
    np.testing.assert_allclose(logits_of(merged, ids), logits_of(model, ids), rtol=0, atol=1e-4)
    convert.main([str(base), str(tmp_path / "again"), "--adapter", str(run), "--to", "hf"])
    names = ("merged", "again")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in names)
    assert one == two


def test_a_run_goes_on_with_the_bits_of_one_that_did_not_stop(tmp_path, base):
    whole = config_for(tmp_path / "a", base)
    assert train.main(whole) == 0
    halves = config_for(tmp_path / "b", base)

    class Stopping(train.StopRequest):
        @property
        def wanted(self) -> bool:
            self.asked = getattr(self, "asked", 0) + 1
            return self.asked >= 2

        @wanted.setter
        def wanted(self, value: bool) -> None: ...

    assert train.train(halves, Stopping()) == 0
    assert train.main(dataclasses.replace(halves, run=dataclasses.replace(halves.run, resume="must"))) == 0
    files = [Path(config.run.folder) / WEIGHTS for config in (whole, halves)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_another_base_is_refused(tmp_path, base):
    own = tmp_path / "base"
    shutil.copytree(base, own)
    config = config_for(tmp_path, own)
    assert train.main(config) == 0
    save_pretrained(tiny_model(seed=1, **SIZES), own, overwrite=True)
    longer = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=6))
    before = (Path(config.run.folder) / WEIGHTS).read_bytes()
    with pytest.raises(InputError, match="does not hold the weights that the run in"):
        train.main(longer)
    for use in (load_checkpoint, lambda run: convert.main([str(run), str(tmp_path / "out")])):
        with pytest.raises((InputError, SystemExit)):
            use(Path(config.run.folder))
    assert not (tmp_path / "out").exists()
    save_pretrained(tiny_model(**SIZES), own, overwrite=True)
    assert load_checkpoint(Path(config.run.folder))
    shutil.rmtree(own)
    with pytest.raises(InputError, match=r"which is no folder here; allowed: BASE --adapter"):
        load_checkpoint(Path(config.run.folder))
    assert (Path(config.run.folder) / WEIGHTS).read_bytes() == before


def test_a_whole_model_can_begin_from_a_folder_too(tmp_path, base):
    config = dataclasses.replace(config_for(tmp_path, base), lora=LoRAConfig())
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-12))
    assert train.main(config) == 0
    trained, start = load_checkpoint(Path(config.run.folder)).model, load_pretrained(base)
    for a, b in zip(*map(jax.tree.leaves, (trained, start)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_a_base_tells_the_sizes_of_a_config_without_them(tmp_path, base):
    path = tmp_path / "lora.toml"
    path.write_text(f'[lora]\ntargets = ["attention=2"]\n[run]\ninit_from = "{base}"\n')
    config = load_config(path)
    assert load_base(base, config.model, "") is not None
    assert config.model.num_experts == SIZES["num_experts"] and config.lora.targets == ("attention=2",)
    folder = tmp_path / "other"
    save_weights_and_config(folder, hidden_size=48)
    assert parse(["train.py", str(path), "--run.init-from", str(folder)]).model.hidden_size == 48
    half = parse(["train.py", str(path), f"--run.init-from={folder}", "--model.dtype", "bfloat16"])
    assert half.model.dtype == "bfloat16" and half.model.hidden_size == 48
    own = tmp_path / "itself"
    own.mkdir()
    (own / "config.toml").write_text(f'[run]\ninit_from = "{own}"\n')
    with pytest.raises(InputError, match="required key 'model' is missing"):
        load_config(own / "config.toml")
    path.write_text('[run]\ninit_from = "nowhere"\n')
    with pytest.raises(InputError, match=r"run\.init_from nowhere holds no checkpoint"):
        load_config(path)
    path.write_text("[lora]\nrank = 2\n")
    with pytest.raises(InputError, match="required key 'model' is missing"):
        load_config(path)


def save_weights_and_config(folder: Path, **changes) -> None:
    folder.mkdir()
    config = run_config(folder)
    config = dataclasses.replace(config, model=tiny_config(**(SIZES | changes)))
    (folder / "config.toml").write_text(dump_config(config))
    save_weights(folder, tiny_model(**(SIZES | changes)))


def test_a_base_is_cast_and_stays_so(tmp_path, base):
    config = config_for(tmp_path, base)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    assert train.main(config) == 0
    model = load_checkpoint(Path(config.run.folder)).model
    assert {leaf.dtype.name for leaf in jax.tree.leaves(strip(model))} == {"bfloat16"}
    assert {adapter.lora_A.dtype.name for adapter in adapters(model).values()} == {"float32"}


def test_bad_bases_are_refused_before_anything_is_written(tmp_path, base):
    config = config_for(tmp_path, base)
    folder = Path(config.run.folder)

    def run(**changes):
        return dataclasses.replace(config, run=dataclasses.replace(config.run, **changes))

    other = dataclasses.replace(config, model=tiny_config(**(SIZES | {"num_experts": 6})))
    typo = dataclasses.replace(config, lora=LoRAConfig(("atention",)))
    for bad, message in (
        (run(init_from=""), "lora.targets need run.init_from"),
        (run(init_from=str(tmp_path / "nowhere")), "run.init_from .*nowhere is not a folder"),
        (run(init_from=str(ROOT / "tests")), "holds no checkpoint; needed"),
        (run(init_from=str(folder)), "run.init_from and run.folder are both"),
        (run(init_from=str(folder), dry_run=True), "run.init_from and run.folder are both"),
        (dataclasses.replace(other, run=run(dry_run=True).run), r"model.num_experts is 6"),
        (other, r"model.num_experts is 6, and run.init_from .* has 3; they must be equal"),
        (typo, "'atention' is no matrix of the model; allowed: .*attention"),
    ):
        with pytest.raises(InputError, match=message):
            train.main(bad)
        assert not folder.exists()
    assert train.main(config) == 0
    with pytest.raises(InputError, match="holds an adapter; needed: a whole model"):
        train.main(run(init_from=str(folder), folder=str(tmp_path / "c")))


def test_an_adapter_of_an_adapter_is_refused(tmp_path, base):
    for folder in ("a", "b"):
        save_adapter(load_checkpoint_with(base), tmp_path / folder, base=str(tmp_path / folder))
        with pytest.raises(InputError, match="which is an adapter too; needed: a whole model"):
            load_checkpoint(tmp_path / folder)


def load_checkpoint_with(base: Path):
    return add_adapters(load_pretrained(base), LoRAConfig(("attention",)), key=jax.random.key(0))


def test_a_base_keeps_the_configs_settings(base, tmp_path):
    config = dataclasses.replace(tiny_config(**SIZES), router_aux_loss_coef=0.5, initializer_range=0.3)
    assert load_base(base, config, "").config == config
    run = tmp_path / "run"
    save_weights_and_config(run)
    assert load_base(run, config, "").config == config
    with pytest.raises(InputError, match=r"model\.max_position_embeddings is 99"):
        load_base(base, dataclasses.replace(config, max_position_embeddings=99), "")


def test_a_base_tells_the_tokenizer_too(base, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    path = tmp_path / "lora.toml"
    path.write_text(f'[run]\ninit_from = "{folder}"\n')
    assert load_config(path).data.tokenizer == "bytes"
    byte_tokenizer_for_others().save(str(folder / "tokenizer.json"))
    assert load_config(path).data.tokenizer == str((folder / "tokenizer.json").resolve())
    path.write_text(f'[data]\ntokenizer = "bytes"\n[run]\ninit_from = "{folder}"\n')
    assert load_config(path).data.tokenizer == "bytes"


def test_fingerprints_tell_two_trainings_apart(tmp_path, base):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    assert fingerprint(base) == fingerprint(other)
    save_pretrained(tiny_model(seed=1, **SIZES), other, overwrite=True)
    assert fingerprint(base) != fingerprint(other)


def test_a_dry_run_shows_what_is_trained_and_writes_nothing(tmp_path, base, capsys, monkeypatch):
    monkeypatch.setattr(plan, "Console", lambda **_: Console(width=200))
    config = config_for(tmp_path, base, dry_run=True)
    rules = ("lora_B learning_rate=16", "q_proj.lora_A frozen", "mlp.gate.lora_A decay=no")
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, rules=rules))
    assert train.main(config) == 0
    said = capsys.readouterr().out
    said, _ = said.split("shards, mesh")  # which has rows of the same names
    rows = {line.split("│")[1].split()[0]: line for line in said.splitlines() if line.startswith("│")}
    assert "self_attn.q_proj" in rows and "mlp.experts.down_proj" in rows
    q = "decoder.cycles.modules.runs.0.modules.mixer.q_proj"
    cells = [cell.strip() for cell in rows[f"{q}.lora_B"].split("│")]
    assert cells[2:4] == ["96 x 2", "2"] and cells[-3:-1] == ["0.1", "0.32"]
    assert f"{q}.lora_A" not in rows  # frozen
    assert rows["decoder.cycles.modules.runs.0.modules.mlp.gate.lora_A"].split("│")[-3].strip() == "0"
    assert "trained:" in said and "frozen:" in said and not Path(config.run.folder).exists()


def test_lora_dry_run_is_a_flag(tmp_path, base):
    path = tmp_path / "config.toml"
    path.write_text(dump_config(config_for(tmp_path, base)))
    for flag in ("--lora.dry-run", "--dry-run"):
        assert parse(["train.py", str(path), flag]).run.dry_run


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory, base) -> TrainConfig:
    config = config_for(tmp_path_factory.mktemp("small"), base)
    model = tiny_config(**(SIZES | {"full_attention_interval": 2, "mlp_only_layers": (0,)}))
    return dataclasses.replace(config, model=model)


def failed(config: TrainConfig) -> list[str]:
    return [found.name for found in checks(config) if not found.passed]


def test_all_checks_hold(small):
    found = list(checks(small))
    assert [row.name for row in found if not row.passed] == [] and len(found) > 30
    assert {"adapters on mlp.experts.up_proj", "adapters on linear_attn.in_proj_ba"} < {row.name for row in found}


def test_the_command_fails_where_adapters_do_not_act(small, tmp_path, monkeypatch, capsys):
    path = tmp_path / "config.toml"
    path.write_text(
        dump_config(dataclasses.replace(small, lora=LoRAConfig(("k_proj",), rank=1), model=tiny_config(**SIZES)))
    )
    assert check.main(["lora", str(path)]) == 0
    monkeypatch.setattr(lora_checks, "_replaced", lambda model, path, leaves: model)
    assert check.main(["lora", str(path)]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_each_broken_property_fails_its_check(small, monkeypatch):
    lora = LoRAConfig(("experts.up_proj", "v_proj"), rank=2)
    few = dataclasses.replace(small, lora=lora, model=tiny_config(**(SIZES | {"num_hidden_layers": 1})))
    assert failed(few) == []

    with monkeypatch.context() as patch:  # a matrix is left out
        patch.setattr("qwen3next.lora.replace", lambda model, paths, make: replace(model, list(paths)[1:], make))
        assert "adapters on mlp.experts.up_proj" in failed(few) or "adapters on self_attn.v_proj" in failed(few)
    with monkeypatch.context() as patch:  # one side never learns
        slopes = lora_checks.gradients

        def half(*args):
            grads, metrics = slopes(*args)
            return jax.tree_util.tree_map_with_path(lambda at, x: x * float(leaf_path(at)[-1] == "B"), grads), metrics

        patch.setattr(lora_checks, "gradients", half)
        assert [name for name in failed(few) if "without a gradient" in name]
    with monkeypatch.context() as patch:  # B does not begin at zero
        new = lora_checks.initial_state
        patch.setattr(lora_checks, "initial_state", lambda *args: _shifted(new(*args)))
        assert "logits that new adapters change" in failed(few)
    with monkeypatch.context() as patch:  # the base is trained too
        patch.setattr("qwen3next.training.trainable", lambda model, config: jax.tree.map(lambda _: True, model))
        found = failed(few)
        assert {"bytes of gradients", "leaves that stay frozen"} <= set(found)
        assert "leaves of the base that 3 steps with decay change" in found


def _shifted(begun):
    state, frozen = begun
    params = jax.tree.map(lambda leaf: leaf + 0.1 if isinstance(leaf, jax.Array) else leaf, state.params)
    return dataclasses.replace(state, params=params), frozen


def test_nothing_to_check_is_bad_input(small):
    with pytest.raises(InputError, match=r"lora\.targets is empty"):
        failed(dataclasses.replace(small, lora=LoRAConfig()))


def test_the_scripts_end_in_one_line(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(dump_config(dataclasses.replace(run_config(tmp_path), lora=LoRAConfig(("attention",)))))
    done = subprocess.run(
        [sys.executable, "train.py", str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "lora.targets need run.init_from" in done.stderr
    with pytest.raises(InputError, match="holds no adapter"):
        read_adapter(tmp_path)
