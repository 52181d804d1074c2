"""Devices along four axes, and how arrays and rows are cut over them.

Rows of a batch lie over `data`, `fsdp` and `expert`. Parameters and optimizer state are cut over `fsdp` and `expert`
(ZeRO, Rajbhandari et al. 2020) and gathered where they are computed with, one layer's at a time; routed experts stay on
their `expert` devices and tokens travel to them (GShard, Lepikhin et al. 2020). Over `tensor`, heads, widths and the
vocabulary are cut, and partial results are summed (Megatron-LM, Shoeybi et al. 2019).
"""

import math
import re
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from qwen3next.config import Compute, MeshConfig, TrainConfig
from qwen3next.errors import require
from qwen3next.tree import leaf_path, stacked_axes

AXES = ("data", "fsdp", "expert", "tensor")
ROW_AXES = AXES[:3]
ROWS, HEADS, ALIKE = P(ROW_AXES), P("tensor"), P()
Sizes = dict[str, int]  # devices along each axis
Cuts = tuple[tuple[str, ...], ...]  # for each axis of an array the axes of devices that it is cut over, major first

_SMALLEST = 2**16  # elements of one layer's array below which fsdp leaves all of it on every device
_EXPERTS = re.compile(r"(^|\.)mlp\.experts\.")
_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head)\.")
# Of one layer's array the axis, counted from its end, that holds heads, an MLP's width or the vocabulary.
_TENSOR = (
    (r"(q_proj|k_proj|v_proj|in_proj_qkvz|in_proj_ba|gate_proj|up_proj|lm_head)(\.base)?\.(weight|lora_B)$", -2),
    (r"(q_proj|k_proj|v_proj|in_proj_qkvz|in_proj_ba|gate_proj|up_proj|lm_head)(\.base)?\.bias$", -1),
    (r"(o_proj|out_proj|down_proj)(\.base)?\.(weight|lora_A)$", -1),
    (r"embed_tokens(\.base)?\.weight$", -2),
    (r"embed_tokens\.lora_A$", -1),
    (r"(A_log|dt_bias)$", -1),
)


def is_expert(path: str) -> bool:
    """Whether a leaf is of routed experts, one along its first axis of a layer's array."""
    return _EXPERTS.search(path) is not None


def tensor_axis(path: str) -> int | None:
    """The axis of a leaf, counted from its end, that is cut over `tensor`."""
    return next((axis for pattern, axis in _TENSOR if re.search(rf"(^|\.){pattern}", path)), None)


def leaf_cuts(path: str, shape: tuple[int, ...], sizes: Sizes) -> Cuts:
    """How one array of a model, or of its optimizer's state, is cut: the table of all rules.

    Experts over `expert`; heads, widths and a vocabulary that divides over `tensor`; and over what is left of `fsdp`
    and `expert` the first axis that divides, for its slices stay whole in memory. What is small is not cut by the last
    rule, but a vocabulary always is if it divides.
    """
    cuts, stacked = [list[str]() for _ in shape], stacked_axes(path)
    rest, tensor = [name for name in ("fsdp", "expert") if sizes[name] > 1], tensor_axis(path)
    tensor = None if tensor is None else len(shape) + tensor

    def divides(axis: int, names: Collection[str]) -> bool:
        return shape[axis] % math.prod(sizes[name] for name in (*cuts[axis], *names)) == 0

    if is_expert(path) and "expert" in rest and len(shape) > stacked:
        cuts[stacked].append("expert")
        rest.remove("expert")
    vocabulary = _VOCABULARY.search(path) is not None
    if tensor is not None and sizes["tensor"] > 1 and (divides(tensor, ["tensor"]) or not vocabulary):
        cuts[tensor].append("tensor")
    axes = list(range(stacked, len(shape)))
    if vocabulary and tensor is not None and divides(tensor, rest):
        axes = [tensor]
    elif math.prod(shape[stacked:]) < _SMALLEST:
        axes = []
    axis = next((axis for axis in axes if divides(axis, rest)), None)
    if axis is not None:
        cuts[axis] += rest
    return tuple(map(tuple, cuts))


def leaf_spec(path: str, shape: tuple[int, ...], sizes: Sizes) -> P:
    """`leaf_cuts` as JAX takes it."""
    return P(*(names or None for names in leaf_cuts(path, shape, sizes)))


def tokens_travel(compute: Compute, sizes: Sizes) -> bool:
    """Whether routed experts stay on their devices and tokens are sent to them."""
    return compute.dispatch == "all_to_all" or (compute.dispatch == "auto" and sizes["expert"] > 1)


