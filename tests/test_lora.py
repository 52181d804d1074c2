"""Adapters: what they are put on, that they leave the base as it is, and that they alone are trained."""

import dataclasses
import math
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from common import run_config, tiny_config, tiny_model, unrolled

from qwen3next.config import Compute, LoRAConfig, OptimizerConfig
from qwen3next.errors import InputError
from qwen3next.linear import Embedding, Linear
from qwen3next.lora import (
    LoRALinear,
    adapters,
    add_adapters,
    attach,
    find_targets,
    matrix_names,
    merge,
    strip,
    with_dropout,
)
from qwen3next.model import Qwen3Next
from qwen3next.optim import leaf_rules, optimizer, trainable
from qwen3next.programs import quick_options
from qwen3next.training import gradients, initial_state, make_train_step
from qwen3next.tree import leaf_path

EVERYTHING = LoRAConfig(("all-linear", "head", "embedding"), rank=3)
# A cycle, a remainder and a dense layer; no two of layers, experts, ranks and widths are equal.
SHARED = [f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")]
SMALL = {"num_hidden_layers": 2, "full_attention_interval": 1, "num_experts": 3}  # compiles sooner
SHAPE = {"num_hidden_layers": 6, "num_experts": 5, "moe_intermediate_size": 12, "mlp_only_layers": (4,)}


def adapted(config: LoRAConfig = EVERYTHING, seed: int = 0, scale: float = 0.1, shape=SHAPE, **sizes) -> Qwen3Next:
    """A model whose adapters all have an effect."""
    model = add_adapters(tiny_model(**shape, **sizes), config, key=jax.random.key(seed))
    return perturbed(model, jax.random.key(seed + 1), scale)


def perturbed(model: Qwen3Next, key: jax.Array, scale: float) -> Qwen3Next:
    def move(path, leaf):
        if not leaf_path(path).endswith(("lora_A", "lora_B")):
            return leaf
        own = jax.random.fold_in(key, zlib.crc32(leaf_path(path).encode()) & 0x7FFFFFFF)
        return leaf + scale * jax.random.normal(own, leaf.shape)

    return jax.tree_util.tree_map_with_path(move, model)


def make_batch(rows: int = 2, length: int = 24) -> dict[str, jax.Array]:
    ids = np.random.default_rng(0).integers(64, size=(rows, length + 1)).astype(np.int32)
    return {
        "input_ids": jnp.asarray(ids[:, :-1]),
        "labels": jnp.asarray(ids[:, 1:]),
        "segment_ids": jnp.ones((rows, length), jnp.int32),
    }


@eqx.filter_jit
def logits_of(model: Qwen3Next, ids: jax.Array, compute: Compute = Compute()) -> jax.Array:
    return model.logits(model.hidden(ids, compute=compute).states)


# --- targets ----------------------------------------------------------------------------------------------------------


def test_every_matrix_has_its_published_name():
    names = set(matrix_names(tiny_model(**SHAPE)).values())
    attention = {f"self_attn.{x}_proj" for x in "qkvo"}
    deltanet = {"linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"}
    swiglu = ("gate_proj", "up_proj", "down_proj")
    mlp = {f"mlp.{x}{y}" for x in ("", "experts.", "shared_expert.") for y in swiglu}
    assert names == attention | deltanet | mlp | {"mlp.gate", "mlp.shared_expert_gate", "lm_head", "embed_tokens"}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("attention",), {"q_proj": 4, "k_proj": 4, "v_proj": 4, "o_proj": 4}),
        (("deltanet",), {"in_proj_qkvz": 4, "in_proj_ba": 4, "out_proj": 4}),
        (("experts=2",), {"experts.gate_proj": 2, "experts.up_proj": 2, "experts.down_proj": 2}),
        (("router", "head=1", "embedding=7"), {"mlp.gate": 4, "lm_head": 1, "embed_tokens": 7}),
        (("self_attn.[qv]_proj", "k_proj=2"), {"q_proj": 4, "v_proj": 4, "k_proj": 2}),
        (("attention", "o_proj=0"), {"q_proj": 4, "k_proj": 4, "v_proj": 4}),
        (("shared_expert.*", "shared_expert_gate=1"), {**dict.fromkeys(SHARED, 4), "shared_expert_gate": 1}),
        (("dense",), {"mlp.gate_proj": 4, "mlp.up_proj": 4, "mlp.down_proj": 4}),
    ],
)  # fmt: skip
def test_targets_are_found_in_every_stack(targets, expected):
    model = tiny_model(**SHAPE)
    names, found = matrix_names(model), find_targets(model, LoRAConfig(targets, rank=4))
    wanted = {path: rank for end, rank in expected.items() for path, name in names.items() if name.endswith(end)}
    assert {path: target.rank for path, target in found.items()} == wanted


