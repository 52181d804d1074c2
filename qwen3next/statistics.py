"""What the layers of a step did, as figures to log: load of experts, memory of states, openness of gates."""

import math
from collections.abc import Sequence

import numpy as np

from qwen3next.layer import LayerStats
from qwen3next.mixer import MixerStats
from qwen3next.moe import RouterStats

_TOGETHER = {"load_max": max, "load_min": min, "dead": sum, "overflow": np.mean, "dropped": np.mean}
_LAYERS = 8  # of which figures are logged one by one, spread evenly


def layer_figures(layers: Sequence[LayerStats], drops: bool) -> dict[str, float]:
    """Figures of a step's sums, by name: `layers/03/load_max`, and of all routers together `router/load_max`.

    `load_max` and `load_min` are the assignments of the fullest and the emptiest expert by those in perfect balance;
    `load_entropy` is 1 in perfect balance, 0 where one expert has all; `dead` experts had none; `overflow` is the share
    of assignments that a device's first pass had no room for, and `dropped` that of those lost, if overflow `drops`.
    `balance` is the layer's balance loss, unscaled. `half_life` is tokens until a Gated DeltaNet state has faded by
    half, `gate` how open a gate is, 0 to 1: the lowest, median and highest of the heads.
    """
    figures = dict[str, float]()
    routers = [_router(layer.router, drops) for layer in layers if layer.router is not None]
    if routers:
        for name, gather in _TOGETHER.items():
            figures[f"router/{name}"] = float(gather([router[name] for router in routers]))
    shown = np.unique(np.linspace(0, len(layers) - 1, min(len(layers), _LAYERS)).round().astype(int))
    for number in map(int, shown):
        layer = layers[number]
        own = _mixer(layer.mixer) | ({} if layer.router is None else _router(layer.router, drops))
        figures |= {f"layers/{number:02}/{name}": value for name, value in own.items()}
    return figures


def _router(stats: RouterStats, drops: bool) -> dict[str, float]:
    assigned, probability = (np.asarray(x, np.float64) for x in (stats.assigned, stats.probability))
    total, tokens, experts = max(assigned.sum(), 1), max(float(stats.tokens), 1), assigned.size
    share, overflow = assigned / total, float(stats.overflow) / total
    entropy = -np.sum(share * np.log(np.where(share > 0, share, 1))) / math.log(max(experts, 2))
    return {
        "load_max": float(share.max() * experts),
        "load_min": float(share.min() * experts),
        "load_entropy": float(entropy),
        "dead": float(np.sum(assigned == 0)),
        "overflow": overflow,
        "dropped": overflow * drops,
        "balance": float(experts * np.sum(assigned / tokens * probability / tokens)),
    }


def _mixer(stats: MixerStats) -> dict[str, float]:
    tokens = max(float(stats.tokens), 1)
    spread = {"gate": np.asarray(stats.gate, np.float64) / tokens}
    if stats.decay is not None:
        spread["half_life"] = math.log(2) / np.maximum(-np.asarray(stats.decay, np.float64) / tokens, 1e-9)
    pick = {"min": np.min, "median": np.median, "max": np.max}
    return {f"{name}_{word}": float(take(heads)) for name, heads in spread.items() for word, take in pick.items()}
