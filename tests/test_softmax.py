"""The kinds of softmax attention against each other and against one product of all scores; which is chosen where."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from common import as_users_run, tiny_config
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info

from qwen3next import softmax
from qwen3next.attention import GatedAttention
from qwen3next.cache import empty_cache
from qwen3next.config import Compute, ModelConfig
from qwen3next.context import locate
from qwen3next.errors import InputError
from qwen3next.jaxprs import equations
from qwen3next.programs import quick_options
from qwen3next.residuals import kept
from qwen3next.softmax import attend, choose

HEADS, KV_HEADS = 4, 2
BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


def _random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _context(kind, shape, ids=None, cache=None):
    return locate(tiny_config(), Compute(attention=kind), shape, ids, None, cache)[0]


def _qkv(seq, head=8, batch=2, slots=None, dtype="float32"):
    shapes = [(batch, seq, HEADS, head), *[(batch, slots or seq, KV_HEADS, head)] * 2]
    return [jnp.asarray(_random(*shape, seed=seed), dtype) for seed, shape in enumerate(shapes)]


def _ids(seq):
    """Padding left and between, and right; documents that cross blocks and one of a single token."""
    cut = seq // 5
    left = [0] * cut + [1] * (2 * cut) + [0] + [2] * (seq - 3 * cut - 1)
    right = [1] + [2] * (seq - cut - 1) + [0] * cut
    return jnp.asarray([left, right], jnp.int32)


def _values_and_gradients(kind, ids, q, k, v):
    """Outputs of real tokens, and the slopes of a weighted sum of them."""
    real = jnp.ones(q.shape[:2], bool) if ids is None else ids > 0
    weights = jnp.where(real[..., None, None], jnp.asarray(_random(*q.shape, seed=9)), 0)

    def loss(q, k, v):
        out = attend(q, k, v, _context(kind, q.shape[:2], ids))
        return jnp.sum(weights * out.astype(jnp.float32)), jnp.where(real[..., None, None], out, 0)

    (_, out), slopes = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return out, *slopes


def _computed(kind, ids, *qkv):
    """Anew: what is patched between two calls must not be found compiled."""
    with jax.numpy_dtype_promotion("standard"):  # the gradient of jax.nn.dot_product_attention in bfloat16 counts on it
        return jax.jit(partial(_values_and_gradients, kind), compiler_options=quick_options())(ids, *qkv)


def _assert_close(actual, expected, tolerance):
    for name, a, b in zip(("out", "q", "k", "v"), actual, expected, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), (name, np.abs(a - b).max(), np.abs(b).max())


def _primitives(function, *args):
    with jax.numpy_dtype_promotion("standard"):
        return {equation.primitive.name for equation, _ in equations(jax.make_jaxpr(function)(*args).jaxpr)}


# --- Plain


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-8)])
@pytest.mark.parametrize("seq", [37, 300])  # one block, and three of which each has its own keys
def test_plain_is_the_library_s_product(packed, dtype, tolerance, seq):
    q, k, v = _qkv(seq, dtype=dtype)
    ids = _ids(seq) if packed else jnp.ones((2, seq), jnp.int32)
    mask = jnp.tril(jnp.ones((seq, seq), bool)) & (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, :, None]

    @jax.jit
    def whole(q, k, v, mask):
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=8**-0.5)

    out = jax.jit(lambda *qkv: attend(*qkv, _context("plain", (2, seq), ids if packed else None)))(q, k, v)
    real = np.asarray(ids) > 0
    out, expected = (np.asarray(y, np.float32)[real] for y in (out, whole(q, k, v, mask)))
    assert np.abs(out - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("seq", [48, 37])  # three whole blocks, or of which the last is not full
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_of_queries_change_nothing(monkeypatch, seq, packed):
    qkv, ids = _qkv(seq), _ids(seq) if packed else None
    expected = _computed("plain", ids, *qkv)
    monkeypatch.setattr(softmax, "_QUERIES", 16)
    _assert_close(_computed("plain", ids, *qkv), expected, 2e-6)


def test_gradients_of_many_blocks_do_not_round_away(monkeypatch):
    """One product is off by up to 2^-8 of the largest value, a sum of 128 kept in bfloat16 by four times it."""
    seq = 1024
    qkv = _qkv(seq, dtype="bfloat16")
    expected = _computed("plain", None, *[x.astype(jnp.float32) for x in qkv])
    monkeypatch.setattr(softmax, "_QUERIES", 8)
    _assert_close(_computed("plain", None, *qkv), expected, 1.25 * 2**-8)


def test_a_cache_is_read_by_blocks_of_plain(monkeypatch):
    """A prefill behind 5 slots, with room behind it; whatever is named."""
    seq, cache = 37, empty_cache(tiny_config(), 2, 50)
    cache = dataclasses.replace(cache, documents=cache.documents.at[:, 2:5].set(1), used=jnp.int32(5))
    cache = dataclasses.replace(cache, segment=cache.segment + 1, document=cache.document + 1, count=cache.count + 3)
    qkv = _qkv(seq, slots=50)
    for ids in (None, _ids(seq)):
        expected = attend(*qkv, _context("plain", (2, seq), ids, cache))
        context = _context("splash", (2, seq), ids, cache)
        np.testing.assert_array_equal(attend(*qkv, context), expected)
        assert not {"pallas_call", "scan"} & _primitives(lambda *qkv, at=context: attend(*qkv, at), *qkv)
        with monkeypatch.context() as patched:
            patched.setattr(softmax, "_QUERIES", 16)
            real = slice(None) if ids is None else np.asarray(ids) > 0
            np.testing.assert_allclose(attend(*qkv, context)[real], expected[real], atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["plain", "splash"])
def test_no_array_holds_every_pair(kind, packed):
    """Forward and backward for 262,144 tokens; the largest arrays are a block's scores."""
    seq, c = 262_144, ModelConfig()
    shapes = [(1, seq, c.num_attention_heads, c.head_dim), *[(1, seq, c.num_key_value_heads, c.head_dim)] * 2]
    qkv = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    ids = jax.ShapeDtypeStruct((1, seq), jnp.int32)

    def slopes(q, k, v, ids):
        def loss(q, k, v):
            return jnp.sum(attend(q, k, v, _context(kind, (1, seq), ids if packed else None)).astype(jnp.float32))

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    with jax.numpy_dtype_promotion("standard"):
        traced = jax.make_jaxpr(slopes)(*qkv, ids).jaxpr
    arrays = [variable.aval for equation, _ in equations(traced) for variable in equation.outvars]
    shapes = {array.shape for array in arrays if hasattr(array, "shape")}
    largest = max(shapes, key=np.prod)
    assert np.prod(largest) <= c.num_attention_heads * max(softmax._QUERIES, c.head_dim) * seq, largest
    assert all(sum(size >= seq for size in shape) <= 1 for shape in shapes)


