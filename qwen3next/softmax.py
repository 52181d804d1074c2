"""Causal softmax attention within documents: the ways to compute it. None holds a row's every query against every key.

`plain` is one softmax of products, a block of queries at a time, with its rows of the mask. `splash` is the TPU kernel
that JAX ships (`jax.experimental.pallas.ops.tpu.splash_attention`); for any other platform it is interpreted, slowly.
`cudnn` is cuDNN's flash attention, by way of `jax.nn.dot_product_attention`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Bool, Float

from qwen3next.config import AttentionKind
from qwen3next.context import Context
from qwen3next.errors import require
from qwen3next.remat import recomputed

_QUERIES = 128  # of a block of `plain`: what it computes stays in a core's cache
_CUDNN_QUERIES = 1024  # of a block of `cudnn` where there is a mask
_SEGMENTS = 8  # of a row: each is compiled, and sees the keys up to its end
_TILE = 512  # of splash: with 1024, heads of 256 do not fit into the memory of a v5e's or v5p's core
_LANES = 128  # tiles of splash are multiples of it
_TILES = 512  # of a row: splash holds a table of all pairs in a core's scalar memory, 1 MiB
_LARGEST_HEAD = 256
_AMPERE, _HOPPER = 8.0, 9.0


def _blocks(seq: int, largest: int, multiple: int) -> tuple[int, int]:
    """The fewest blocks of at most `largest` that hold `seq`, and their size: the smallest multiple that does."""
    count = -(-seq // largest)
    return count, -(-seq // (count * multiple)) * multiple


def _pad(x: Array, seq: int) -> Array:
    """Zeros behind axis 1, up to `seq`."""
    return jnp.pad(x, [(0, 0), (0, seq - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


Block = Callable[..., Array]  # (q, k, v, mask [#batch, queries, keys]) -> outputs


def _in_blocks(q: Array, k: Array, v: Array, context: Context, one: Block, largest: int) -> Array:
    """`one` of at most `largest` queries at a time, with the keys that some of them see.

    The keys end where a segment of the queries ends, unless they are a cache's. A short row's segments are its blocks;
    a long one's, which are few, go through theirs one after another, and the backward pass computes a block again.
    """
    batch, seq, *heads = q.shape
    count, size = _blocks(seq, largest, 1 if seq <= largest else 8)
    per_segment = -(-count // _SEGMENTS)
    q = jnp.moveaxis(_pad(q, count * size).reshape(batch, count, size, *heads), 1, 0)
    queries = jnp.minimum(jnp.arange(count * size), seq - 1).reshape(count, size)
    wide_k, wide_v = (x.astype(jnp.float32) for x in (k, v))  # their gradients are sums over blocks, in this dtype

    def block(end: int, xs: tuple[Array, Array]) -> Array:
        queries, q = xs
        keys = (x[:, :end].astype(k.dtype) for x in (wide_k, wide_v))
        return one(q, *keys, context.attention_mask(queries)[..., :end])

    outs = []
    for first in range(0, count, per_segment):
        last = min(first + per_segment, count)
        end = min(last * size, seq) if context.keys_are_own else k.shape[1]
        if per_segment == 1:
            outs.append(block(end, (queries[first], q[first]))[None])
        else:
            apart = recomputed(partial(block, end), prevent_cse=False)
            outs.append(jax.lax.map(apart, (queries[first:last], q[first:last])))
    out = jnp.moveaxis(jnp.concatenate(outs), 0, 1)
    return out.reshape(batch, count * size, *heads)[:, :seq]


def _plain(q: Array, k: Array, v: Array, context: Context, scale: float) -> Array:
    def one(q: Array, k: Array, v: Array, mask: Array) -> Array:
        (batch, queries, _, head), (_, keys, kv_heads, _) = q.shape, k.shape
        grouped = jnp.moveaxis(q.reshape(batch, queries, kv_heads, -1, head), 1, 3)  # by key head: one product each
        rows = grouped.reshape(batch, kv_heads, -1, head)
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        scores = scale * product("bhqd,bkhd->bhqk", rows, k).reshape(batch, kv_heads, -1, queries, keys)
        scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
        shares = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
        total = jnp.sum(shares, axis=-1, keepdims=True)
        if v.dtype != jnp.float32:  # what is rounded must be the softmax, or rows of its derivative do not sum to 0
            shares, total = shares / total, 1.0
        sums = product("bhqk,bkhd->bhqd", shares.reshape(batch, kv_heads, -1, keys).astype(v.dtype), v)
        out = sums.reshape(*shares.shape[:-1], head) / total
        return jnp.moveaxis(out, 3, 1).reshape(q.shape).astype(q.dtype)

    return _in_blocks(q, k, v, context, one, _QUERIES)


def _cudnn(q: Array, k: Array, v: Array, context: Context, scale: float) -> Array:
    attend = partial(jax.nn.dot_product_attention, scale=scale, implementation="cudnn")
    if context.packing is not None:  # a mask is an array there, too
        return _in_blocks(q, k, v, context, lambda q, k, v, mask: attend(q, k, v, mask=mask[:, None]), _CUDNN_QUERIES)
    return attend(q, k, v, is_causal=True)


def _sees(query: Array, key: Array) -> Bool[Array, "..."]:
    return query >= key


def _kernel(count: int, size: int, interpret: bool) -> Callable[..., Any]:
    """The causal kernel for `count` tiles of `size` tokens: q [heads, seq, head], k and v [kv_heads, seq, head].

    The library's own constructor finds out which tiles are masked by looking at each of their elements, which takes
    minutes for a long row; for a causal mask it is known. The fused backward kernel is not used: it holds a gradient of
    the queries for each tile of keys.
    """
    i, j = jnp.indices((count, count), jnp.int32)
    masked = jnp.where(j > i, 0, jnp.where(j == i, 1, 2))  # all of it, some, nothing
    positions: Any = jnp.arange(count * size, dtype=jnp.int32)

    def info(fetched: Array) -> MaskInfo:
        return MaskInfo(fetched[None].astype(jnp.int16), None, masked[None].astype(jnp.int8), None, positions)

    by_query, by_key = info(jnp.where(j > i, 0, j)), info(jnp.maximum(i, j))
    sizes = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    return splash.SplashAttentionKernel(
        by_query,
        by_query,
        by_key,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name="attention_out",  # of the outputs, and of what their softmax was divided by
        mask_function=_sees,
        interpret=interpret,
    )


def _splash(q: Array, k: Array, v: Array, context: Context, scale: float) -> Array:
    seq = q.shape[1]
    count, size = _blocks(seq, _TILE, _LANES)
    q, k, v = (jnp.moveaxis(_pad(x, count * size), 1, 2) for x in (q * scale, k, v))  # no token sees those behind it
    segments = None
    if context.packing is not None:
        documents = _pad(context.packing.documents, count * size)
        segments = splash.SegmentIds(documents, documents)

    out = jax.vmap(_kernel(count, size, interpret=context.compute.target != "tpu"))(q, k, v, segments)
    return jnp.moveaxis(out, 2, 1)[:, :seq]


def _obstacle(kind: AttentionKind, platform: str, capability: float, dtype: jnp.dtype, head: int, seq: int) -> str:
    """What keeps a kind from taking a call, and what is allowed; empty if nothing does."""
    if kind == "splash":
        if head > _LARGEST_HEAD:
            return f"head_dim is {head}; allowed: at most {_LARGEST_HEAD}"
        longest = _TILE * _TILES
        return f"a row has {seq} tokens; allowed: at most {longest}" if seq > longest else ""
    if kind == "cudnn":
        if platform != "gpu" or capability < _AMPERE:
            return f"the backend is {platform}; allowed: NVIDIA GPUs of compute capability {_AMPERE} and above"
        if dtype not in (jnp.bfloat16, jnp.float16):
            return f"compute.dtype is {dtype.name}; allowed: bfloat16"
        largest = _LARGEST_HEAD if capability >= _HOPPER else 128
        if head > largest or head % 8:
            return f"head_dim is {head}; allowed on this GPU: multiples of 8, at most {largest}"
        return f"a row has {seq} tokens; allowed: an even number" if seq % 2 else ""
    return ""


def choose(
    kind: AttentionKind,
    platform: str,
    dtype: jnp.dtype,
    head_dim: int,
    seq: int,
    cached: bool,
    capability: float = _HOPPER,
) -> AttentionKind:
    """What `kind` comes to for rows of `seq` tokens: never `auto`. `capability`: that of an NVIDIA GPU, or 0.

    `plain` wherever there is a cache. Raises `InputError` for a kind that is named and cannot take the call.
    """
    if cached:
        return "plain"
    best: dict[str, AttentionKind] = {"tpu": "splash", "gpu": "cudnn"}
    wanted = best.get(platform, "plain") if kind == "auto" else kind
    obstacle = _obstacle(wanted, platform, capability, dtype, head_dim, seq)
    if obstacle and kind == "auto":
        return "plain"
    require(not obstacle, f"compute.attention is {kind!r}, and {obstacle}; or choose auto or plain")
    return wanted


def _capability() -> float:
    """The compute capability of the first GPU; 0 where there is none, or none of NVIDIA's."""
    try:
        return float(jax.devices()[0].compute_capability)
    except (AttributeError, ValueError):
        return 0.0


def attend(
    q: Float[Array, "batch seq heads head"],
    k: Float[Array, "batch slot kv_heads head"],
    v: Float[Array, "batch slot kv_heads head"],
    context: Context,
    scale: float | None = None,
) -> Float[Array, "batch seq heads head"]:
    """`softmax(scale * q k^T) v` over what `context` lets each query see; in the dtype of `q`, as are `k` and `v`.

    Key head j serves query heads jR to jR+R-1. `scale` is 1 / sqrt(head) unless given. Outputs of padding are finite
    and mean nothing.
    """
    seq, head = q.shape[1], q.shape[3]
    kind = choose(
        context.compute.attention,
        context.compute.target,
        q.dtype,
        head,
        seq,
        context.slots is not None,
        _capability(),
    )
    apply = {"plain": _plain, "splash": _splash, "cudnn": _cudnn}[kind]
    with jax.numpy_dtype_promotion("standard"):  # jax's own code counts on it
        out = apply(q, k, v, context, head**-0.5 if scale is None else scale)
    return out if kind == "splash" else checkpoint_name(out, "attention_out")  # splash names its own
