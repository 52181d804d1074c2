"""What `speed.py` compares: blocks of contestants that take turns, and what each of them is told to do."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from turns import Facts

from qwen3next.config import ModelConfig, TrainConfig
from qwen3next.hf_config import config_values

HERE = Path(__file__).resolve().parent
OURS, PEERS, STARTS = (HERE / name for name in ("contestants.py", "peers.py", "starts.py"))
Side = Literal["ours", "peer", "bound"]

_CHECKPOINT_BYTES, _CHECKPOINT_EXPERTS = 400e6, 64
_PUBLISHED = {"key_heads": 16, "value_heads": 32, "size": 128}  # heads of the 80B model's delta rule
_SMALL = {"key_heads": 2, "value_heads": 4, "size": 64}


@dataclass(frozen=True)
class Settings:
    """What all contestants share. `folder` is a temporary one."""

    path: Path
    config: TrainConfig
    threads: int
    peer_python: str
    folder: Path


@dataclass(frozen=True)
class Contestant:
    """A row: a script, and the specification that it is run with. `tokens` are those of a repetition.

    `goal`: as many times as fast as the fastest peer it should be.
    """

    name: str
    side: Side
    script: Path
    spec: Facts
    tokens: int = 0
    goal: float | None = None


@dataclass(frozen=True)
class Block:
    """Contestants that take turns. A repetition is `steps` steps. `before` has to end before they start."""

    item: str
    title: str
    contestants: list[Contestant]
    steps: int = 1
    before: list[Contestant] = field(default_factory=list)


@dataclass(frozen=True)
class _Job:
    """Makes the contestants of one job."""

    settings: Settings
    job: str
    tokens: int
    shape: Facts

    def _spec(self, **more: Any) -> Facts:
        return {"job": self.job, **self.shape, **more}

    def ours(
        self, name: str, variant: str = "", side: Side = "ours", goal: float | None = None, **more: Any
    ) -> Contestant:
        spec = self._spec(config=str(self.settings.path), variant=variant, **more)
        return Contestant(name, side, OURS, spec, self.tokens, goal)

    def products(self) -> Contestant:
        return self.ours("bare products", "products", "bound")

    def peer(self, experts: str = "", compiled: bool = False, name: str = "", **more: Any) -> Contestant:
        shown = ", ".join(filter(None, ["transformers", experts, name, "compiled" if compiled else ""]))
        model = config_values(self.settings.config.model)
        more |= {"experts": experts or "eager", "compile": compiled, "threads": self.settings.threads, "model": model}
        return Contestant(shown, "peer", PEERS, self._spec(**more), self.tokens)


def _train_job(settings: Settings) -> _Job:
    data = settings.config.data
    shape = {"rows": data.batch_size, "length": data.sequence_length}
    return _Job(settings, "train", data.batch_size * data.sequence_length, shape)


def _train_peer(settings: Settings, experts: str, compiled: bool = False, **more: Any) -> Contestant:
    c = settings.config.optimizer
    adam = {"lr": c.learning_rate, "betas": (c.beta1, c.beta2), "eps": c.epsilon, "weight_decay": c.weight_decay}
    return _train_job(settings).peer(experts, compiled, optimizer=adam, **more)


def train(settings: Settings) -> list[Block]:
    """An optimizer step of the config's batch."""
    job = _train_job(settings)
    contestants = [
        job.ours("remat layer, scanned", "layer", goal=1.2),
        job.ours("remat none, scanned", "none", goal=1.5),
        job.ours("remat none, unrolled", "none", goal=1.5, unroll=True),
        job.ours("remat layer, unrolled", "layer", goal=1.2, unroll=True),
        *(_train_peer(settings, experts, on) for on in (False, True) for experts in ("eager", "grouped_mm")),
        job.products(),
    ]
    return [Block("train", f"train: a step of {job.shape['rows']} x {job.shape['length']} tokens", contestants)]


def prefill(settings: Settings) -> list[Block]:
    """A prompt of one row."""
    blocks = []
    for length in (1024, 8192):
        job = _Job(settings, "prefill", length, {"rows": 1, "length": length})
        peers = [job.peer("eager"), job.peer("grouped_mm")]
        if length == 1024:  # torch writes the chunks out: a long row takes more than five minutes to compile
            peers.append(job.peer("grouped_mm", compiled=True))
        blocks.append(Block("prefill", f"prefill: 1 x {length} tokens", [job.ours("generate", goal=1.5), *peers]))
    return blocks