def test_a_target_that_is_nowhere_is_refused_with_what_is_near():
    model = tiny_model(**SHAPE)
    for targets, message in (
        (("q_porj",), r"'q_porj' is no matrix of the model; allowed: .*self_attn\.q_proj"),
        (("in_proj_qkv",), r"'in_proj_qkv' is no matrix.*linear_attn\.in_proj_qkvz"),
        (("conv1d",), r"'conv1d' is no matrix"),
        (("all-linea",), r"'all-linea' is no matrix.*all-linear"),
        (("attention", "deltanett"), r"'deltanett' is no matrix.*deltanet"),
        (("attention=x",), r"'attention=x' must be a name or NAME=RANK"),
        (("attention=-1",), r"must be a name or NAME=RANK"),
        (("attention=0",), r"leaves no matrix to adapt"),
        (("",), r"'' is no matrix"),
        (("attention=99999999999999999999",), r"rank 9+ for 'attention'; allowed: at most 96"),
    ):
        with pytest.raises(InputError, match=message):
            find_targets(model, LoRAConfig(targets))
    with pytest.raises(InputError, match="'deltanet' is no matrix of the model"):
        find_targets(tiny_model(num_hidden_layers=2, full_attention_interval=1), LoRAConfig(("deltanet",)))


def test_the_scale_is_alpha_over_rank_or_its_root():
    model = tiny_model(**SHAPE)
    for rslora, scale in ((False, 16 / 4), (True, 16 / 2)):
        found = find_targets(model, LoRAConfig(("attention",), rank=4, alpha=16.0, rslora=rslora))
        assert {target.scale for target in found.values()} == {scale}


def test_the_number_of_parameters_is_that_of_a_hand_count():
    config, rank = tiny_config(**SHAPE), 3
    model = add_adapters(tiny_model(**SHAPE), LoRAConfig(("all-linear",), rank=rank), key=jax.random.key(0))
    c = config
    by_hand = 0
    for kind in config.layer_kinds:
        pairs = {
            "linear_attention": [
                (c.hidden_size, 2 * c.key_dim + 2 * c.value_dim),
                (c.hidden_size, 2 * c.linear_num_value_heads),
                (c.value_dim, c.hidden_size),
            ],
            "full_attention": [
                (c.hidden_size, 2 * c.num_attention_heads * c.head_dim),
                (c.hidden_size, c.num_key_value_heads * c.head_dim),
                (c.hidden_size, c.num_key_value_heads * c.head_dim),
                (c.num_attention_heads * c.head_dim, c.hidden_size),
            ],
        }[kind.mixer]
        if kind.mlp == "dense":
            pairs = [*pairs, *[(c.hidden_size, c.intermediate_size)] * 3]
        else:
            expert = [(c.hidden_size, c.moe_intermediate_size)] * 3 * c.num_experts
            shared = [(c.hidden_size, c.shared_expert_intermediate_size)] * 3
            pairs = [*pairs, *expert, *shared, (c.hidden_size, c.num_experts), (c.hidden_size, 1)]
        by_hand += sum(rank * (a + b) for a, b in pairs)
    params, frozen = eqx.partition(model, trainable(model))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == by_hand
    assert sum(leaf.size for leaf in jax.tree.leaves(frozen)) == sum(
        leaf.size for leaf in jax.tree.leaves(tiny_model(**SHAPE))
    )


# --- what they compute ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_adapters_change_no_bit(dtype):
    base, ids = tiny_model(**SHAPE), make_batch()["input_ids"]
    model = add_adapters(base, EVERYTHING, key=jax.random.key(0))
    # Unless told otherwise XLA leaves out roundings to bfloat16 wherever it fuses, and it fuses the two differently.
    options = {"xla_allow_excess_precision": False}
    run = jax.jit(
        lambda model: model.logits(model.hidden(ids, compute=Compute(dtype=dtype)).states), compiler_options=options
    )
    np.testing.assert_array_equal(run(base), run(model))
    assert all(bool((a == b).all()) for a, b in zip(*map(jax.tree.leaves, (base, strip(model))), strict=True))


