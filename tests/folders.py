"""Hugging Face folders for tests: reading and writing them with the safetensors library, and damaging them."""

import collections
import json
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from common import layers_of
from safetensors.numpy import load_file, save_file

from qwen3next.errors import InputError

DATA = Path(__file__).parent / "data"
PLAIN = DATA / "golden_extra" / "w_longrope_dynamic"  # the smallest: two layers
TIED = DATA / "golden" / "d_tied"

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


KEY, UP = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.experts.3.up_proj.weight"
FUSED = "model.layers.0.mlp.experts.gate_up_proj"


def one_line(error: pytest.ExceptionInfo[InputError], *words: Any) -> None:
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message, f"{word!r} is not in {message!r}"


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All published tensors of a folder, fused experts taken apart."""
    files = sorted(folder.glob("model*.safetensors"))
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    tensors = {}
    for name, tensor in stored.items():
        if match := re.fullmatch(r"(.+\.experts)\.gate_up_proj", name):
            for expert, both in enumerate(tensor):
                gate, up = np.split(both, 2)
                tensors |= {f"{match[1]}.{expert}.gate_proj.weight": gate, f"{match[1]}.{expert}.up_proj.weight": up}
        elif match := re.fullmatch(r"(.+\.experts)\.down_proj", name):
            tensors |= {f"{match[1]}.{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            tensors[name] = tensor
    return tensors


def fuse(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts of each layer in two tensors."""
    fused, experts = {}, collections.defaultdict(dict)
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            experts[match[1]][int(match[2]), match[3]] = tensor
        else:
            fused[name] = tensor
    for path, found in experts.items():
        each = range(len(found) // 3)
        fused[f"{path}.gate_up_proj"] = np.stack([np.concatenate([found[e, "gate"], found[e, "up"]]) for e in each])
        fused[f"{path}.down_proj"] = np.stack([found[e, "down"] for e in each])
    return fused


def write_folder(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any], shards: int = 0) -> Path:
    """A checkpoint: one file, or `shards` of them with neighbouring tensors far apart, and an index."""
    (folder / "config.json").write_text(json.dumps(config))
    if not shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    files = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    weight_map = {name: files[place % shards] for place, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def damaged(folder: Path, damage: Any, *, fused: bool = False, shards: int = 0) -> Path:
    tensors = read_tensors(PLAIN)
    tensors = fuse(tensors) if fused else tensors
    damage(tensors)
    return write_folder(folder, tensors, json.loads((PLAIN / "config.json").read_text()), shards)


def check_model(model: Any, tensors: dict[str, np.ndarray]) -> None:
    """Each tensor is bit for bit where its name says it belongs, and no parameter is without one."""
    layers = layers_of(model)
    outside = {"model.embed_tokens.weight": model.embed_tokens.weight, "model.norm.weight": model.norm.weight}
    if model.lm_head is not None:
        outside["lm_head.weight"] = model.lm_head.weight
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == sum(tensor.size for tensor in tensors.values())
    for name, tensor in tensors.items():
        if name in outside:
            assert np.asarray(outside[name]).dtype == tensor.dtype, name
            assert np.asarray(outside[name]).tobytes() == tensor.tobytes(), name
            continue
        index, *path = name.split(".")[2:]
        node: Any = layers[int(index)]
        expert = None
        for part in path:
            if part.isdigit():
                expert = int(part)
            elif not eqx.is_array(node):
                node = getattr(node, re.sub("(linear|self)_attn", "mixer", part))
        node = np.asarray(node if expert is None else node[expert])
        assert node.dtype == tensor.dtype, name
        assert node.tobytes() == tensor.tobytes(), name
