"""Adapters as PEFT folders, both ways: `adapter_config.json` and `adapter_model.safetensors`.

What a folder says is an update `scale * B A` for each of some published tensors (`qwen3next/factors.py`). PEFT (0.21,
`peft.tuners.lora.layer`) spells them so:

* a matrix: `MODULE.lora_A.weight` [rank, in] and `MODULE.lora_B.weight` [out, rank];
* the embedding: `lora_embedding_A` [rank, vocab] and `lora_embedding_B` [hidden, rank], of the transposed table;
* fused parameters, here the routed experts: A [experts * rank, in], rows by expert and then rank, and B
  [out, rank * experts], columns by rank and then expert. Of the two on one module the first in `gate_up_proj`,
  `down_proj` is said to be of `experts.base_layer` and the second of `experts`;
* a matrix whose name ends like those of transformers 4's experts (`gate`, `gate_proj`, `up_proj`, `down_proj`) is a
  target only as a parameter, `NAME.weight`: as a module PEFT would take it for them;
* the scale: `lora_alpha / r`, with `use_rslora` `lora_alpha / sqrt(r)`, and patterns for names that differ.

Gate and up projection have an A each; fused, their ranks stand side by side: A = [A_g; A_u], B = [[B_g, 0], [0, B_u]].
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from qwen3next.errors import InputError, require
from qwen3next.factors import Factors, factors_of
from qwen3next.hf import EMBED, HEAD, table
from qwen3next.hosts import leads
from qwen3next.lora import strip
from qwen3next.model import Qwen3Next
from qwen3next.structure import read_json
from qwen3next.tensor_files import FLOATS, INDEX, SINGLE, read, read_header
from qwen3next.tensor_writer import kind_spec, lay_out_file, new_file, write
from qwen3next.tree import unnumbered

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _BASE = "base_model.model.", "base_sha256"
_PARAMETERS = (".gate", ".gate_proj", ".up_proj", ".down_proj")
# Settings under which a folder means something else than what is read here, and the values under which it does not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change the base
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "velora_config": (None,),
    "kasa_config": (None,),
    "arrow_config": (None,),
}


class _Stack(NamedTuple):
    """The factors of all experts of a layer."""

    A: Float[np.ndarray, "experts rank in"]
    B: Float[np.ndarray, "experts out rank"]
    scale: float


# --- written ----------------------------------------------------------------------------------------------------------


def _join(gate: _Stack | None, up: _Stack | None) -> _Stack:
    """The fused gate and up projection's."""
    present = [half for half in (gate, up) if half is not None]
    scale, (experts, width, _) = present[0].scale, present[0].B.shape
    halves = []
    for at, half in enumerate((gate, up)):
        if half is not None:
            B = np.zeros((experts, 2 * width, half.B.shape[2]), np.float32)
            B[:, at * width : (at + 1) * width] = half.B * np.float32(half.scale / scale)
            halves.append(B)
    return _Stack(np.concatenate([half.A for half in present], axis=1), np.concatenate(halves, axis=2), scale)


def _spell(factors: Mapping[str, Factors]) -> tuple[dict[str, np.ndarray], dict[str, tuple[int, float]]]:
    """PEFT's tensors; and rank and scale by module or parameter."""
    tensors: dict[str, np.ndarray] = {}
    kinds: dict[str, tuple[int, float]] = {}
    experts: dict[str, dict[str, list[Factors]]] = {}

    for name, found in factors.items():
        module = name.removesuffix(".weight")
        if match := re.fullmatch(r"(.+\.experts)\.\d+\.(\w+)", module):
            experts.setdefault(match[1], {}).setdefault(match[2], []).append(found)
            continue
        if name == EMBED:
            tensors |= {f"{module}.lora_embedding_A": found.B.T, f"{module}.lora_embedding_B": found.A.T}
        else:
            tensors |= {f"{module}.lora_A.weight": found.A, f"{module}.lora_B.weight": found.B}
        kinds[name if module.endswith(_PARAMETERS) else module] = (len(found.A), found.scale)
    for module, projections in experts.items():
        stacks = {
            name: _Stack(np.stack([one.A for one in each]), np.stack([one.B for one in each]), each[0].scale)
            for name, each in projections.items()
        }
        down = stacks.get("down_proj")
        gate_up = None
        if down is None or len(stacks) > 1:
            gate_up = _join(stacks.get("gate_proj"), stacks.get("up_proj"))
        inside = ".base_layer" if down is not None else ""
        for parameter, place, stack in (("gate_up_proj", inside, gate_up), ("down_proj", "", down)):
            if stack is not None:
                _, rank, inner = stack.A.shape
                tensors[f"{module}{place}.lora_A.weight"] = stack.A.reshape(-1, inner)
                tensors[f"{module}{place}.lora_B.weight"] = stack.B.transpose(1, 2, 0).reshape(stack.B.shape[1], -1)
                kinds[f"{module}.{parameter}"] = (rank, stack.scale)
    return tensors, kinds


