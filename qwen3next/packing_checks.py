"""Do packed documents see each other? Every other one is perturbed, and what moves in those between is the leak.

Each layer is tried by itself, and in it each carrier of the past: attention, the short convolution, the recurrent
state. A carrier must move nothing across a boundary, and something once the boundary is taken away: where no difference
shows, no leak would. The decay is made slow for that: as it is drawn, nearly every head forgets within four tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qwen3next.attention import GatedAttention
from qwen3next.config import Compute
from qwen3next.context import Context, locate
from qwen3next.deltanet import GatedDeltaNet, short_convolution
from qwen3next.layer import Layer
from qwen3next.model import Qwen3Next
from qwen3next.programs import quick_options
from qwen3next.remat_checks import Check
from qwen3next.tree import leaf_path

# Boundaries inside a chunk of 64, at its edge, and beside it; documents of one and of two tokens.
_ROWS = ((37, 51, 40), (2, 61, 1, 1, 63))
_SLOW = float(np.log(0.05))
_TOLERANCE = 1e-4  # of a document's logits, packed and alone, against the largest of them

Carrier = Callable[..., Array]


def _segments() -> Int[np.ndarray, "batch seq"]:
    """Three documents in the first row, five in the second."""
    return np.stack([np.repeat(np.arange(1, len(row) + 1), row) for row in _ROWS]).astype(np.int32)


def _slow(model: Qwen3Next) -> Qwen3Next:
    def visit(path: tuple, leaf: Array) -> Array:
        return jnp.full_like(leaf, _SLOW) if leaf_path(path).endswith("A_log") else leaf

    return jax.tree_util.tree_map_with_path(visit, model)


def _noise(seed: int, *shape: int) -> Float[Array, "..."]:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def _perturbed(x: Array, where: Bool[np.ndarray, "batch seq"]) -> Array:
    return jnp.where(jnp.asarray(where).reshape(*where.shape, *[1] * (x.ndim - 2)), x + 1 + _noise(1, *x.shape), x)


def _moved(function: Carrier, inputs: tuple[Array, ...]) -> float:
    """The largest change of what a function gives in every other document when its inputs change in those between."""
    segments, before, worst = _segments(), np.asarray(function(*inputs)), 0.0
    for where in (segments % 2 == 1, segments % 2 == 0):
        after = np.asarray(function(*[_perturbed(x, where) for x in inputs]))
        worst = max(worst, float(np.abs(before - after)[~where].max()))
    return worst


def _carriers(layer: Layer, context: Context, shape: tuple[int, ...]) -> dict[str, tuple[Carrier, tuple[Array, ...]]]:
    """What carries the past in a layer, each a function of its inputs alone, and such inputs."""
    mixer = layer.mixer
    if isinstance(mixer, GatedAttention):
        return {"attention": (lambda x: mixer(x, context, None)[0], (_noise(2, *shape, mixer.config.hidden_size),))}
    assert isinstance(mixer, GatedDeltaNet)
    c = mixer.config
    channels, b, a = (_noise(2, *shape, size) for size in (c.conv_dim, *[c.linear_num_value_heads] * 2))
    return {
        "convolution": (lambda x: short_convolution(x, mixer.conv1d, None, context.packing)[0], (channels,)),
        "state": (lambda x, b, a: mixer.recurrence(x, b, a, context, None)[0], (channels, b, a)),
    }


@eqx.filter_jit  # one program for a kind of layer
def _carry(layer: Layer, context: Context, name: str, *inputs: Array) -> Array:
    return _carriers(layer, context, inputs[0].shape[:2])[name][0](*inputs)


def _embedded(model: Qwen3Next, ids: Int[np.ndarray, "batch seq"]) -> Float[Array, "batch seq hidden"]:
    return model.embed_tokens(jnp.asarray(ids), jnp.dtype("float32"))


def _judged(name: str, leak: float, joined: float) -> Check:
    return Check(name, "0; above 0 without the boundary", f"{leak:.3g}; {joined:.3g}", leak == 0 and joined > 0)


def packing_checks(model: Qwen3Next, compute: Compute) -> Iterator[Check]:
    """Every check, layer by layer and then of the whole model, in float32."""
    model, segments = _slow(model), _segments()
    compute = Compute(chunk_size=compute.chunk_size, dispatch="dense")
    apart, joined = (
        locate(model.config, compute, segments.shape, jnp.asarray(ids), None, None)[0]
        for ids in (segments, np.ones_like(segments))
    )
    for number, layer in enumerate(model.decoder.layers()):
        for name, (_, inputs) in _carriers(layer, apart, segments.shape).items():
            moved = [_moved(partial(_carry, layer, at, name), inputs) for at in (apart, joined)]
            yield _judged(f"layer {number}, {name}", *moved)

    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=segments.shape, dtype=np.int32)
    h = _embedded(model, ids)

    def states(h: Array, context: Context) -> Array:
        h, _, _ = model.decoder(h, (None,) * model.config.num_hidden_layers, context)
        return model.norm(h)

    def logits(h: Array, context: Context) -> Array:
        return model.logits(states(h, context))

    def slope(h: Array, context: Context) -> Array:
        labels = jnp.asarray(np.where(segments == 3, np.roll(ids, -1, axis=1), -100))
        return jax.grad(lambda h: model.cross_entropy(states(h, context), labels).nats)(h)

    forward, backward = (jax.jit(function, compiler_options=quick_options()) for function in (logits, slope))
    moved = [_moved(lambda h, at=at: forward(h, at), (h,)) for at in (apart, joined)]
    yield _judged("logits of the whole model", *moved)
    reached = [float(np.abs(np.asarray(backward(h, at)))[segments < 3].max()) for at in (apart, joined)]
    yield _judged("gradient of document 3's loss before it", *reached)

    # Each document in a row of its own, the rest of which is padding.
    documents = [(row, number) for row, lengths in enumerate(_ROWS) for number in range(1, len(lengths) + 1)]
    places = [segments[row] == number for row, number in documents]
    own, real = np.zeros((len(documents), segments.shape[1]), np.int32), np.zeros((len(documents), segments.shape[1]))
    for at, ((row, _), place) in enumerate(zip(documents, places, strict=True)):
        own[at, : place.sum()], real[at, : place.sum()] = ids[row, place], 1
    alone, _ = locate(model.config, compute, own.shape, jnp.asarray(real, jnp.int32), None, None)
    packed, separate = (np.asarray(forward(_embedded(model, x), at)) for x, at in ((ids, apart), (own, alone)))
    worst = max(
        float(np.abs(packed[row, place] - separate[at, : place.sum()]).max())
        for at, ((row, _), place) in enumerate(zip(documents, places, strict=True))
    )
    bound = _TOLERANCE * float(np.abs(packed).max())
    yield Check("logits packed and alone differ by", f"at most {bound:.2g}", f"{worst:.2g}", worst <= bound)
