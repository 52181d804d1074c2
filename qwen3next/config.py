"""Every setting, as frozen dataclasses. Model fields have Hugging Face's names; a failed check shows the values."""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax

from qwen3next.errors import require, require_choice, require_positive
from qwen3next.remat import Remat

MixerKind = Literal["linear_attention", "full_attention"]
MlpKind = Literal["moe", "dense"]
RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
Dtype = Literal["float32", "bfloat16"]  # of computation
StoredDtype = Literal["float32", "bfloat16", "float16"]  # of parameters
Dispatch = Literal["auto", "dense", "blocks", "ragged", "all_to_all"]
Platform = Literal["auto", "cpu", "gpu", "tpu"]
AttentionKind = Literal["auto", "plain", "splash", "cudnn"]
Resume = Literal["auto", "never", "must"]
OnError = Literal["fail", "skip"]
Overflow = Literal["repeat", "drop"]
PackingKind = Literal["split", "first_fit", "best_fit", "none"]
LongDocuments = Literal["split", "truncate", "drop"]
TokenDtype = Literal["uint16", "uint32"]

IGNORED_LABEL = -100  # of a token whose next one is not predicted
_LONGEST = 2**24  # tokens of a row
_FARTHEST = 10**6  # between weights of sources

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "decoder_sparse_step",
)
_ROPE_REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


class LayerKind(NamedTuple):
    """What a decoder layer is made of. Layers of one kind have the same tree and can be stacked."""

    mixer: MixerKind
    mlp: MlpKind


@dataclass(frozen=True)
class RopeParameters:
    """Rotary embedding settings, Hugging Face's `rope_parameters`; a field that the type does not use stays `None`."""

    rope_type: RopeType = "default"
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.25
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None

    def __post_init__(self) -> None:
        require_choice("rope_type", self.rope_type, RopeType)
        require_positive(
            "rope_parameters", rope_theta=self.rope_theta, partial_rotary_factor=self.partial_rotary_factor
        )
        require(self.partial_rotary_factor <= 1, f"partial_rotary_factor is {self.partial_rotary_factor}; at most 1")
        for name in _ROPE_REQUIRED.get(self.rope_type, ()):
            require(getattr(self, name) is not None, f"rope_type {self.rope_type!r} needs rope_parameters.{name}")
        if self.factor is not None:
            require(1 <= self.factor < math.inf, f"rope_parameters.factor is {self.factor}; it must be at least 1")
        if self.original_max_position_embeddings is not None:
            original = self.original_max_position_embeddings
            require(original > 1, f"rope_parameters.original_max_position_embeddings is {original}; it must be above 1")
        if self.rope_type == "yarn":
            require(self.rope_theta > 1, f"rope_parameters.rope_theta is {self.rope_theta}; yarn needs more than 1")