def _shared(kinds: Mapping[str, tuple[int, float]], layers: Mapping[str, int]) -> dict[str, tuple[int, float]]:
    """Without the layers' numbers where all layers that have such a matrix, `layers` by name, agree."""

    def short(name: str) -> str:
        return re.sub(r"^model\.(layers\.\d+\.)?", "", name)

    said: dict[str, list[tuple[int, float]]] = {}
    for name, kind in kinds.items():
        said.setdefault(short(name), []).append(kind)
    agreed = {name for name, all_ in said.items() if len(set(all_)) == 1 and len(all_) == layers[_module(name)]}
    return {short(name) if short(name) in agreed else name: kind for name, kind in kinds.items()}


def _module(name: str) -> str:
    """What a name of `_spell` is counted by: the matrix, or the experts as a whole."""
    return "experts" if ".experts." in name else name.removesuffix(".weight")


def save_adapter(
    model: Qwen3Next,
    folder: str | Path,
    *,
    base: str = "",
    fingerprint: str = "",
    dropout: float = 0.0,
    rslora: bool = False,
) -> None:
    """Writes a model's adapters as a PEFT folder; `base` is what the folder says they belong to, and `fingerprint`
    tells which weights that one held.

    The two files are replaced one after the other, each whole. Raises `InputError` if one cannot be written.
    """
    folder, factors = Path(folder), factors_of(model)
    require(bool(factors), "the model has no adapters to save")
    if not leads():
        return
    if model.lm_head is None and EMBED in factors:
        factors[HEAD] = factors[EMBED]
    tensors, kinds = _spell(factors)
    matrices = {name.removesuffix(".weight") for leaf in table(strip(model)) for _, name in leaf.parts()}
    matrices = {re.sub(r"(\.experts)\..*", r"\1", name) for name in matrices | {HEAD.removesuffix(".weight")}}
    layers = Counter("experts" if name.endswith(".experts") else unnumbered(name) for name in matrices)
    kinds = _shared(kinds, layers)
    power = 0.5 if rslora else 1.0
    alphas = {name: scale * rank**power for name, (rank, scale) in kinds.items()}
    alphas = {name: int(alpha) if alpha == int(alpha) else alpha for name, alpha in alphas.items()}
    rank = Counter(rank for rank, _ in kinds.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    parameters = sorted(name for name in kinds if ".experts." in name or name.endswith(".weight"))
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0 if parameters else dropout,  # of parameters PEFT knows none
        "use_rslora": rslora,
        "target_modules": sorted(kinds.keys() - set(parameters)),
        "target_parameters": parameters,
        "rank_pattern": {name: own for name, (own, _) in kinds.items() if own != rank},
        "alpha_pattern": {name: own for name, own in alphas.items() if own != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    specs = {f"{_PREFIX}{name}": kind_spec(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    with new_file(folder / WEIGHTS) as partial:
        layout = lay_out_file(partial, specs, {"format": "pt"} | ({_BASE: fingerprint} if fingerprint else {}))
        layout.create()
        for name, tensor in tensors.items():
            write(layout.tensors[f"{_PREFIX}{name}"], tensor)
    with new_file(folder / CONFIG) as partial:
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


# --- read -------------------------------------------------------------------------------------------------------------


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    return (folder / CONFIG).is_file() and not any((folder / name).is_file() for name in (SINGLE, INDEX))


def base_fingerprint(folder: Path) -> str:
    """The fingerprint of the weights that an adapter was trained on, empty if its file does not say."""
    return read_header(folder / WEIGHTS)[1].get(_BASE, "")


def _by_pattern(patterns: Any, name: str, default: Any) -> Any:
    """The entry of the first pattern that a name ends in."""
    return next((value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name)), default)


class _Settings(NamedTuple):
    file: Path
    values: dict[str, Any]

    def rank(self, name: str) -> int:
        return int(_by_pattern(self.values.get("rank_pattern"), name, self.values.get("r", 8)))

    def scale(self, name: str, rank: int) -> float:
        """Of a module's or parameter's; a module may have been a target by its parameter's name."""
        alpha = self.values.get("lora_alpha", 8)
        for spelt in (name, f"{name}.weight"):
            alpha = _by_pattern(self.values.get("alpha_pattern"), spelt, alpha)
        return float(alpha) / (rank**0.5 if self.values.get("use_rslora") else rank)


def _settings(folder: Path) -> _Settings:
    file = folder / CONFIG
    require(file.is_file(), f"{folder} holds no adapter; needed: {CONFIG} and {WEIGHTS}")
    values = read_json(file)
    for name, allowed in _PLAIN.items():
        given = values.get(name, allowed[0])
        require(given in allowed, f"{file}: {name} is {given!r}; allowed: {', '.join(map(repr, allowed))}")
    patterns = {name: values.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    for name, given in patterns.items():
        require(isinstance(given, dict), f"{file}: {name} is {given!r}; it must be an object of patterns")
        for pattern in given:
            try:
                re.compile(pattern)
            except re.error as error:
                raise InputError(f"{file}: {name} has {pattern!r}, which is no pattern ({error})") from error
    for rank in (values.get("r", 8), *patterns["rank_pattern"].values()):
        require(type(rank) is int and rank > 0, f"{file}: a rank is {rank!r}; it must be a whole number above 0")
    for alpha in (values.get("lora_alpha", 8), *patterns["alpha_pattern"].values()):
        number = type(alpha) in (int, float) and math.isfinite(alpha)
        require(number, f"{file}: an alpha is {alpha!r}; it must be a finite number")
    targets = values.get("target_parameters") or []
    listed = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    require(listed, f"{file}: target_parameters is {targets!r}; it must be a list of names")
    return _Settings(file, values)


def _pairs(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """A and B, float32, by module."""
    pairs: dict[str, dict[str, np.ndarray]] = {}
    pattern = re.compile(rf"{re.escape(_PREFIX)}(.+)\.(?:lora_(A|B)\.weight|lora_embedding_(A|B))")
    tensors, _ = read_header(folder / WEIGHTS)
    for name, stored in tensors.items():
        match = pattern.fullmatch(name)
        own = name.endswith(("embed_tokens.base_layer.weight", "lm_head.base_layer.weight"))
        require(not own, f"{stored.file}: tensor {name} is a table of the base's; save without save_embedding_layers")
        if match is None:
            raise InputError(f"{stored.file}: tensor {name} is no part of a LoRA adapter that is understood here")
        require(stored.kind in FLOATS, f"{stored.file}: tensor {name} is of dtype {stored.kind}; allowed: floats")
        require(len(stored.shape) == 2, f"{stored.file}: tensor {name} is {stored.shape}; it must have two axes")
        array = np.empty(stored.shape, np.float32)
        read(stored, array)
        pairs.setdefault(match[1], {})[match[2] or match[3]] = array
    for module, pair in pairs.items():
        require(len(pair) == 2, f"{folder / WEIGHTS}: {module} has one of A and B alone; both are needed")
    return pairs


def _unfuse(stack: _Stack, module: str, parameter: str) -> dict[str, Factors]:
    """A layer's fused factors as those of each expert's projections; ranks that a half has no use for are left out."""
    halves = {"down_proj": stack.B}
    if parameter == "gate_up_proj":
        width = stack.B.shape[1] // 2
        halves = {"gate_proj": stack.B[:, :width], "up_proj": stack.B[:, width:]}
    found = {}
    for projection, B in halves.items():
        used = B.any(axis=(0, 1))
        used = used if parameter == "gate_up_proj" and stack.B.any() else np.ones_like(used)
        if used.any():
            for expert, (own_A, own_B) in enumerate(zip(stack.A[:, used], B[:, :, used], strict=True)):
                found[f"{module}.{expert}.{projection}.weight"] = Factors(own_A, own_B, stack.scale)
    return found


def _parameter(settings: _Settings, module: str) -> tuple[str, str]:
    """Which fused parameter a module's factors are of, and the module that holds it."""
    inner = module.endswith(".base_layer")
    module = module.removesuffix(".base_layer")
    targets = settings.values.get("target_parameters") or ()
    named = [
        name
        for name in ("gate_up_proj", "down_proj")
        if any(f".{module}.{name}".endswith(f".{target}") for target in targets)
    ]
    require(
        bool(named) and len(named) > inner,
        f"{settings.file}: target_parameters do not say which parameters of {module} are adapted; "
        f"allowed: mlp.experts.gate_up_proj, mlp.experts.down_proj",
    )
    return module, named[0] if inner else named[-1]


def read_adapter(folder: str | Path) -> dict[str, Factors]:
    """The updates of a PEFT folder, by published tensor; float32.

    Raises `InputError` for a folder that is damaged, for settings that mean something else than plain LoRA, and for
    tensors whose shapes do not belong together; each by name.
    """
    folder = Path(folder)
    settings, found = _settings(folder), dict[str, Factors]()
    for place, pair in _pairs(folder).items():
        A, B = pair["A"], pair["B"]
        wrong = f"{folder / WEIGHTS}: {place}: A is {A.shape} and B {B.shape}"
        require(A.shape[0] == B.shape[1], f"{wrong}; the rank must be the same")
        if re.search(r"\.experts(\.base_layer)?$", place):
            module, parameter = _parameter(settings, place)
            rank = settings.rank(f"{module}.{parameter}")
            require(len(A) % rank == 0, f"{wrong}, which ranks of {rank} do not divide")
            fused = B.reshape(len(B), rank, -1).transpose(2, 0, 1)
            scale = settings.scale(f"{module}.{parameter}", rank)
            found |= _unfuse(_Stack(A.reshape(-1, rank, A.shape[1]), fused, scale), module, parameter)
            continue
        name = f"{place}.weight"
        scale = settings.scale(place, len(A))
        found[name] = Factors(B.T, A.T, scale) if name == EMBED else Factors(A, B, scale)
    require(bool(found), f"{folder / WEIGHTS} holds no tensor")
    return found