@pytest.mark.parametrize(("dispatch", "tied"), [("dense", False), ("ragged", True), ("blocks", False)])
def test_merged_is_unmerged(dispatch, tied):
    model, ids = _tied() if tied else adapted(), make_batch()["input_ids"]
    compute = Compute(dispatch=dispatch)
    unmerged, merged = logits_of(model, ids, compute), logits_of(merge(model), ids, compute)
    plain = logits_of(strip(model), ids, compute)
    scale = float(jnp.abs(unmerged).max())
    assert float(jnp.abs(unmerged - plain).max()) > 0.1 * scale
    np.testing.assert_allclose(merged, unmerged, rtol=0, atol=1e-5 * scale)
    assert not adapters(merge(model)) and jax.tree.structure(merge(model)) == jax.tree.structure(strip(model))


def _tied() -> Qwen3Next:
    config = LoRAConfig(("all-linear", "embedding"), rank=3)
    return adapted(config, tie_word_embeddings=True)


@pytest.mark.parametrize("dispatch", ["dense", "ragged", "blocks", "all_to_all"])
def test_an_expert_has_an_adapter_of_its_own(dispatch):
    rng, (experts, rank, hidden, width) = np.random.default_rng(0), (5, 2, 8, 6)
    config = tiny_config(num_experts=experts, num_experts_per_tok=2, hidden_size=hidden, moe_intermediate_size=width)
    from qwen3next.experts import Experts

    module, compute = Experts(config, key=jax.random.key(0)), Compute(dispatch=dispatch)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    A, B = draw(experts, rank, hidden), draw(experts, width, rank)
    adapted = eqx.tree_at(lambda m: m.up_proj, module, attach(module.up_proj, A, B, 0.5))
    x, weights = draw(9, hidden), jnp.ones((9, 1))
    for expert in range(experts):
        chosen = jnp.full((9, 1), expert, jnp.int32)
        up = module.up_proj.weight[expert] + 0.5 * B[expert] @ A[expert]
        inner = jax.nn.silu(x @ module.gate_proj.weight[expert].T) * (x @ up.T)
        expected = inner @ module.down_proj.weight[expert].T
        np.testing.assert_allclose(adapted(x, weights, chosen, compute)[0], expected, rtol=1e-5, atol=1e-6)
        without = eqx.tree_at(lambda m: m.up_proj.lora_B, adapted, B.at[expert].set(0))
        for other in range(experts):
            same = without(x, weights, jnp.full((9, 1), other, jnp.int32), compute)[0]
            changed = not np.array_equal(same, adapted(x, weights, jnp.full((9, 1), other, jnp.int32), compute)[0])
            assert changed == (other == expert)


def test_a_merged_matrix_is_the_formula():
    rng = np.random.default_rng(0)
    A, B = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 5), (7, 2)))
    linear = Linear(5, 7, 1.0, jnp.dtype("float32"), key=jax.random.key(0))
    np.testing.assert_allclose(
        attach(linear, jnp.asarray(A), jnp.asarray(B), 0.25).merged().weight, linear.weight + 0.25 * B @ A, rtol=1e-6
    )
    table = Embedding(5, 7, 1.0, jnp.dtype("float32"), key=jax.random.key(0))
    adapted = attach(table, jnp.asarray(A), jnp.asarray(B), 0.25)
    expected = table.weight + 0.25 * (B @ A).T
    np.testing.assert_allclose(adapted.merged().weight, expected, rtol=1e-6)
    ids = jnp.array([[4, 0], [2, 2]])
    np.testing.assert_allclose(adapted(ids, jnp.dtype("float32")), expected[ids], rtol=1e-5, atol=1e-6)
    states = jnp.asarray(rng.normal(size=(3, 7)), jnp.float32)
    np.testing.assert_allclose(adapted.logits(states), states @ expected.T, rtol=1e-5, atol=1e-5)


def test_scanned_is_unrolled():
    model, ids = adapted(), make_batch()["input_ids"]
    np.testing.assert_allclose(logits_of(model, ids), unrolled(model, ids).logits, rtol=0, atol=1e-4)


def test_no_two_layers_or_experts_begin_alike():
    model = add_adapters(tiny_model(**SHAPE), EVERYTHING, key=jax.random.key(0))
    rows = [
        row.tobytes()
        for adapter in adapters(model).values()
        if isinstance(adapter, LoRALinear)
        for row in np.asarray(adapter.lora_A).reshape(-1, *adapter.lora_A.shape[-2:])
    ]
    assert len(rows) == len(set(rows)) > 40
    for adapter in adapters(model).values():
        if isinstance(adapter, LoRALinear):
            bound = 1 / math.sqrt(adapter.lora_A.shape[-1])
            assert 0.8 * bound < float(jnp.abs(adapter.lora_A).max()) <= bound
            assert not adapter.lora_B.any()


# --- training ---------------------------------------------------------------------------------------------------------


