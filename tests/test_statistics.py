"""Figures of layers from sums that are known."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from qwen3next.layer import LayerStats
from qwen3next.mixer import MixerStats
from qwen3next.moe import RouterStats
from qwen3next.statistics import layer_figures


def _router(*sums):
    return RouterStats(*(jnp.asarray(x, jnp.float32) for x in sums))


def _layer(assigned, overflow=0.0, decay=None):
    router = _router(assigned, np.full(len(assigned), 10 / len(assigned)), 10, overflow)
    return LayerStats(router, MixerStats(np.asarray([1.0, 5.0, 9.0]), decay, 10.0))


def test_figures_are_those_of_the_formulas():
    even, skewed = _layer([5, 5, 5, 5]), _layer([20, 0, 0, 0], 4.0, np.asarray([-10.0, -1.0, -0.1]) * math.log(2))
    found = layer_figures([even, skewed], drops=True)
    assert found["layers/00/load_max"] == found["layers/00/load_min"] == pytest.approx(1)
    assert found["layers/00/load_entropy"] == pytest.approx(1) and found["layers/01/load_entropy"] == pytest.approx(0)
    assert found["layers/01/load_max"] == 4 and found["layers/01/dead"] == 3
    assert found["layers/00/balance"] == pytest.approx(2) and found["layers/01/balance"] == pytest.approx(2)
    assert found["layers/01/overflow"] == found["layers/01/dropped"] == pytest.approx(0.2)
    assert [found[f"layers/01/half_life_{word}"] for word in ("min", "median", "max")] == pytest.approx([1, 10, 100])
    assert [found[f"layers/00/gate_{word}"] for word in ("min", "median", "max")] == pytest.approx([0.1, 0.5, 0.9])
    assert "layers/00/half_life_min" not in found
    assert found["router/load_max"] == 4 and found["router/load_min"] == 0 and found["router/dead"] == 3
    assert found["router/dropped"] == pytest.approx(0.1)
    assert layer_figures([skewed], drops=False)["router/dropped"] == 0


def test_a_deep_model_logs_no_more_layers_than_a_few():
    found = layer_figures([_layer([5, 5, 5, 5])] * 48, drops=False)
    shown = sorted({name.split("/")[1] for name in found if name.startswith("layers/")})
    assert len(shown) == 8 and shown[0] == "00" and shown[-1] == "47" and len(found) < 120


def test_dense_layers_and_no_tokens_have_finite_figures():
    nothing = LayerStats(None, MixerStats(np.zeros(2), np.zeros(2), 0.0))
    empty = LayerStats(_router(np.zeros(4), np.zeros(4), 0, 0), nothing.mixer)
    assert all(map(math.isfinite, layer_figures([nothing, empty], drops=True).values()))
    assert not any("load" in name for name in layer_figures([nothing], drops=True))