@dataclass(frozen=True)
class ModelConfig:
    """The architecture. Field names and defaults are those of Hugging Face's `Qwen3NextConfig`."""

    vocab_size: int = 151_936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    hidden_act: str = "silu"
    max_position_embeddings: int = 32_768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)
    attention_bias: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts: int = 512
    num_experts_per_tok: int = 10
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 0.001
    layer_types: tuple[MixerKind, ...] = ()
    full_attention_interval: int = 4
    dtype: StoredDtype = "float32"

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_layers()
        self._check_rope()

    def _check_sizes(self) -> None:
        require_positive("model", **{name: getattr(self, name) for name in _SIZES})
        require(self.hidden_act == "silu", f"hidden_act is {self.hidden_act!r}; only 'silu' is implemented")
        require_choice("dtype", self.dtype, StoredDtype)
        for whole, part in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            a, b = getattr(self, whole), getattr(self, part)
            require(a % b == 0, f"{whole} is {a}; it must be a multiple of {part}, {b}")

    def _check_layers(self) -> None:
        layers = self.num_hidden_layers
        require_positive("model", full_attention_interval=self.full_attention_interval)
        require(
            len(self.layer_types) in (0, layers),
            f"layer_types has {len(self.layer_types)} entries; num_hidden_layers is {layers} and they must be equal",
        )
        for kind in self.layer_types:
            require_choice("an entry of layer_types", kind, MixerKind)
        for index in self.mlp_only_layers:
            require(0 <= index < layers, f"mlp_only_layers names layer {index}; allowed: 0 to {layers - 1}")
        if any(kind.mlp == "moe" for kind in self.layer_kinds):
            require_positive(
                "model",
                moe_intermediate_size=self.moe_intermediate_size,
                shared_expert_intermediate_size=self.shared_expert_intermediate_size,
                num_experts_per_tok=self.num_experts_per_tok,
            )
            require(
                self.num_experts_per_tok <= self.num_experts,
                f"num_experts_per_tok is {self.num_experts_per_tok}; allowed: at most num_experts, {self.num_experts}",
            )

    def _check_rope(self) -> None:
        rope = self.rope_parameters
        require(
            self.rotary_dim >= 1 and 2 * self.rotary_frequencies <= self.head_dim,
            f"head_dim {self.head_dim} x partial_rotary_factor {rope.partial_rotary_factor} rotates {self.rotary_dim} "
            f"dimensions; it must be at least 1 and, rounded up to even, at most head_dim",
        )
        if rope.rope_type == "dynamic":
            require(self.rotary_dim > 2, f"dynamic rope rotates {self.rotary_dim} dimensions; it needs above 2")
        for name in ("short_factor", "long_factor"):
            factors = getattr(rope, name)
            if rope.rope_type == "longrope":
                require(
                    len(factors) == self.rotary_frequencies,
                    f"rope_parameters.{name} has {len(factors)} entries; it must have {self.rotary_frequencies}",
                )

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a head, before rounding up to even."""
        return int(self.head_dim * self.rope_parameters.partial_rotary_factor)

    @property
    def rotary_frequencies(self) -> int:
        return (self.rotary_dim + 1) // 2

    @property
    def key_dim(self) -> int:
        """Width of a GatedDeltaNet layer's queries, and of its keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer, in order, from `layer_types` or else from `full_attention_interval`.

        A layer is dense if `mlp_only_layers` names it, if there are no experts, and between sparse steps.
        """

        def mixer(index: int) -> MixerKind:
            if self.layer_types:
                return self.layer_types[index]
            return "linear_attention" if (index + 1) % self.full_attention_interval else "full_attention"

        def mlp(index: int) -> MlpKind:
            sparse = index not in self.mlp_only_layers and self.num_experts > 0
            return "moe" if sparse and (index + 1) % self.decoder_sparse_step == 0 else "dense"

        return tuple(LayerKind(mixer(i), mlp(i)) for i in range(self.num_hidden_layers))


@dataclass(frozen=True)
class Compute:
    """How the model is computed. Only `on_overflow` "drop" changes what is computed; all else changes rounding.

    `dtype` is that of activations and products. `unroll` writes the layers out instead of scanning over them.
    `chunk_size` is that of the gated delta rule, 0 for one by the width of a head; `delta_parts`: parts of a layer's
    heads that it computes one after another, each a unit of rematerialisation, so that only one part's intermediates
    are there at a time.
    `dispatch` is how tokens meet experts: `auto` is `all_to_all` where the mesh has an expert axis, `blocks` on a CPU
    and `ragged` elsewhere. Of `all_to_all`, `capacity_factor` is how many rows a device has room for from each other,
    by the number in perfect balance, and `on_overflow` what becomes of the rest: `repeat` sends it in further passes,
    so that none is dropped, `drop` drops it. `expert_chunks`: parts of a device's tokens that are sent one after
    another, each in buffers of its size. `platform` is what kernels are chosen for; `auto`: what this process runs on.
    `attention` is how softmax attention is computed (`softmax.py`): `auto` is `splash` on a TPU, `cudnn` on an NVIDIA
    GPU, and `plain` elsewhere, for sizes that the kernel does not take, and wherever there is a cache.
    """

    dtype: Dtype = "float32"
    remat: Remat = field(default_factory=Remat)
    chunk_size: int = 0
    delta_parts: int = 1
    dispatch: Dispatch = "auto"
    capacity_factor: float = 1.25
    on_overflow: Overflow = "repeat"
    expert_chunks: int = 1
    attention: AttentionKind = "auto"
    unroll: bool = False
    platform: Platform = "auto"

    def __post_init__(self) -> None:
        require_choice("compute.dtype", self.dtype, Dtype)
        require_choice("compute.dispatch", self.dispatch, Dispatch)
        require_choice("compute.on_overflow", self.on_overflow, Overflow)
        require_choice("compute.platform", self.platform, Platform)
        require_positive("compute", capacity_factor=self.capacity_factor, expert_chunks=self.expert_chunks)
        require_positive("compute", delta_parts=self.delta_parts)
        require_choice("compute.attention", self.attention, AttentionKind)
        size = self.chunk_size
        choice = "it must be a power of two, or 0 for one by the width of a head"
        require(size >= 0 and size & (size - 1) == 0, f"compute.chunk_size is {size}; {choice}")

    @property
    def target(self) -> str:
        """The platform that kernels are chosen for."""
        return jax.default_backend() if self.platform == "auto" else self.platform


@dataclass(frozen=True)
class MeshConfig:
    """Devices along four axes; one axis may be -1, which takes those that are left.

    The rows of a batch lie over `data`, `fsdp` and `expert`. Parameters and optimizer state are cut over `fsdp` and
    `expert` and are alike along `data`; routed experts stay on their devices of the `expert` axis. Heads, widths and
    the vocabulary are cut over `tensor`. `distributed` joins the processes of several hosts (`jax.distributed`).
    """

    data: int = 1
    fsdp: int = -1
    expert: int = 1
    tensor: int = 1
    distributed: bool = False

    def __post_init__(self) -> None:
        for name, size in self.given.items():
            require(size > 0 or size == -1, f"mesh.{name} is {size}; it must be above 0, or -1 for what is left")
        rest = [name for name, size in self.given.items() if size == -1]
        require(len(rest) <= 1, f"mesh: {' and '.join(rest)} are -1; one axis at most takes what is left")

    @property
    def given(self) -> dict[str, int]:
        """The sizes as they were given."""
        return {"data": self.data, "fsdp": self.fsdp, "expert": self.expert, "tensor": self.tensor}

    def sizes(self, devices: int) -> dict[str, int]:
        """The size of each axis for this many devices. Raises `InputError` if they do not come out even."""
        named = math.prod(size for size in self.given.values() if size > 0)
        even = devices % named == 0 if -1 in self.given.values() else devices == named
        shape = " x ".join(f"{name} {size}" for name, size in self.given.items())
        require(even, f"mesh {shape} does not come out even with {devices} devices; allowed: sizes whose product does")
        return {name: size if size > 0 else devices // named for name, size in self.given.items()}


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it is cut into rows.

    `source`: `stdlib` (the Python standard library's own source files), `docstrings` (prompts and completions made of
    it: a function's head, and what its docstring says first), or a file, folder or glob of text, `.jsonl`, `.parquet`,
    `.array_record` or `.bin` token files. Of several each has a weight, `NAME=WEIGHT`, by which rows are drawn from it.
    `tokenizer`: `bytes`, or the path of a Hugging Face `tokenizer.json`.
    `token_dtype`: that of a `.bin` file that says none.
    `text_field`: the field of a record. `prompt_field`: if given, records hold a prompt, too, before the text, on which
    there is no loss. `messages_field`: if given, records are conversations, written by the chat template beside the
    tokenizer, with a loss on what the `roles` say. `on_error`: what becomes of a record or text that cannot be read.
    `packing`: rows are cut from the concatenation (`split`), filled with whole documents, each into the first row with
    room or the one that it fills best, or hold one each (`none`). `long_documents`: what then becomes of a document
    that is longer than a row. `batch_size`: rows of one optimizer step. `held_out`: share of the documents kept for
    evaluation. `workers`: processes that make batches ahead; 0 makes them where they are used.
    """

    source: tuple[str, ...] = ("stdlib",)
    tokenizer: str = "bytes"
    token_dtype: TokenDtype = "uint16"
    text_field: str = "text"
    prompt_field: str = ""
    messages_field: str = ""
    roles: tuple[str, ...] = ("assistant",)
    on_error: OnError = "fail"
    packing: PackingKind = "split"
    long_documents: LongDocuments = "split"
    sequence_length: int = 512
    batch_size: int = 8
    held_out: float = 0.03
    workers: int = 0

    def __post_init__(self) -> None:
        require_positive("data", sequence_length=self.sequence_length, batch_size=self.batch_size)
        length = self.sequence_length
        require(length <= _LONGEST, f"data.sequence_length is {length}; it must be at most {_LONGEST}")
        require(0 < self.held_out < 1, f"data.held_out is {self.held_out}; it must lie between 0 and 1")
        require(0 <= self.workers <= 64, f"data.workers is {self.workers}; it must be 0 to 64")
        require_choice("data.on_error", self.on_error, OnError)
        require_choice("data.packing", self.packing, PackingKind)
        require_choice("data.long_documents", self.long_documents, LongDocuments)
        require_choice("data.token_dtype", self.token_dtype, TokenDtype)
        require(
            not (self.prompt_field and self.messages_field),
            f"data.prompt_field is {self.prompt_field!r} and data.messages_field {self.messages_field!r}; give one",
        )
        require(bool(self.roles), "data.roles is empty; name a role that is learnt, such as assistant")
        require(
            self.packing != "split" or self.long_documents == "split",
            f"data.long_documents is {self.long_documents!r}, and data.packing split cuts every document; "
            f"allowed: data.long_documents split, or another packing",
        )
        require(bool(self.weights), "data.source is empty; name a source")

    @property
    def weights(self) -> dict[str, int]:
        """Each source and its weight, in hundredths of the smallest one."""
        if len(self.source) == 1:
            return {self.source[0]: 100}
        weights = dict[str, float]()
        for word in self.source:
            name, _, text = word.rpartition("=")
            try:
                weight = float(text) if name else math.nan
            except ValueError:
                weight = math.nan
            told = f"data.source {word!r}: of several sources each needs a weight above 0, NAME=WEIGHT"
            require(0 < weight < math.inf, told)
            require(name not in weights, f"data.source names {name!r} twice; allowed: once")
            weights[name] = weight
        smallest = min(weights.values(), default=1)
        far = max(weights.values(), default=1) > _FARTHEST * smallest
        require(not far, f"data.source: weights differ by more than {_FARTHEST:,} times; give closer ones")
        return {name: round(100 * weight / smallest) for name, weight in weights.items()}


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay to `final_fraction` of the peak; weight decay on matrices alone.

    `rules`: exceptions, each a pattern of leaves' paths and what holds for them, the last one that matches counting:
    `"lora_B learning_rate=16"` (times the schedule's), `"mlp.gate.weight decay=no"`, `"embed_tokens.* frozen"`.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 100
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    rules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_positive("optimizer", learning_rate=self.learning_rate, epsilon=self.epsilon, clip_norm=self.clip_norm)
        for name in ("beta1", "beta2", "final_fraction"):
            value = getattr(self, name)
            below = value <= 1 if name == "final_fraction" else value < 1
            require(value >= 0 and below, f"optimizer.{name} is {value}; it must lie between 0 and 1")
        for name in ("warmup_steps", "weight_decay"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"optimizer.{name} is {value}; it must not be negative, nor infinite")


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters (Hu et al. 2021) on the matrices that `targets` names; without targets there are none.

    A target is a preset of `qwen3next/lora.py` (`all-linear`, `attention`, `experts`, ..) or a pattern of published
    names such as `self_attn.q_proj` or `mlp.experts.*`, and `=RANK` after it gives it a rank of its own (`=0`: none).
    The update `B A` counts `alpha / rank`, with `rslora` `alpha / sqrt(rank)` (Kalajdzievski 2023). `dropout` falls on
    what A is applied to.
    """

    targets: tuple[str, ...] = ()
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rslora: bool = False

    def __post_init__(self) -> None:
        require_positive("lora", rank=self.rank, alpha=self.alpha)
        require(0 <= self.dropout < 1, f"lora.dropout is {self.dropout}; it must be at least 0 and below 1")


@dataclass(frozen=True)
class RunConfig:
    """One training run. `accumulate`: microbatches of an optimizer step. `eval_batches`: batches of an evaluation
    during the run; the last one reads all held-out text. `wandb`: what Weights & Biases does with the metrics.

    `resume`: what a run does with a folder that holds one: go on from its last saved state if there is one (`auto`),
    refuse (`never`), or go on and nothing else (`must`). `overwrite`: begin anew in its place.
    `save_every`: steps between saved states, of which the last `keep` stay, and the one with the lowest held-out loss.
    `init_from`: a run or Hugging Face folder whose weights the run begins with. `dry_run`: print what would be trained,
    and how, where it would lie, and stop. `compile_only`: compile the step, print what it costs, and stop; for the TPU
    machine that `topology` names, such as v5p-256, or else for the devices that are here.
    `compilation_cache`: the folder where compiled programs are kept for the next start; `auto` is
    $JAX_COMPILATION_CACHE_DIR if that is set, else `qwen3next` in $XDG_CACHE_HOME or ~/.cache; `off` keeps none.
    """

    folder: str = "runs/default"
    resume: Resume = "auto"
    overwrite: bool = False
    seed: int = 0
    steps: int = 1000
    accumulate: int = 1
    z_loss_coef: float = 0.0
    log_every: int = 10
    eval_every: int = 200
    eval_batches: int = 4
    save_every: int = 500
    keep: int = 2
    sample_prompt: str = "def "
    sample_tokens: int = 100
    wandb: Literal["off", "offline", "online"] = "offline"
    init_from: str = ""
    dry_run: bool = False
    compile_only: bool = False
    topology: str = ""
    compilation_cache: str = "auto"

    def __post_init__(self) -> None:
        names = ("steps", "accumulate", "log_every", "eval_every", "eval_batches", "save_every", "keep")
        require_positive("run", **{name: getattr(self, name) for name in names})
        require(self.sample_tokens >= 0, f"run.sample_tokens is {self.sample_tokens}; it must not be negative")
        coefficient = self.z_loss_coef
        require(0 <= coefficient < math.inf, f"run.z_loss_coef is {coefficient}; it must not be negative, nor infinite")
        require(self.seed >= 0, f"run.seed is {self.seed}; it must not be negative")
        require_choice("run.resume", self.resume, Resume)
        require(bool(self.folder), "run.folder is empty; it must name a folder")
        require(bool(self.compilation_cache), "run.compilation_cache is empty; it must be auto, off or a folder")
        only = self.compile_only or self.dry_run or not self.topology
        require(only, f"run.topology is {self.topology!r}: that machine is not here; add --compile-only or --dry-run")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that `train.py` reads: one TOML file, a section a field."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    compute: Compute = field(default_factory=Compute)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        rows, parts = self.data.batch_size, self.run.accumulate
        require(rows % parts == 0, f"data.batch_size is {rows}; it must be a multiple of run.accumulate, {parts}")
