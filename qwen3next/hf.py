"""Hugging Face checkpoint folders, both ways. One table says which tensors make up each of our leaves.

Our leaves keep the names, shapes and [out, in] layout of the published tensors, so what differs is only this:

* a layer's tensors are stacked: [run] in a prefix or remainder, [block, run] in the cycles;
* `mixer` is `linear_attn` or `self_attn` by the layer's kind;
* an expert leaf [experts, ...] is one tensor an expert. Read, it may be all in one fused tensor too: `gate_up_proj`
  holds the gate's rows and then the up projection's;
* without `lm_head` the embedding is the head. `mtp.*`, the extra prediction head, has no leaves.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from qwen3next.config import ModelConfig, StoredDtype
from qwen3next.errors import require
from qwen3next.hf_config import config_values, read_config, updated_values
from qwen3next.leaves import Leaf, ShardingRule, find_faults, load_leaves, require_no
from qwen3next.model import Qwen3Next, abstract_model
from qwen3next.progress import transfer
from qwen3next.structure import read_json
from qwen3next.tensor_files import Stored, read, read_folder
from qwen3next.tensor_writer import kind_spec, lay_out_folder, new_folder, parse_size, write, write_index
from qwen3next.tree import leaf_path

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OUTSIDE = {"embed_tokens.weight": EMBED, "norm.weight": "model.norm.weight"}
_MODULES = {"linear_attention": "linear_attn", "full_attention": "self_attn"}
# What else a folder says about its model.
COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
COMPANIONS += ("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json")


def table(model: Qwen3Next) -> Iterator[Leaf]:
    """Each leaf of the (abstract) model with the published tensors that it is made of."""
    config, stacks = model.config, model.decoder.pattern.layer_numbers()
    modules = [_MODULES[kind.mixer] for kind in config.layer_kinds]
    for key, leaf in jax.tree_util.tree_leaves_with_path(model):
        path = leaf_path(key)
        match = re.fullmatch(r"(decoder\..+?\.runs\.\d+\.modules)\.(.+)", path)
        if match is None:
            yield Leaf(path, leaf.shape, np.array(_OUTSIDE.get(path, path), object))
            continue
        layers = np.asarray(stacks[match[1]])
        inside = re.sub("conv1d$", "conv1d.weight", match[2])
        routed = inside.startswith("mlp.experts.")
        names = np.empty((*layers.shape, config.num_experts) if routed else layers.shape, object)
        for at in np.ndindex(names.shape):
            layer = int(layers[at[: layers.ndim]])
            name = re.sub("^mixer", modules[layer], inside)
            if routed:
                name = name.replace("mlp.experts.", f"mlp.experts.{at[-1]}.")
            names[at] = f"model.layers.{layer}.{name}"
        yield Leaf(path, leaf.shape, names)


@dataclass(frozen=True)
class Plan:
    """A checkpoint folder as its headers tell of it: no tensor has been read.

    `leaves` name published tensors, and `tensors` says where each lies. `faults`: why it cannot be read, a line a
    tensor. `extra` are the `mtp.*` tensors. `head` is an `lm_head` beside the embedding of a config that ties the two:
    `decide_tie` compares them.
    """

    folder: Path
    config: ModelConfig
    leaves: tuple[Leaf, ...]
    tensors: dict[str, Stored]
    faults: list[str]
    extra: dict[str, Stored]
    head: Stored | None = None


def _take_apart(tensors: dict[str, Stored], config: ModelConfig) -> dict[str, Stored]:
    """Fused experts as one tensor an expert, each a stretch of the same file."""
    experts, width, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
    shapes = {"gate_up_proj": (experts, 2 * width, hidden), "down_proj": (experts, hidden, width)}
    apart = dict(tensors)
    for name, fused in tensors.items():
        match = re.fullmatch(r"(model\..+\.experts)\.(gate_up_proj|down_proj)", name)
        if match is None:
            continue
        shape = shapes[match[2]]
        require(fused.shape == shape, f"{fused.file}: tensor {name} is {fused.shape}; it must be {shape}")
        del apart[name]
        for expert in range(experts):
            both = fused.part((expert,))
            halves = {"down_proj": both}
            if match[2] == "gate_up_proj":
                halves = {"gate_proj": both.rows(0, width), "up_proj": both.rows(width, 2 * width)}
            for projection, half in halves.items():
                alone = f"{match[1]}.{expert}.{projection}.weight"
                require(alone not in tensors, f"{fused.file}: tensor {name} holds what {alone} holds too; one must go")
                apart[alone] = half
    return apart


def plan_pretrained(folder: str | Path) -> Plan:
    """What a Hugging Face folder holds: plain or sharded, experts one by one or fused.

    Raises `InputError` for damage to the index or a header, and for a tensor that stands there twice.
    """
    folder = Path(folder)
    tensors = read_folder(folder)
    config = read_config(folder)
    extra = {name: stored for name, stored in tensors.items() if name.startswith("mtp.")}
    tensors = _take_apart({name: stored for name, stored in tensors.items() if name not in extra}, config)
    head = tensors.pop(HEAD, None) if config.tie_word_embeddings else None
    if head is not None and EMBED not in tensors:  # alone, it is the embedding too
        tensors[EMBED], head = head, None
    leaves = tuple(table(abstract_model(config)))
    return Plan(folder, config, leaves, tensors, find_faults(folder, leaves, tensors), extra, head)


def decide_tie(plan: Plan) -> Plan:
    """A plan whose head is settled: an equal one is not needed, a different one unties the model. Reads both."""
    if plan.head is None:
        return plan

    def values(chunk: Stored) -> np.ndarray:
        out = np.empty(chunk.shape, np.float32)
        read(chunk, out, allow_nonfinite=True)
        return out

    embed, head = plan.tensors[EMBED], plan.head
    pairs = zip(embed.chunks(), head.chunks(), strict=False)
    if embed.shape == head.shape and all(np.array_equal(values(a), values(b), equal_nan=True) for a, b in pairs):
        return dataclasses.replace(plan, head=None)
    config = dataclasses.replace(plan.config, tie_word_embeddings=False)
    leaves, tensors = tuple(table(abstract_model(config))), plan.tensors | {HEAD: head}
    return Plan(plan.folder, config, leaves, tensors, find_faults(plan.folder, leaves, tensors), plan.extra)


def load_pretrained(
    folder: str | Path,
    dtype: StoredDtype | None = None,
    *,
    sharding: ShardingRule | None = None,
    allow_nonfinite: bool = False,
) -> Qwen3Next:
    """The model of a Hugging Face folder: plain or sharded, experts one by one or fused.

    A leaf keeps the dtype of its tensors (float32, bfloat16 or float16; float32 where those of a stack differ), or is
    cast to `dtype`; decay parameters (`A_log`, `dt_bias`) are then float32. `sharding(path, shape)` says where a leaf
    lies, `None` being the default device; of a sharded leaf only what a device needs is read for it. On the host there
    is one stacked leaf at a time. `mtp.*` tensors are left out.

    Raises `InputError` naming file and tensor for one that is missing, unknown, twice there, of a wrong shape or dtype,
    cut short, or, unless `allow_nonfinite`, holds NaN or infinity.
    """
    plan = plan_pretrained(folder)
    require_no(plan.faults)
    plan = decide_tie(plan)
    require_no(plan.faults)
    config = plan.config if dtype is None else dataclasses.replace(plan.config, dtype=dtype)
    total = sum(plan.tensors[name].nbytes for leaf in plan.leaves for _, name in leaf.parts())
    with transfer(f"reading {folder}", total, summary=False) as advance:
        reading = {"allow_nonfinite": allow_nonfinite, "advance": advance}
        return load_leaves(abstract_model(config), plan.leaves, plan.tensors, dtype, sharding, **reading)


def write_companions(
    new: Path, like: Path | None, config: ModelConfig, end_of_text: tuple[int, ...] = (), *, with_mtp: bool = False
) -> None:
    """What stands beside the tensors: config.json, and the small files of `like`, a folder it shall agree with."""
    values = config_values(config, end_of_text)
    if like is not None and (like / "config.json").is_file():
        values = updated_values(read_json(like / "config.json"), config, with_mtp=with_mtp)
    for name in COMPANIONS:
        if like is not None and (like / name).is_file():
            shutil.copyfile(like / name, new / name)
    (new / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def save_pretrained(
    model: Qwen3Next,
    folder: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    like: str | Path | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the model as a Hugging Face folder under the published names, shapes and [out, in] layout.

    Each tensor has its leaf's dtype: float32, bfloat16 or float16. Files hold at most `max_shard_size` of tensors
    (`5GB`, `500MB`, `2GiB`, or bytes) unless one is larger. `like` is a folder, say the one the model was loaded from:
    its tokenizer files and all keys of its config.json come along, but for what the model says otherwise. On the host
    there is one leaf at a time, whatever its strides or sharding.

    The folder appears when it is complete. Raises `InputError`, leaving what was there untouched, for a folder that is
    not empty (`overwrite` replaces a checkpoint), a file that cannot be written, or another dtype.
    """
    leaves, arrays = tuple(table(model)), jax.tree.leaves(model)
    specs = {
        name: kind_spec(array.dtype, leaf.tensor_shape)
        for leaf, array in zip(leaves, arrays, strict=True)
        for _, name in leaf.parts()
    }
    limit, folder = parse_size(max_shard_size), Path(folder)
    total = sum(spec.nbytes for spec in specs.values())
    with new_folder(folder, overwrite) as new, transfer(f"writing {folder}", total, summary=False) as advance:
        layout = lay_out_folder(new, specs, limit)
        layout.create()
        for leaf, array in zip(leaves, arrays, strict=True):
            host = np.asarray(jax.device_get(array))
            for at, name in leaf.parts():
                write(layout.tensors[name], host[at])
                advance(specs[name].nbytes)
        write_index(new, layout)
        write_companions(new, None if like is None else Path(like), model.config)
