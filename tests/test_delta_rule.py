"""The gated delta rule, chunked and a step at a time, against the recurrence in float64: values and gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from qwen3next.delta_rule import gated_delta_rule, unit_triangular_inverse
from qwen3next.norms import l2_norm

BATCH, KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 2, 4, 8, 5
NAMES = ("q", "k", "v", "g", "beta", "state")


def _inputs(seq, seed=0):
    """Random inputs whose state lasts: at the default decay a lost state would not show."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal
    q, k = (l2_norm(jnp.asarray(normal((BATCH, seq, KEY_HEADS, KEY)), jnp.float32)) for _ in range(2))
    rate = np.exp(np.log(0.05) + 0.3 * normal(VALUE_HEADS)) * np.logaddexp(0, 1 + normal((BATCH, seq, VALUE_HEADS)))
    beta = 1 / (1 + np.exp(-normal((BATCH, seq, VALUE_HEADS))))
    rest = (normal((BATCH, seq, VALUE_HEADS, VALUE)), -rate, beta, normal((BATCH, VALUE_HEADS, KEY, VALUE)))
    v, g, beta, state = (jnp.asarray(x, jnp.float32) for x in rest)
    return [q, k, v, g, beta, state]


@functools.cache
def _chunked(chunk_size):
    return functools.partial(gated_delta_rule, chunk_size=chunk_size)


def _one_step_at_a_time(q, k, v, g, beta, state, resets=None):
    """The one-step form over the sequence."""
    xs = [q, k, v, g, beta] if resets is None else [q, k, v, g, beta, resets]

    def token(state, now):
        floats, reset = now[:5], None if resets is None else now[5]
        out, state = gated_delta_rule(*[*floats, state, reset])
        return state, out[:, 0]

    state, out = jax.lax.scan(token, state, [jnp.moveaxis(x, 1, 0)[:, :, None] for x in xs])
    return jnp.moveaxis(out, 0, 1), state


FORMS = {"chunk_16": _chunked(16), "chunk_64": _chunked(64), "step": _one_step_at_a_time}


@functools.cache
def _values_and_gradients(form):
    """Outputs, final state and six gradients, the cotangents being random in outputs and final state alike."""

    def apply(*args):
        floats, resets = args[:6], args[6:]
        results, pull = jax.vjp(lambda *floats: form(*floats, *resets), *floats)
        random = np.random.default_rng(7)
        gradients = pull(tuple(jnp.asarray(random.standard_normal(x.shape), x.dtype) for x in results))
        return dict(zip(("out", "final", *NAMES), (*results, *gradients), strict=True))

    return apply


def _assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert np.all(np.isfinite(actual[name])), name
        # All are of order 1, so rounding leaves 1e-7 also where the answer is 0, as d/dg where e^g is.
        error = np.max(np.abs(np.asarray(actual[name], np.float64) - wanted))
        assert error <= 1e-5 * max(np.max(np.abs(wanted)), 0.1), f"{name}: {error}"


def _check(args, forms, reference=oracles.delta_rule, quick=True):
    expected = oracles.in_float64(_values_and_gradients(reference), *args)
    for form in forms:
        _assert_close((oracles.quick_jit if quick else jax.jit)(_values_and_gradients(form))(*args), expected)


# --- The same numbers as the recurrence


@pytest.mark.parametrize("seq", [1, 2, 15, 16, 17, 37, 63, 64, 65, 100, 130])
def test_any_length(seq):
    # Of a short row a chunk of 64 makes the same program as one of 16.
    _check(_inputs(seq), FORMS.values() if seq == 100 else [_chunked(16), _chunked(64)][seq <= 16 :])


@pytest.mark.parametrize("keys", ["random", "identical", "zero", "some_zero"])
def test_no_decay_and_full_writes(keys):
    """g = 0 and beta = 1: nothing is forgotten, and a chunk's triangular system is at its worst."""
    q, k, v, g, _, state = _inputs(100)
    if keys == "identical":
        k = jnp.broadcast_to(k[:, :1], k.shape)
    elif keys != "random":
        k = jnp.where((jnp.arange(100) % 3 == 0)[:, None, None] | (keys == "zero"), 0, k)
    _check([q, k, v, jnp.zeros_like(g), jnp.ones_like(g), state], FORMS.values())


def _with_decay(args, g):
    """The inputs with this `g`, a value or one for each token."""
    q, k, v, old, beta, state = args
    return [q, k, v, jnp.broadcast_to(jnp.asarray(g, jnp.float32)[..., None], old.shape), beta, state]