# --- Splash, interpreted


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("seq", "dtype", "tolerance"), [(256, "float32", 2e-6), (200, "bfloat16", 2**-7)])
def test_splash_is_plain(monkeypatch, packed, seq, dtype, tolerance):
    """bfloat16 has 8 bits: either result is off by up to 2^-8 of the largest value."""
    monkeypatch.setattr(softmax, "_TILE", 128)  # two tiles, the second one of 72 tokens and what fills it up
    qkv, ids = _qkv(seq, 128, dtype=dtype), _ids(seq) if packed else None
    assert "pallas_call" in _primitives(partial(_values_and_gradients, "splash"), ids, *qkv)
    _assert_close(_computed("splash", ids, *qkv), _computed("plain", ids, *qkv), tolerance)


def test_padding_reaches_no_token_of_splash():
    """The same bits whatever padding holds; what it gives is finite, and the slopes there are exactly 0."""
    seq = 130
    ids, qkv = _ids(seq), _qkv(seq, 128)
    padding = (ids == 0)[..., None, None]
    first = _computed("splash", ids, *qkv)
    second = _computed("splash", ids, *[jnp.where(padding, 3 - 2 * x, x) for x in qkv])
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.any(np.where(padding, a, 0)) and np.all(np.isfinite(a)) and np.any(a)
    out = attend(*qkv, _context("splash", (2, seq), ids))
    assert np.all(np.isfinite(out))