def lora_config(tmp_path, sizes=SHAPE, **changes):
    config = run_config(tmp_path)
    optimizer = OptimizerConfig(learning_rate=0.05, warmup_steps=0, weight_decay=0.1)
    model = tiny_config(**sizes)
    return dataclasses.replace(config, model=model, lora=EVERYTHING, optimizer=optimizer, **changes)


@pytest.mark.parametrize(("dtype", "decay"), [("bfloat16", 0.1), ("float32", 0.0)])
def test_a_frozen_base_stays_bit_for_bit_and_every_layer_learns(tmp_path, dtype, decay):
    config = lora_config(tmp_path, SMALL if dtype == "bfloat16" else SHAPE)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, weight_decay=decay))
    transform = optimizer(config.optimizer, 20)
    state, frozen = initial_state(config, transform, jax.random.key(0))

    def base():
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(strip(eqx.combine(state.params, frozen)))]

    before = base()
    first = jax.tree.map(np.array, state.params)
    step = eqx.filter_jit(
        make_train_step(config, transform), donate="all-except-first", compiler_options=quick_options()
    )
    losses = []
    for _ in range(10):
        state, metrics = step((frozen, make_batch()), state)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5
    assert before == base()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        assert leaf.dtype == jnp.float32
        assert leaf_path(path).endswith(("lora_A", "lora_B"))
    moved = jax.tree.map(lambda a, b: np.abs(a - np.asarray(b)), first, state.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(moved) if not decay else ():  # decay moves all
        matrices = leaf.reshape(-1, *leaf.shape[-2:])
        assert (matrices.max(axis=(1, 2)) > 0).all(), leaf_path(path)  # of every layer and expert


def test_gradients_and_moments_are_the_adapters(tmp_path):
    config = lora_config(tmp_path)
    transform = optimizer(config.optimizer, 20)
    state, frozen = eqx.filter_eval_shape(initial_state, config, transform, jax.random.key(0))
    nbytes = lambda tree: sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731
    expected = nbytes(
        [(adapter.lora_A, adapter.lora_B) for adapter in adapters(eqx.combine(state.params, frozen)).values()]
    )
    grads, _ = eqx.filter_eval_shape(gradients, state.params, frozen, make_batch(), 1, Compute())
    assert nbytes(grads) == nbytes(state.params) == expected
    scalars = sum(leaf.dtype.itemsize for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim == 0)
    assert nbytes(state.optimizer) == 2 * expected + scalars and scalars <= 16


def test_dropout_is_of_each_layer_and_step_and_of_training_alone(tmp_path):
    config = LoRAConfig(("all-linear",), rank=3, dropout=0.5)
    model, ids = adapted(config), make_batch()["input_ids"]
    without = adapted(dataclasses.replace(config, dropout=0.0))
    np.testing.assert_array_equal(logits_of(model, ids), logits_of(without, ids))  # no key, no dropout
    one, two = (with_dropout(model, jax.random.key(seed)) for seed in (1, 2))
    assert not np.array_equal(logits_of(one, ids), logits_of(two, ids))
    np.testing.assert_array_equal(logits_of(one, ids), logits_of(with_dropout(model, jax.random.key(1)), ids))
    keys = [
        bytes(row)
        for adapter in adapters(one).values()
        for row in np.asarray(jax.random.key_data(adapter.key)).reshape(-1, 2)
    ]
    assert (
        len(keys)
        == len(set(keys))
        == sum(
            3
            + 7 * (kind.mlp == "moe")
            + 3 * (kind.mlp == "dense")
            + (kind.mixer == "full_attention")
            + (kind.mlp == "moe")
            for kind in model.config.layer_kinds
        )
    )
    # Kept with probability 1 - p, then scaled by its inverse: the mean over many keys is the product without dropout.
    linear = Linear(16, 4, 1.0, jnp.dtype("float32"), key=jax.random.key(0))
    layer = attach(linear, jnp.ones((1, 16)), jnp.ones((4, 1)), 1.0, dropout=0.25)
    x = jnp.ones((1, 16))
    draws = jax.vmap(lambda key: eqx.tree_at(lambda m: m.key, layer, key, is_leaf=lambda k: k is None)(x))(
        jax.random.split(jax.random.key(3), 4000)
    )
    np.testing.assert_allclose(jnp.mean(draws - linear(x), axis=0), 16.0, rtol=0.02)
    assert float(jnp.std(draws)) > 1


def test_dropout_differs_between_steps_and_microbatches(tmp_path):
    config = lora_config(tmp_path, SMALL)
    lora = dataclasses.replace(config.lora, dropout=0.5)
    config = dataclasses.replace(
        config, lora=lora, optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-12)
    )
    transform = optimizer(config.optimizer, 20)
    state, frozen = initial_state(config, transform, jax.random.key(0))
    model = perturbed(eqx.combine(state.params, frozen), jax.random.key(5), 0.5)
    params, frozen = eqx.partition(model, trainable(model))
    state = dataclasses.replace(state, params=params)
    run = eqx.filter_jit(gradients, compiler_options=quick_options())
    step, batch = eqx.filter_jit(make_train_step(config, transform), compiler_options=quick_options()), make_batch()
    after, first = step((frozen, batch), state)
    _, second = step((frozen, batch), after)
    assert abs(float(first["loss"]) - float(second["loss"])) > 1e-3
    twice = {name: jnp.concatenate([array, array]) for name, array in batch.items()}
    _, halves = run(params, frozen, twice, 2, Compute(), jax.random.key(0))
    same = [run(params, frozen, batch, 1, Compute(), key)[1]["loss"] for key in jax.random.split(jax.random.key(0))]
    np.testing.assert_allclose(float(halves["loss"]), float(sum(same)) / 2, rtol=1e-5)
    assert abs(float(same[0] - same[1])) > 1e-3