DECAYS = {
    "strong": np.full(130, -90.0),
    "tiny": np.full(130, -1e-12),
    "mix": np.random.default_rng(3).choice([-90.0, -0.05, -1e-12, -3.0, -0.7, 0.0], (BATCH, 130)),
    "moderate_after_strong": np.where(np.arange(130) % 64 < 50, -90.0, -0.05),
    "moderate_after_stronger": np.where(np.arange(130) % 64 < 50, -1000.0, -0.05),
}


@pytest.mark.parametrize("kind", DECAYS)
def test_any_decay(kind):
    """exp of a positive sum overflows, and one sum over a chunk loses the -0.05 behind many -90."""
    _check(_with_decay(_inputs(130), DECAYS[kind]), [_chunked(16), _chunked(64)], quick=False)


def test_sums_are_exact_in_larger_chunks():
    g = np.where(np.arange(128) < 90, -1000.0, -0.05)
    _check(_with_decay(_inputs(128), g), [_chunked(128)])


def test_zero_keys_have_finite_gradients_through_the_normalisation():
    q, k, v, g, beta, state = _inputs(17)
    raw = k.at[:, 5:11].set(0)

    def loss(raw):
        out, final = gated_delta_rule(q, l2_norm(raw), v, g, beta, state, chunk_size=16)
        return jnp.sum(out) + jnp.sum(final)

    gradient = oracles.quick_jit(jax.grad(loss))(raw)
    assert np.all(np.isfinite(gradient)) and np.any(gradient[:, 5:11])


def test_gradients_are_the_numeric_ones():
    """In float64, where differences leave eight digits; six tokens in chunks of four."""
    with jax.enable_x64(True):
        args = [jnp.asarray(x, jnp.float64) for x in _inputs(6)]
        random = np.random.default_rng(0)
        weights = [jnp.asarray(random.standard_normal(args[i].shape)) for i in (2, 5)]

        def loss(*args):
            out, final = gated_delta_rule(*args, chunk_size=4)
            return jnp.sum(out * weights[0]) + jnp.sum(final * weights[1])

        value, gradients = oracles.quick_jit(loss), oracles.quick_jit(jax.grad(loss, tuple(range(6))))(*args)
        for i, name in enumerate(NAMES):
            direction = random.standard_normal(args[i].shape)
            above, below = (value(*args[:i], args[i] + step * direction, *args[i + 1 :]) for step in (1e-6, -1e-6))
            np.testing.assert_allclose(jnp.sum(gradients[i] * direction), (above - below) / 2e-6, 1e-7, err_msg=name)


# --- Documents and padding

# At an edge of a chunk of 16, one before and one after; documents of one and two tokens; from the state and afresh.
STARTS = ([15, 16, 18, 33, 48], [0, 31, 47, 49])


def _resets(seq):
    resets = np.zeros((BATCH, seq), bool)
    for row, starts in enumerate(STARTS):
        resets[row, starts] = True
    return jnp.asarray(resets)


def _separately(*args):
    """Each document on its own, by the recurrence: from a state of zeros, but for what stands before the first."""
    outs, finals = [], []
    for row, starts in enumerate(STARTS):
        *inputs, state = (x[row : row + 1] for x in args)
        edges = sorted({0, *starts, args[0].shape[1]})
        pieces = []
        for start, stop in itertools.pairwise(edges):
            state = jnp.zeros_like(state) if start in starts else state
            out, state = oracles.delta_rule(*[x[:, start:stop] for x in inputs] + [state])
            pieces.append(out)
        outs.append(jnp.concatenate(pieces, axis=1))
        finals.append(state)
    return jnp.concatenate(outs), jnp.concatenate(finals)


def _with_resets(form):
    return lambda *args: form(*args, _resets(args[0].shape[1]))


def test_documents_are_separate():
    _check(_inputs(64), [_with_resets(form) for form in FORMS.values()], _separately)


@pytest.mark.parametrize("form", FORMS)
def test_no_gradient_crosses_a_reset(form):
    def loss(*args):
        out, final = _with_resets(FORMS[form])(*args)
        return jnp.sum(out[0, 33:]) + jnp.sum(final[0])  # of the row's last two documents

    *gradients, state = oracles.quick_jit(jax.grad(loss, tuple(range(6))))(*_inputs(64))
    assert not np.any(state)
    for name, gradient in zip(NAMES, gradients, strict=False):
        assert not np.any(gradient[0, :33]) and np.any(gradient[0, 33:]), name