def decode(settings: Settings) -> list[Block]:
    """256 tokens after a prompt of 64, and after longer ones."""
    blocks, new = list[Block](), 256
    for rows in (1, 8):
        job = _Job(settings, "decode", rows * (new - 1), {"rows": rows, "length": 64, "new": new})
        peers = [
            job.peer("eager"),
            job.peer("grouped_mm"),
            job.peer("grouped_mm", compiled=True, name="static cache"),
            job.peer("batched_mm", compiled=True, name="static cache"),
        ]
        contestants = [job.ours("generate", goal=4), *peers, job.ours("weights read once", "weights", "bound")]
        title = f"decode: {rows} x {new - 1} tokens, after a prompt of 64"
        blocks.append(Block("decode", title, contestants, steps=new - 1))
    after = []
    for length in (64, 1024, 8192):
        job = _Job(settings, "decode", new - 1, {"rows": 1, "length": length, "new": new})
        after.append(job.ours(f"generate, after {length}"))
    weights = job.ours("weights read once", "weights", "bound")
    title = f"decode: 1 x {new - 1} tokens, by the prompt's length"
    return [*blocks, Block("decode", title, [*after, weights], steps=new - 1)]


def delta(settings: Settings) -> list[Block]:
    """The gated delta rule at the published heads, and at growing lengths."""
    job = _Job(settings, "delta", 2048, {"length": 2048, **_PUBLISHED})
    heads = "16 and 32 heads of 128"
    against = Block(
        "delta",
        f"delta: 1 x 2048, {heads}, with gradients",
        [job.ours("gated_delta_rule", goal=2), job.peer(name="torch_chunk_gated_delta_rule"), job.products()],
    )
    grown = [
        _Job(settings, "delta", length, {"length": length, **_SMALL}).ours(f"length {length:,}")
        for length in (1024, 4096, 16384, 65536)
    ]
    title = "delta: by length, 2 and 4 heads of 64, with gradients"
    return [against, Block("delta", title, grown)]


def experts(settings: Settings) -> list[Block]:
    """The mixture of experts of one layer."""
    tokens, c = 2048, settings.config.model
    job = _Job(settings, "experts", tokens, {"tokens": tokens})
    peers = [job.peer(how, compiled) for compiled in (False, True) for how in ("eager", "grouped_mm")]
    title = f"experts: {c.num_experts_per_tok} of {c.num_experts} and the shared one, with gradients"
    return [Block("experts", title, [job.ours("MoE"), *peers, job.products()])]


def _large(config: ModelConfig) -> Facts:
    """Changes after which the experts' weights are of the size that is wanted, in float32."""
    width = _CHECKPOINT_BYTES / (4 * config.num_hidden_layers * _CHECKPOINT_EXPERTS * 3 * config.hidden_size)
    return {"num_experts": _CHECKPOINT_EXPERTS, "moe_intermediate_size": max(round(width / 64), 1) * 64}


def load(settings: Settings) -> list[Block]:
    """Reading a checkpoint that lies in the page cache."""
    job = _Job(settings, "load", 0, {"folder": str(settings.folder / "checkpoint")})
    write = job.ours("save_pretrained", "write", model=_large(settings.config.model), warmups=0)
    contestants = [job.ours("load_pretrained"), job.peer(name="from_pretrained")]
    title = f"load: {_CHECKPOINT_BYTES / 1e6:.0f} MB of experts, and the rest"
    return [Block("load", title, contestants, before=[write])]


def start(settings: Settings) -> list[Block]:
    """From the start of a process to the end of its first training step."""
    programs = settings.folder / "programs"
    command = [sys.executable, HERE.parent / "train.py", settings.path, "--run.folder", "FOLDER", "--run.wandb", "off"]
    ours = {"command": [*map(str, command)], "until": "first step after", "warmups": 1}
    eager = _train_peer(settings, "eager")
    peer = [settings.peer_python, str(PEERS), json.dumps(eager.spec | {"warmups": 1})]
    theirs = {"command": peer, "until": '"ready"', "warmups": 1, "programs": None}
    contestants = [
        Contestant("train.py, nothing compiled yet", "ours", STARTS, ours | {"programs": "new"}),
        Contestant("train.py, programs kept", "ours", STARTS, ours | {"programs": str(programs)}),
        Contestant("transformers, eager", "peer", STARTS, theirs),
    ]
    return [Block("start", "start: of a process, until its first step has ended", contestants)]


ITEMS: dict[str, Callable[[Settings], list[Block]]] = {
    item.__name__: item for item in (train, prefill, decode, delta, experts, load, start)
}