# --- rules ------------------------------------------------------------------------------------------------------------


def test_rules_see_one_layer_and_the_last_one_counts():
    model = tiny_model(**SHAPE)
    rules = ("mixer.* learning_rate=0.5", "A_log frozen", "conv1d decay=no learning_rate=2", "norm.weight decay=yes")
    found = leaf_rules(model, OptimizerConfig(rules=rules))
    for path, rule in found.items():
        end = path.rsplit(".", 1)[-1]
        assert rule.trained == (end != "A_log"), path
        assert rule.learning_rate == (2.0 if end == "conv1d" else 0.5 if ".mixer." in path else 1.0), path
        if path.endswith(("q_norm.weight", "layernorm.weight", "dt_bias", "A_log", "conv1d")):
            assert not rule.decay, path
        elif path.endswith(("proj.weight", "gate.weight", "mixer.norm.weight")) or path == "norm.weight":
            assert rule.decay, path
    flags = trainable(model, OptimizerConfig(rules=rules))
    assert {leaf_path(p).rsplit(".", 1)[-1] for p, flag in jax.tree_util.tree_leaves_with_path(flags) if not flag} == {
        "A_log"
    }


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("A_logg frozen", r"'A_logg' is no leaf that is trained; allowed: .*A_log"),
        ("A_log frosen", r"'frosen' in 'A_log frosen' is unknown; allowed: frozen, decay=yes"),
        ("A_log decay=maybe", r"'decay=maybe'.*is unknown"),
        ("A_log learning_rate=-1", r"'learning_rate=-1'.*is unknown"),
        ("A_log", "must be a pattern of leaves and what holds"),
        ("", "must be a pattern of leaves and what holds"),
        ("* frozen", "freeze every leaf"),
    ],
)
def test_a_rule_that_says_nothing_is_refused(rule, message):
    with pytest.raises(InputError, match=message):
        trainable(tiny_model(**SHAPE), OptimizerConfig(rules=(rule,)))


def test_a_rule_for_what_is_frozen_anyway_is_refused():
    model = add_adapters(tiny_model(**SHAPE), LoRAConfig(("attention",)), key=jax.random.key(0))
    with pytest.raises(InputError, match=r"'norm\.weight' is no leaf that is trained; allowed: .*lora_"):
        trainable(model, OptimizerConfig(rules=("norm.weight learning_rate=7",)))
    assert leaf_rules(model, OptimizerConfig(rules=("lora_B learning_rate=1e-2",)))


def test_a_rule_scales_the_update_and_keeps_from_decay():
    params = {"a": {"lora_A": jnp.ones((2, 2)), "lora_B": jnp.ones((2, 2))}}
    grads = jax.tree.map(jnp.ones_like, params)

    def update(rules, weight_decay=0.0):
        config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=weight_decay, rules=rules)
        transform = optimizer(config, 10)
        with jax.numpy_dtype_promotion("standard"):  # optax counts on it
            return transform.update(grads, transform.init(params), params)[0]["a"]

    plain, ruled = update(()), update(("lora_B learning_rate=16",))
    np.testing.assert_allclose(ruled["lora_B"], 16 * plain["lora_B"], rtol=1e-6)
    np.testing.assert_array_equal(ruled["lora_A"], plain["lora_A"])
    kept = update(("lora_A decay=no",), weight_decay=0.5)
    np.testing.assert_array_equal(kept["lora_A"], plain["lora_A"])
    assert float(optax.tree.norm(kept["lora_B"])) > 1.4 * float(optax.tree.norm(plain["lora_B"]))