@pytest.mark.parametrize("before", [0, 17, 40])
@pytest.mark.parametrize("filling", [0, 1e3])
def test_padding_is_inert(before, filling):
    """With g = beta = 0, whatever the padding holds."""
    args = _inputs(37)
    out, final = oracles.quick_jit(_chunked(16))(*args)
    widths = [(0, 0), (before, 40 - before), (0, 0), (0, 0)]
    q, k, v = (jnp.pad(x, widths, constant_values=filling) for x in args[:3])
    g, beta = (jnp.pad(x, widths[:3]) for x in args[3:5])
    padded, state = oracles.quick_jit(_chunked(16))(q, k, v, g, beta, args[5])
    np.testing.assert_allclose(padded[:, before : before + 37], out, atol=2e-6)
    np.testing.assert_allclose(state, final, atol=2e-6)


# --- The triangular inverse


def _lower(kind, size):
    """[3, size, size], below the diagonal as in a chunk: beta_i k_i.k_j, or all keys equal and beta 1."""
    if kind == "repeated":
        return np.tril(np.ones((3, size, size)), -1)
    random = np.random.default_rng(size)
    keys = random.standard_normal((3, size, KEY))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    return np.tril(random.uniform(0, 1, (3, size, 1)) * (keys @ np.swapaxes(keys, 1, 2)), -1)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 64, 128])
@pytest.mark.parametrize("kind", ["random", "repeated"])
def test_triangular_inverse(kind, size):
    lower = _lower(kind, size)
    expected = np.linalg.inv(np.eye(size) + lower)
    actual = jax.jit(unit_triangular_inverse)(jnp.asarray(lower, jnp.float32))
    np.testing.assert_allclose(actual, expected, atol=2e-6 * np.max(np.abs(expected)))


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("kind", ["random", "repeated"])
def test_triangular_inverse_derivative_is_that_of_a_solve(kind, size):
    lower = _lower(kind, size)
    cotangent = np.random.default_rng(0).standard_normal(lower.shape)

    def solve(lower, cotangent):
        matrix, identity = jnp.eye(size) + jnp.tril(lower, -1), jnp.eye(size)
        solution = jax.vmap(lambda m: jax.scipy.linalg.solve_triangular(m, identity, lower=True))(matrix)
        return jnp.sum(solution * cotangent)

    def inverse(lower, cotangent):
        return jnp.sum(unit_triangular_inverse(lower) * cotangent)

    expected = oracles.in_float64(jax.grad(solve), lower, cotangent)
    actual = jax.jit(jax.grad(inverse))(*(jnp.asarray(x, jnp.float32) for x in (lower, cotangent)))
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.max(np.abs(expected)))


# --- Memory


def _largest(jaxpr):
    """Elements of the largest array that a jaxpr, or one inside it, computes."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [variable.aval.size for variable in equation.outvars if hasattr(variable.aval, "size")]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            sizes += [_largest(inner)] if hasattr(inner, "eqns") else []
    return max(sizes)


def _wide(seq):
    """Shapes alone, of one head so wide that a state per token would be by far the largest array."""
    shapes = [(1, seq, 1, 64)] * 3 + [(1, seq, 1)] * 2 + [(1, 1, 64, 64)]
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def _gradient(form):
    return jax.grad(lambda *args: sum(jnp.sum(x) for x in form(*args)), tuple(range(6)))


def test_no_array_holds_a_state_per_token():
    seq = 512
    for function in (FORMS["chunk_64"], _gradient(FORMS["chunk_64"])):
        assert _largest(jax.make_jaxpr(function)(*_wide(seq)).jaxpr) <= seq * 64
    # The recurrence does hold one, which shows that it would be found.
    assert _largest(jax.make_jaxpr(_gradient(oracles.delta_rule))(*_wide(seq)).jaxpr) >= seq * 64 * 64


def test_memory_of_the_gradient_grows_linearly_and_slowly():
    def temporaries(seq):
        memory = oracles.quick_jit(_gradient(FORMS["chunk_64"])).lower(*_wide(seq)).compile().memory_analysis()
        assert memory is not None and memory.temp_size_in_bytes > 0
        return memory.temp_size_in_bytes

    short, middle, long = map(temporaries, (512, 1024, 2048))
    assert long - middle == pytest.approx(2 * (middle - short), rel=0.1)
    assert (long - middle) / 1024 < 4 * 64 * 64 / 2  # bytes a token, against those of a state