def check_mesh(config: TrainConfig, sizes: Sizes) -> None:
    """Raises `InputError` for experts, heads, widths or rows that do not divide among the devices."""
    model, compute = config.model, config.compute
    moe, dense = (any(kind.mlp == mlp for kind in model.layer_kinds) for mlp in ("moe", "dense"))
    names = ["num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"]
    names += ["moe_intermediate_size", "shared_expert_intermediate_size"] * moe + ["intermediate_size"] * dense
    for axis, fields in (("expert", ["num_experts"] * moe), ("tensor", names)):
        for name in fields:
            size = getattr(model, name)
            require(
                size % sizes[axis] == 0, f"model.{name} is {size}; it must be a multiple of mesh.{axis}, {sizes[axis]}"
            )
    biased = model.attention_bias and sizes["tensor"] > 1
    require(not biased, f"model.attention_bias with mesh.tensor {sizes['tensor']}; biases need mesh.tensor 1")
    heads, linear = model.linear_num_key_heads // sizes["tensor"], "linear_attention"
    even = heads % compute.delta_parts == 0 or not any(kind.mixer == linear for kind in model.layer_kinds)
    require(
        even, f"compute.delta_parts is {compute.delta_parts}; a device's {heads} key heads must be a multiple of it"
    )
    rows, parts, shards = config.data.batch_size, config.run.accumulate, row_shards(sizes)
    require(
        rows % (parts * shards) == 0,
        f"data.batch_size is {rows}; it must be a multiple of run.accumulate, {parts}, times the {shards} devices that "
        f"rows lie over (mesh data x fsdp x expert)",
    )
    tokens = rows // (parts * shards) * config.data.sequence_length
    require(
        not (moe and tokens_travel(compute, sizes)) or tokens % compute.expert_chunks == 0,
        f"compute.expert_chunks is {compute.expert_chunks}; a device's {tokens} tokens must be a multiple of it",
    )


def make_mesh(config: MeshConfig, devices: Sequence[Any]) -> Mesh:
    """All devices along the four axes."""
    shape = tuple(config.sizes(len(devices)).values())
    grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def axis_sizes() -> Sizes:
    """Devices along each axis of the mesh that is set; 1 along each without one."""
    return dict.fromkeys(AXES, 1) | dict(jax.sharding.get_abstract_mesh().shape)


def row_shards(sizes: Sizes) -> int:
    """Parts that a batch's rows are cut into."""
    return math.prod(sizes[name] for name in ROW_AXES)


def shardings(tree: PyTree, mesh: Mesh) -> PyTree:
    """A sharding for each array (or its shape) of a state."""

    def sharding(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, leaf_spec(leaf_path(path), leaf.shape, dict(mesh.shape)))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def constrain(tree: PyTree) -> PyTree:
    """Says that the arrays lie as those of a model do; nothing without a mesh."""
    sizes = axis_sizes()
    if math.prod(sizes.values()) == 1:
        return tree

    def constrained(path: tuple, leaf: Array) -> Array:
        return jax.lax.with_sharding_constraint(leaf, leaf_spec(leaf_path(path), leaf.shape, sizes))

    return jax.tree_util.tree_map_with_path(constrained, tree)


def current_mesh() -> Mesh | None:
    """The mesh that is set, if it has several devices."""
    mesh = jax.sharding.get_mesh()
    return mesh if mesh.size > 1 else None


def leaf_sharding(path: str, shape: tuple[int, ...]) -> NamedSharding | None:
    """Where an array of a model or of its state lies in the mesh that is set; `None` without one."""
    mesh = current_mesh()
    return None if mesh is None else NamedSharding(mesh, leaf_spec(path, shape, dict(mesh.shape)))


def state_shardings(tree: PyTree) -> PyTree:
    """`shardings` in the mesh that is set; `None` without one."""
    mesh = current_mesh()
    return None if mesh is None else shardings(tree, mesh)


def place(batch: PyTree, *, own: bool = False) -> PyTree:
    """A batch as arrays of the mesh that is set; each process holds all of its rows, or only its `own`."""
    mesh = current_mesh()
    if mesh is None:
        return jax.tree.map(jnp.asarray, batch)
    sharding = NamedSharding(mesh, ROWS)
    if own:
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda part: x[part]), batch)


def use_mesh(config: MeshConfig) -> AbstractContextManager[Any]:
    """While entered all devices are used as the config says; one device alone needs no mesh.

    Raises `InputError` for sizes that do not come out even with the devices.
    """
    sizes, local = config.sizes(jax.device_count()), jax.local_device_count()
    fits = jax.process_count() == 1 or local % sizes["tensor"] == 0
    require(fits, f"mesh.tensor is {sizes['tensor']}; a process has {local} devices, which must be a multiple of it")
    return jax.set_mesh(make_mesh(config, jax.devices())) if jax.device_count() > 1 else nullcontext()


def alike(tree: PyTree) -> PyTree:
    """Says that every device holds the whole of these small arrays; nothing without a mesh."""
    if math.prod(axis_sizes().values()) == 1:
        return tree
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, ALIKE), tree)


def shard_rows(x: Array, axis: int = 0) -> Array:
    """Says that rows, which lie along `axis`, are cut over the devices; nothing without a mesh."""
    spec = P(*[None] * axis, ROW_AXES)
    return x if row_shards(axis_sizes()) == 1 else jax.lax.with_sharding_constraint(x, spec)


def describe_mesh() -> list[str]:
    """The mesh that is set, as a line; nothing without one."""
    mesh = current_mesh()
    if mesh is None:
        return []
    shape = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return [
        f"mesh: {shape}, {mesh.size} {mesh.devices.flat[0].platform} devices{processes}; no samples are drawn on it"
    ]