def test_splash_keeps_what_the_backward_pass_needs_under_its_name():
    """The outputs and what their softmax was divided by: with both no kernel runs again."""
    seq, heads = 130, (HEADS, KV_HEADS, KV_HEADS)
    qkv = [jax.ShapeDtypeStruct((2, seq, number, 128), jnp.float32) for number in heads]
    policy = jax.checkpoint_policies.save_only_these_names("attention_out")
    unit = jax.checkpoint(lambda q, k, v: attend(2 * q, k, v, _context("splash", (2, seq))), policy=policy)
    found = [(saved.name, saved.shape) for saved in kept(unit, *qkv)]
    assert found == [("attention_out", (2, HEADS, 256, 128)), ("attention_out", (2, HEADS, 256))]


def test_masked_tiles_are_those_that_the_library_finds():
    count, size = 5, 128
    kernel = softmax._kernel(count, size, True)
    mask = masks.MultiHeadMask([masks.CausalMask((count * size, count * size))])
    for mine, process in (
        (kernel.fwd_mask_info, mask_info.process_mask),
        (kernel.dq_mask_info, mask_info.process_mask),
        (kernel.dkv_mask_info, mask_info.process_mask_dkv),
    ):
        theirs, _ = process(mask, (size, size))
        assert theirs.mask_next is mine.mask_next is theirs.partial_mask_blocks is mine.partial_mask_blocks is None
        np.testing.assert_array_equal(mine.block_mask, theirs.block_mask)
        np.testing.assert_array_equal(mine.q_sequence, theirs.q_sequence)
        computed = theirs.block_mask > 0  # what is fetched before a tile that is skipped is never read
        np.testing.assert_array_equal(mine.data_next[computed], theirs.data_next[computed])


