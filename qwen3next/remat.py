"""Which activations are computed again in the backward pass and which are kept: one value, and the names it may use."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import equinox as eqx
import jax

from qwen3next.errors import InputError, require
from qwen3next.jaxprs import INTERNAL

Unit = Callable[..., Any]

WORDS = ("none", "block", "layer", "both")
MIXERS = ("linear_attention", "full_attention")
MLPS = ("moe", "dense")
POLICIES = ("nothing", "dots", "everything")

# What a layer may keep: each name stands at the line that makes its value (`checkpoint_name`).
NAMES = (
    "mixer_norm",  # layer: the normed input of the mixer, and of the MLP
    "mlp_norm",
    "qkvz_proj",  # Gated DeltaNet
    "ba_proj",
    "conv_out",
    "delta_qk",
    "delta_gates",
    "chunk_inverse",
    "chunk_states",
    "chunk_deltas",
    "delta_out",
    "gated_norm",
    "q_proj",  # gated attention
    "k_proj",
    "v_proj",
    "attention_qk",
    "attention_out",
    "mixer_out",  # either mixer
    "router_logits",  # mixture of experts
    "expert_rows",
    "expert_hidden",
    "expert_out",
    "mlp_hidden",  # dense MLP, and the shared expert
    "mlp_out",
)


def _known(what: str, given: Iterable[str], known: tuple[str, ...]) -> None:
    for word in given:
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
        hint = f", did you mean {near[0]}?" if near else ""
        require(word in known, f"compute.remat.{what} {word!r} is unknown{hint}; allowed: {', '.join(known)}")


def _parse_policy(text: str) -> tuple[list[str], list[str]] | str:
    """One of `POLICIES`, or the names to keep and the names to offload."""
    if text in POLICIES:
        return text
    lists: dict[str, list[str]] = {"names": [], "offload": []}
    for part in text.split("+"):
        kind, colon, names = part.partition(":")
        if not colon or kind not in lists:
            near = difflib.get_close_matches(text, POLICIES, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise InputError(
                f"compute.remat.policy {text!r} is unknown{hint}; allowed: {', '.join(POLICIES)}, names:A,B, "
                f"offload:A,B, or the last two joined by +"
            )
        lists[kind] += names.split(",")
    _known("policy: name", lists["names"] + lists["offload"], NAMES)
    twice = sorted(set(lists["names"]) & set(lists["offload"]))
    require(not twice, f"compute.remat: {', '.join(twice)} cannot be kept and offloaded; give one")
    return lists["names"], lists["offload"]


def _jax_policy(text: str) -> Callable[..., Any] | None:
    parsed, policies = _parse_policy(text), jax.checkpoint_policies
    if not isinstance(parsed, str):
        keep, offload = parsed
        if not offload:
            return policies.save_only_these_names(*keep)
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=keep,
            names_which_can_be_offloaded=offload,
            offload_src="device",
            offload_dst="pinned_host",
        )
    return {"nothing": None, "dots": policies.dots_saveable, "everything": policies.everything_saveable}[parsed]


def recomputed(function: Unit, *, prevent_cse: bool = True, policy: Callable[..., Any] | None = None) -> Unit:
    """`function`, whose derivative keeps its arguments and computes the rest again, whatever the placement of remat.

    For what costs less to compute than to keep: functions of each element, norms, and bodies of inner loops. A unit
    around it whose policy is `dots` or `everything` keeps what that says.
    """

    @wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(INTERNAL):
            return eqx.filter_checkpoint(function, prevent_cse=prevent_cse, policy=policy)(*args, **kwargs)

    return apply


@dataclass(frozen=True)
class Remat:
    """Where the backward pass computes activations again, and what it finds kept instead.

    `placement`: `none`; `block`, a cycle of layers is one unit; `layer`, each layer is one; `both`, a layer inside a
    cycle; or kinds joined by `+`: layers of `linear_attention` or `full_attention`, or the `moe` or `dense` MLP alone
    of layers that are no unit themselves.
    `policy`, what a unit keeps: `nothing`, `dots` (every product), `everything`, `names:a,b` of `NAMES`, `offload:a,b`
    (kept in the host's pinned memory), `names:a+offload:b`; or one for each kind of layer,
    `linear_attention=POLICY;full_attention=POLICY`. With `both` it is that of the inner unit.
    `barrier` keeps loops of one iteration in the compiled program, so that the compiler cannot merge their bodies.
    Raises `InputError` for an unknown word, naming the known ones and the nearest.
    """

    placement: str = "layer"
    policy: str = "nothing"
    barrier: bool = True

    def __post_init__(self) -> None:
        if self.placement not in WORDS:
            kinds = self.placement.split("+")
            _known("placement", kinds, (*WORDS, *MIXERS, *MLPS))
            words = [kind for kind in kinds if kind in WORDS]
            require(not words, f"compute.remat: {', '.join(words)} stands alone; only kinds are joined by +")
        by_kind = "=" in self.policy
        for kind, policy in self._policies().items():
            if by_kind:
                _known("policy: kind of layer", [kind], MIXERS)
            _parse_policy(policy)
        require(
            not (by_kind and self.placement in ("none", "block")),
            f"compute.remat: a policy by kind of layer needs units that are layers; placement is {self.placement!r}",
        )
        require(
            self.placement != "none" or self.policy == "nothing",
            f"compute.remat: placement 'none' has no unit that policy {self.policy!r} could apply to",
        )

    @classmethod
    def of(cls, text: str) -> "Remat":
        """From `PLACEMENT`, `PLACEMENT/POLICY` or `PLACEMENT/POLICY/no-barrier`."""
        placement, *rest = text.split("/")
        barrier = rest[-1:] != ["no-barrier"]
        policy = rest if barrier else rest[:-1]
        require(len(policy) < 2, f"compute.remat is {text!r}; it must be PLACEMENT, PLACEMENT/POLICY or ../no-barrier")
        return cls(placement, *policy, barrier=barrier)

    def __str__(self) -> str:
        """The shorthand that `of` reads."""
        parts = [self.placement]
        if self.policy != "nothing":
            parts.append(self.policy)
        return "/".join(parts if self.barrier else [*parts, "no-barrier"])

    def _policies(self) -> dict[str, str]:
        if "=" not in self.policy:
            return dict.fromkeys(MIXERS, self.policy)
        policies: dict[str, str] = {}
        for part in self.policy.split(";"):
            kind, _, policy = part.partition("=")
            require(kind not in policies, f"compute.remat: policy {self.policy!r} names {kind} twice")
            policies[kind] = policy
        return policies

    def jax_policy(self, mixer: str) -> Callable[..., Any] | None:
        """What units of layers with this mixer keep, as `jax.checkpoint` takes it."""
        return _jax_policy(self._policies().get(mixer, "nothing"))

    def names(self, mixer: str) -> set[str]:
        """The names that units of layers with this mixer are asked to keep or offload."""
        parsed = _parse_policy(self._policies().get(mixer, "nothing"))
        return set() if isinstance(parsed, str) else {*parsed[0], *parsed[1]}

    def _wrap(self, unit: Unit, policy: Callable[..., Any] | None, straight: bool) -> Unit:
        # In a loop nothing can be merged with the forward pass, so the barrier of `prevent_cse` buys nothing there.
        return eqx.filter_checkpoint(unit, prevent_cse=straight or not self.barrier, policy=policy)

    def wrap_block(self, unit: Unit, *, straight: bool) -> Unit:
        """A cycle, or what stands before or after the cycles, as a unit if it is one. `straight`: not in a loop."""
        if self.placement not in ("block", "both"):
            return unit
        return self._wrap(unit, None if self.placement == "both" else _jax_policy(self.policy), straight)

    def is_unit(self, mixer: str) -> bool:
        """Whether layers with this mixer are units."""
        return self.placement in ("layer", "both") or mixer in self.placement.split("+")

    def wrap_layer(self, unit: Unit, mixer: str, *, straight: bool) -> Unit:
        """A layer as a unit if it is one."""
        return self._wrap(unit, self.jax_policy(mixer), straight) if self.is_unit(mixer) else unit

    def wrap_mlp(self, unit: Unit, mixer: str, mlp: str, *, straight: bool) -> Unit:
        """The MLP of a layer as a unit, if it is one and the layer is not."""
        alone = mlp in self.placement.split("+") and not self.is_unit(mixer)
        return self._wrap(unit, self.jax_policy(mixer), straight) if alone else unit
