"""Where compiled programs are kept, and that they are."""

import os

import jax
import jax.numpy as jnp
import pytest
from common import run_config
from jax.experimental.compilation_cache.compilation_cache import reset_cache

import train
from qwen3next.cli import dump_config, parse_config
from qwen3next.errors import InputError
from qwen3next.programs import COMPILER_OPTIONS, _trim, keep_programs
from qwen3next.resume import changes

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")


@pytest.fixture(autouse=True)
def own_settings(tmp_path, monkeypatch):
    """A user without the variable, whose cache folder is temporary; what a test sets goes with it."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def kept_after_compiling(folder):
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(5.0))
    return [path.name for path in folder.glob("*")] if folder.exists() else []


def test_a_program_is_kept_in_the_folder(tmp_path):
    keep_programs(str(tmp_path / "new" / "folder"))
    assert any("lambda" in name for name in kept_after_compiling(tmp_path / "new" / "folder"))


def test_by_default_it_is_the_users_own(tmp_path, monkeypatch):
    keep_programs("auto")
    assert kept_after_compiling(tmp_path / "cache" / "qwen3next")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    keep_programs("auto")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / ".cache" / "qwen3next")


def test_off_keeps_none(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "from_elsewhere"))
    keep_programs("off")
    assert kept_after_compiling(tmp_path / "from_elsewhere") == [] and not (tmp_path / "cache").exists()


def test_the_variable_of_jax_comes_before_the_default_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    keep_programs("auto")
    assert jax.config.jax_compilation_cache_dir is None and not (tmp_path / "cache").exists()
    keep_programs(str(tmp_path / "asked_for"))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "asked_for")


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.touch()
    config = run_config(tmp_path, compilation_cache=str(file / "below"))
    for where in (config.run.compilation_cache, str(file), "", "gs://bucket/programs"):
        with pytest.raises(
            InputError, match=r"compilation cache '.*' cannot be written.*allowed: auto, off or a folder"
        ):
            keep_programs(where)
    with pytest.raises(InputError, match="compilation cache"):
        train.main(config)
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    keep_programs("auto")
    assert jax.config.jax_compilation_cache_dir is None
    assert capsys.readouterr().err.count("\n") == 1


def test_the_programs_used_longest_ago_leave(tmp_path):
    for name, used in (("a-cache", 3), ("b-cache", 1), ("c-cache", 2), ("other", 0)):
        (tmp_path / name).write_bytes(b"x" * 10)
        os.utime(tmp_path / name, (used, used))
    _trim(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-cache", "c-cache", "other"]


def test_an_old_config_has_the_default(tmp_path):
    config = run_config(tmp_path)
    text = dump_config(config)
    old = parse_config(text.replace('compilation_cache = "auto"\n', ""), "old")
    assert "compilation_cache" in text and changes(old, config) == {}


def test_the_options_take_effect():
    """Branches that do not depend on each other: one after another each needs its arrays, side by side all of them."""

    def branches(x, weights):
        return sum(jnp.sum(jnp.sin(x @ weight) @ weight) for weight in weights)

    args = jax.ShapeDtypeStruct((512, 512), jnp.float32), [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8
    found, default = (
        jax.jit(branches, compiler_options=options).lower(*args).compile().memory_analysis().temp_size_in_bytes
        for options in (COMPILER_OPTIONS, None)
    )
    assert found < default / 2