def test_splash_is_compiled_for_a_tpu_from_here():
    """And interpreted for this CPU; inside a loop, a unit of rematerialisation and `shard_map`, with a gradient."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
    everywhere = jax.sharding.PartitionSpec("data")

    def local(platform, q, k, v, ids):
        compute = Compute(attention="splash", platform=platform)
        context = locate(tiny_config(), compute, q.shape[:2], ids, None, None)[0]

        def layer(q, _):
            return jax.checkpoint(lambda q: attend(q, k, v, context), prevent_cse=False)(q), None

        return jax.lax.scan(layer, q, None, length=2)[0]

    def loss(platform, *args):
        sharded = jax.shard_map(
            partial(local, platform), mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
        )
        return jnp.sum(sharded(*args))

    def kernels(platform):
        slopes = jax.grad(partial(loss, platform), argnums=(0, 1, 2))
        traced = jax.jit(slopes).trace(*_qkv(130, 128), _ids(130))
        return traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.custom_call @tpu_custom_call")

    assert kernels("cpu") == 0 and kernels("tpu") == 4  # forward, forward again, slopes of queries, of keys and values


# --- cuDNN, which nothing here can run


@pytest.mark.parametrize(
    ("seq", "packed", "loops"), [(64, False, 0), (64, True, 0), (16384, True, 1), (2048, False, 0)]
)
def test_cudnn_is_called(monkeypatch, seq, packed, loops):
    stated = jax._src.cudnn.fused_attention_stablehlo
    monkeypatch.setattr(stated, "check_cudnn_version", lambda: 91_000)
    monkeypatch.setattr(stated, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(stated, "is_cuda_compute_capability_equal", lambda capability: False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(softmax, "_capability", lambda: 9.0)
    qkv = [jax.ShapeDtypeStruct((2, seq, heads, 64), jnp.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    ids = jax.ShapeDtypeStruct((2, seq), jnp.int32) if packed else None
    for kind in ("auto", "cudnn"):
        with jax.numpy_dtype_promotion("standard"):
            traced = jax.make_jaxpr(partial(_values_and_gradients, kind))(ids, *qkv)
        found = {equation.primitive.name: equation.params for equation, _ in equations(traced.jaxpr)}
        assert ("scan" in found) == bool(loops) and "dot_general" not in found
        for name in ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"):
            assert found[name]["mask_type"].name == ("NO_MASK" if packed else "CAUSAL")


# --- Which


@pytest.mark.parametrize(
    ("call", "chosen"),
    [
        (("auto", "tpu", BFLOAT16, 256, 4096, False), "splash"),
        (("auto", "tpu", FLOAT32, 12, 7, False), "splash"),
        (("auto", "tpu", BFLOAT16, 256, 262_144, False), "splash"),
        (("auto", "tpu", BFLOAT16, 256, 262_145, False), "plain"),
        (("auto", "tpu", BFLOAT16, 264, 4096, False), "plain"),
        (("auto", "tpu", BFLOAT16, 256, 4096, True), "plain"),
        (("auto", "gpu", BFLOAT16, 256, 4096, False), "cudnn"),
        (("auto", "gpu", FLOAT32, 256, 4096, False), "plain"),
        (("auto", "gpu", BFLOAT16, 264, 4096, False), "plain"),
        (("auto", "gpu", BFLOAT16, 12, 4096, False), "plain"),
        (("auto", "gpu", BFLOAT16, 256, 4095, False), "plain"),
        (("auto", "gpu", BFLOAT16, 256, 4096, True), "plain"),
        (("auto", "gpu", BFLOAT16, 256, 4096, False, 8.0), "plain"),
        (("auto", "gpu", BFLOAT16, 128, 4096, False, 8.0), "cudnn"),
        (("auto", "gpu", BFLOAT16, 128, 4096, False, 0.0), "plain"),
        (("auto", "cpu", BFLOAT16, 256, 4096, False), "plain"),
        (("plain", "tpu", BFLOAT16, 256, 4096, False), "plain"),
        (("splash", "cpu", FLOAT32, 256, 4096, False), "splash"),
        (("splash", "cpu", FLOAT32, 512, 4096, True), "plain"),
        (("cudnn", "gpu", BFLOAT16, 256, 4096, False), "cudnn"),
        (("cudnn", "cpu", FLOAT32, 256, 4096, True), "plain"),
    ],
)
def test_what_is_chosen(call, chosen):
    assert choose(*call) == chosen


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("splash", "tpu", BFLOAT16, 264, 4096, False), ("head_dim is 264", "at most 256")),
        (("splash", "tpu", BFLOAT16, 256, 262_145, False), ("262145 tokens", "at most 262144")),
        (("cudnn", "cpu", BFLOAT16, 256, 4096, False), ("backend is cpu", "NVIDIA")),
        (("cudnn", "gpu", BFLOAT16, 64, 4096, False, 7.5), ("backend is gpu", "capability 8.0")),
        (("cudnn", "gpu", FLOAT32, 256, 4096, False), ("compute.dtype is float32", "bfloat16")),
        (("cudnn", "gpu", BFLOAT16, 256, 4096, False, 8.0), ("head_dim is 256", "at most 128")),
        (("cudnn", "gpu", BFLOAT16, 12, 4096, False), ("head_dim is 12", "multiples of 8")),
        (("cudnn", "gpu", BFLOAT16, 256, 4095, False), ("4095 tokens", "even")),
    ],
)
def test_a_kind_that_is_named_and_cannot_is_refused(call, words):
    with pytest.raises(InputError) as raised:
        choose(*call)
    for word in (f"compute.attention is {call[0]!r}", *words):
        assert word in str(raised.value)


def test_the_layer_asks_for_what_it_is_told():
    config = tiny_config(num_hidden_layers=1, layer_types=("full_attention",))
    layer, x = GatedAttention(config, key=jax.random.key(0)), jnp.asarray(_random(2, 9, config.hidden_size))

    def apply(kind):
        return lambda x: layer(x, _context(kind, (2, 9)), None)[0]

    assert "pallas_call" in _primitives(apply("splash"), x)
    assert "pallas_call" not in _primitives(apply("auto"), x)
    outs = [oracles.quick_jit(apply(kind))(x) for kind in ("splash", "plain")]
    np.testing.assert_allclose(*outs, atol=1e-5)
    with as_users_run(), pytest.raises(InputError, match=r"compute.attention is 'cudnn', and the backend is cpu"):
        apply("cudnn")(x)
