"""Rotary embedding against the frequencies that transformers computes, and against complex rotation."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from qwen3next.config import ModelConfig, RopeParameters
from qwen3next.rotary import frequencies, rotary_tables, rotate

ENTRIES = {entry["name"]: entry for entry in json.loads((Path(__file__).parent / "data/rope.json").read_text())}
# With an odd rotary dimension transformers makes one ramp value too few; for dimension 3 torch spreads the single
# value over both frequencies, for more it raises. Here each frequency has its own value of the ramp.
BROADCAST_IN_TRANSFORMERS = "yarn_odd"


def _config(name="", **rope: Any):
    entry: dict[str, Any] = ENTRIES[name]["config"] if name else {"head_dim": 256, "rope_parameters": rope}
    parameters: dict[str, Any] = entry["rope_parameters"]
    parameters = {key: tuple(value) if isinstance(value, list) else value for key, value in parameters.items()}
    return ModelConfig(**{**entry, "rope_parameters": RopeParameters(**parameters)})


def _tables(config, positions):
    return rotary_tables(config, jnp.asarray(positions, jnp.int32), jnp.dtype("float32"))


def _heads(seq, head_dim, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((2, seq, 3, head_dim)), jnp.float32)


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != BROADCAST_IN_TRANSFORMERS])
def test_frequencies_are_those_of_transformers(name):
    entry = ENTRIES[name]
    actual, scaling = frequencies(_config(name), jnp.asarray([entry["length"]], jnp.int32))
    assert actual.shape == (1, len(entry["inv_freq"]))
    np.testing.assert_allclose(actual[0], entry["inv_freq"], rtol=3e-7)
    assert scaling == pytest.approx(entry["attention_scaling"], rel=1e-12)


def test_odd_yarn_has_a_ramp_value_for_each_frequency():
    """The correction range is [0, 1]: the first frequency stays and the second is divided."""
    actual, _ = frequencies(_config(BROADCAST_IN_TRANSFORMERS), jnp.asarray([48], jnp.int32))
    np.testing.assert_allclose(actual[0], [1, 10_000 ** (-2 / 3) / 4], rtol=3e-7)


@pytest.mark.parametrize("names", [("dynamic_small_127", "dynamic_small_400"), ("longrope_odd_33", "longrope_odd_32")])
def test_each_row_has_the_frequencies_of_its_own_length(names):
    lengths = jnp.asarray([ENTRIES[name]["length"] for name in names], jnp.int32)
    actual, _ = frequencies(_config(names[0]), lengths)
    for row, name in enumerate(names):
        np.testing.assert_allclose(actual[row], ENTRIES[name]["inv_freq"], rtol=3e-7)


@pytest.mark.parametrize("names", [("dynamic_small_127", "dynamic_small_400"), ("longrope_odd_32", "longrope_odd_33")])
def test_a_row_is_as_long_as_its_last_position_says(names):
    positions = [[0, ENTRIES[name]["length"] - 1] for name in names]
    cos, _ = _tables(_config(names[0]), positions)
    for row, name in enumerate(names):
        angles = np.asarray(ENTRIES[name]["inv_freq"]) * positions[row][1]
        np.testing.assert_allclose(cos[row, 1, 0], ENTRIES[name]["attention_scaling"] * np.cos(angles), atol=1e-4)


@pytest.mark.parametrize("name", ["default_big", "default_odd", "default_whole", "yarn_big", "linear_small"])
def test_rotation_is_complex_multiplication(name):
    """Dimension i is the real part and i + frequencies the imaginary one; what lies behind passes bit for bit."""
    config, entry = _config(name), ENTRIES[name]
    positions = np.array([[0, 1, 2, 3, 4], [5, 3, 17, 30, 47]])
    x = _heads(5, config.head_dim)
    actual = np.asarray(rotate(x, *_tables(config, positions)))
    half = len(entry["inv_freq"])
    number = np.asarray(x[..., :half], np.complex128) + 1j * np.asarray(x[..., half : 2 * half], np.float64)
    angles = positions[:, :, None, None] * np.asarray(entry["inv_freq"])
    turned = number * entry["attention_scaling"] * np.exp(1j * angles)
    np.testing.assert_allclose(actual[..., :half], turned.real, atol=1e-5)
    np.testing.assert_allclose(actual[..., half : 2 * half], turned.imag, atol=1e-5)
    np.testing.assert_array_equal(actual[..., 2 * half :], x[..., 2 * half :])


def test_published_size_rotates_a_quarter_of_each_head():
    """Of 256 channels the first 64 turn, at any position but 0."""
    x = _heads(2, 256)
    rotated = rotate(x, *_tables(_config(rope_theta=1e7), [[0, 1], [500, 4000]]))
    np.testing.assert_array_equal(rotated[..., 64:], x[..., 64:])
    np.testing.assert_array_equal(rotated[0, 0], x[0, 0])
    # At position 500 and theta 1e7 even the slowest of them turns by 500 * 1e7^(-31/32), which shows in float32.
    assert np.all(np.any(np.asarray(rotated != x)[1, :, :, :64], axis=1))


def test_scores_depend_on_the_distance_alone():
    config = _config("default_whole")
    q, k = _heads(6, 32), _heads(6, 32, seed=1)

    def scores(offset):
        tables = _tables(config, np.broadcast_to(np.arange(6) + offset, (2, 6)))
        return jnp.einsum("bihd,bjhd->bhij", rotate(q, *tables), rotate(k, *tables))

    np.testing.assert_allclose(scores(37), scores(0), atol=1e-4)
    assert np.max(np.abs(scores(0) - jnp.einsum("bihd,bjhd->bhij", q, k))) > 1  # and on the distance they do depend


def test_attention_scaling_is_on_the_rotated_part_alone():
    config, scaling = _config("yarn_big_mscale"), ENTRIES["yarn_big_mscale"]["attention_scaling"]
    x = np.asarray(_heads(4, 256))
    rotated = np.asarray(rotate(jnp.asarray(x), *_tables(config, [[0, 5, 100, 900]] * 2)))
    half = len(ENTRIES["yarn_big_mscale"]["inv_freq"])
    lengths = [np.hypot(y[..., :half], y[..., half : 2 * half]) for y in (rotated, x)]
    np.testing.assert_allclose(lengths[0], scaling * lengths[1], rtol=1e-5)
    np.testing.assert_array_equal(rotated[..., 2 * half :], x[..., 2 * half :])


def test_tables_are_rounded_once():
    """Angles are float32 in a bfloat16 model: a position of 1001 has no bfloat16."""
    config, positions = _config("default_big"), jnp.asarray([[1001]], jnp.int32)
    exact = rotary_tables(config, positions, jnp.dtype("float32"))
    rounded = rotary_tables(config, positions, jnp.dtype("bfloat16"))
    for narrow, wide in zip(rounded, exact, strict=True):
        np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))
