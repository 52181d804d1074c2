"""Hugging Face checkpoint folders. One table says which tensors make up each of our leaves.

Our leaves keep the names, shapes and [out, in] layout of the published tensors, so what differs is only this:

* a layer's tensors are stacked: [run] in a prefix or remainder, [block, run] in the cycles;
* `mixer` is `linear_attn` or `self_attn` by the layer's kind;
* an expert leaf [experts, ...] is one tensor an expert, or all in one fused tensor: `gate_up_proj` holds the gate's
  rows and then the up projection's;
* without `lm_head` the embedding is the head. `mtp.*`, the extra prediction head, is not read.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from qwen3next.config import Dtype, ModelConfig
from qwen3next.errors import InputError, require
from qwen3next.hf_config import read_config, read_json
from qwen3next.model import Qwen3Next, abstract_model
from qwen3next.tree import leaf_path

_OUTSIDE = {"embed_tokens": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_MODULES = {"linear_attention": "linear_attn", "full_attention": "self_attn"}


class Leaf(NamedTuple):
    """One of our arrays: its path, and the names of its tensors in an array of the shape of its leading axes."""

    path: str
    shape: tuple[int, ...]
    tensors: np.ndarray


def _in_layer(config: ModelConfig, index: int, path: str, expert: int | None) -> str:
    """Published name of a layer's tensor, `path` being that of our leaf inside the layer."""
    name = re.sub("^mixer", _MODULES[config.layer_kinds[index].mixer], path)
    name = re.sub("conv1d$", "conv1d.weight", name)
    if expert is not None:
        name = name.replace("mlp.experts.", f"mlp.experts.{expert}.") + ".weight"
    return f"model.layers.{index}.{name}"


def table(model: Qwen3Next) -> Iterator[Leaf]:
    """Each leaf of the (abstract) model with the published tensors that it is made of."""
    config, pattern = model.config, model.decoder.pattern
    numbers = pattern.group([np.int32(i) for i in range(config.num_hidden_layers)])
    places = {"prefix": numbers.prefix, "cycles.modules": numbers.cycle, "remainder": numbers.remainder}
    for key, leaf in jax.tree_util.tree_leaves_with_path(model):
        path = leaf_path(key)
        match = re.fullmatch(r"decoder\.(.+?)\.runs\.(\d+)\.modules\.(.+)", path)
        if match is None:
            yield Leaf(path, leaf.shape, np.array(_OUTSIDE.get(path, path), object))
            continue
        layers = np.asarray(places[match[1]][int(match[2])])
        routed = match[3].startswith("mlp.experts.")
        shape = (*layers.shape, config.num_experts) if routed else layers.shape
        names = np.empty(shape, object)
        for at in np.ndindex(shape):
            names[at] = _in_layer(config, int(layers[at[: layers.ndim]]), match[3], at[-1] if routed else None)
        yield Leaf(path, leaf.shape, names)


class _Tensors:
    """The tensors of a folder, by name, read one at a time."""

    def __init__(self, folder: Path):
        require(folder.is_dir(), f"{folder} is not a folder; it must be one with a checkpoint in it")
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        self._open: dict[Path, Any] = {}
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise InputError(f"{index}: must hold a 'weight_map' from tensor to file")
            for name, file in weight_map.items():
                require(isinstance(file, str), f"{index}: the file of tensor {name} is {file!r}; it must be a name")
            self.files = {name: folder / file for name, file in weight_map.items()}
            held = {file: set(self._handle(file).keys()) for file in set(self.files.values())}
            for name, file in self.files.items():
                require(name in held[file], f"{file} lacks tensor {name}, which {index} says it holds")
            for file, names in held.items():
                for name in sorted(names - set(self.files)):
                    raise InputError(f"{file} holds tensor {name}, which {index} does not list")
        else:
            require(single.is_file(), f"{folder} holds no checkpoint; needed: model.safetensors or {index.name}")
            self.files = dict.fromkeys(self._handle(single).keys(), single)
        self.unread = set(self.files)
        self.alias: dict[str, str] = {}

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="numpy")
            except (OSError, SafetensorError) as error:
                raise InputError(f"{file}: not a readable safetensors file ({error})") from error
        return self._open[file]

    def read(self, name: str, shape: tuple[int, ...], rows: tuple[Any, ...] = ()) -> np.ndarray:
        """Tensor `name`, or `tensor[rows]`, of which `shape` is required."""
        name = self.alias.get(name, name)
        self.unread.discard(name)
        handle = self._handle(self.files[name])
        tensor = handle.get_slice(name)[rows] if rows else handle.get_tensor(name)
        require(tensor.shape == shape, f"{self.files[name]}: tensor {name} is {tensor.shape}; it must be {shape}")
        return tensor


def _read_leaf(tensors: _Tensors, leaf: Leaf, dtype: np.dtype) -> np.ndarray:
    out = np.empty(leaf.shape, dtype)
    lead, shape = leaf.tensors.ndim, leaf.shape[leaf.tensors.ndim :]
    for at in np.ndindex(leaf.tensors.shape):
        name = str(leaf.tensors[at])
        if name in tensors.files:
            out[at] = tensors.read(name, shape).astype(dtype)
            continue
        fused = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        together = f"{fused[1]}.{'down_proj' if fused[3] == 'down' else 'gate_up_proj'}" if fused else ""
        if fused is None or together not in tensors.files:
            raise InputError(f"tensor {name} is missing; the config asks for it")
        if at[lead - 1] > 0:
            continue  # expert 0 has brought them all
        experts, rows = leaf.tensors.shape[-1], leaf.shape[-2]
        if fused[3] == "down":
            out[at[:-1]] = tensors.read(together, leaf.shape[lead - 1 :]).astype(dtype)
        else:
            both = tensors.read(together, (experts, 2 * rows, leaf.shape[-1]))
            out[at[:-1]] = (both[:, :rows] if fused[3] == "gate" else both[:, rows:]).astype(dtype)
    return out


def _resolve_tie(config: ModelConfig, tensors: _Tensors) -> ModelConfig:
    """A tied config whose file holds a head: alone it is the embedding too; a different one unties the model."""
    embed, head = _OUTSIDE["embed_tokens"], "lm_head.weight"
    if not config.tie_word_embeddings or head not in tensors.files:
        return config
    if embed not in tensors.files:
        tensors.files[embed], tensors.alias[embed] = tensors.files[head], head
        return config
    shape = (config.vocab_size, config.hidden_size)
    if np.array_equal(tensors.read(embed, shape), tensors.read(head, shape)):
        return config
    return dataclasses.replace(config, tie_word_embeddings=False)


def load_pretrained(folder: str | Path, dtype: Dtype | None = None) -> Qwen3Next:
    """The model of a Hugging Face folder: plain or sharded, experts one by one or fused.

    `dtype` is that of the parameters, by default the config's; decay parameters are float32 always.
    Raises `InputError` naming file and tensor for one that is missing, unknown or of a wrong shape.
    """
    folder = Path(folder)
    tensors = _Tensors(folder)
    config = _resolve_tie(read_config(folder), tensors)
    skeleton = abstract_model(config if dtype is None else dataclasses.replace(config, dtype=dtype))
    leaves = zip(table(skeleton), jax.tree.leaves(skeleton), strict=True)
    arrays = [jnp.asarray(_read_leaf(tensors, leaf, np.dtype(like.dtype))) for leaf, like in leaves]
    unknown = sorted(name for name in tensors.unread if not name.startswith("mtp."))
    require(not unknown, f"{folder}: {len(unknown)} tensors have no place in the model, the first is {unknown[:1]}")
    return jax.tree.unflatten(jax.tree.structure(skeleton), arrays)
