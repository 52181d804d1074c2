"""The other side of `speed.py`: transformers' Qwen3-Next in torch on the CPU. Runs under a Python of its own."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM, StaticCache
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock, torch_chunk_gated_delta_rule
from turns import Facts, Repetition, serve, timed

# What the key-value cache is called, in arguments and in outputs; it was renamed in the course of transformers 5.
CACHE = "cache" if "cache" in inspect.signature(Qwen3NextForCausalLM.forward).parameters else "past_key_values"


def build(spec: Facts) -> Any:
    """A random model of the config, its experts computed as `experts` says."""
    config = Qwen3NextConfig(**spec["model"])
    return Qwen3NextForCausalLM._from_config(config, dtype=torch.float32, experts_implementation=spec["experts"])


def draw_ids(spec: Facts, rows: int, length: int) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(0, spec["model"]["vocab_size"], (rows, length))


def train(spec: Facts) -> Repetition:
    """One step of AdamW."""
    model = build(spec).train()
    optimizer = torch.optim.AdamW(model.parameters(), **spec["optimizer"])
    forward = torch.compile(model) if spec["compile"] else model
    ids = draw_ids(spec, spec["rows"], spec["length"])

    def step() -> None:
        forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return lambda: timed(step)


def prefill(spec: Facts) -> Repetition:
    """A prompt up to its first token, cache filled."""
    model = build(spec).eval()
    forward = torch.compile(model) if spec["compile"] else model
    ids = draw_ids(spec, spec["rows"], spec["length"])

    def run() -> None:
        with torch.no_grad():
            forward(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)

    return lambda: timed(run)


def decode(spec: Facts) -> Repetition:
    """Greedy tokens one by one after a prompt, from the first on; compiled, with a cache of fixed size."""
    model, rows, length, steps = build(spec).eval(), spec["rows"], spec["length"], spec["new"] - 1
    forward = torch.compile(model, dynamic=False) if spec["compile"] else model
    ids = draw_ids(spec, rows, length)

    def run() -> Facts:
        with torch.no_grad():
            empty = StaticCache(config=model.config, max_cache_len=length + steps) if spec["compile"] else None
            out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE: empty})
            held = [getattr(out, CACHE), out.logits[:, -1].argmax(-1, keepdim=True)]

            def steps_alone() -> None:
                for number in range(steps):
                    positions = torch.full((rows, 1), length + number)
                    out = forward(input_ids=held[1], use_cache=True, position_ids=positions, **{CACHE: held[0]})
                    held[:] = getattr(out, CACHE), out.logits[:, -1].argmax(-1, keepdim=True)

            return timed(steps_alone)

    return run


def backward(function: Callable[..., torch.Tensor], leaves: list[torch.Tensor]) -> Repetition:
    """Gradients of the weighted sum of a function's outputs."""
    weights = torch.randn_like(function())

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        function().backward(weights)

    return lambda: timed(run)


def delta(spec: Facts) -> Repetition:
    """The gated delta rule alone, as its layer calls it: with the key heads repeated."""
    length, key_heads, value_heads, size = (spec[name] for name in ("length", "key_heads", "value_heads", "size"))
    q, k = (torch.nn.functional.normalize(torch.randn(1, length, key_heads, size), dim=-1) for _ in range(2))
    v = torch.randn(1, length, value_heads, size)
    g = -torch.nn.functional.softplus(torch.randn(1, length, value_heads))
    beta = torch.rand(1, length, value_heads)
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]

    def rule() -> torch.Tensor:
        repeats = value_heads // key_heads
        wide = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
        return torch_chunk_gated_delta_rule(*wide, v, g=g, beta=beta)[0]

    return backward(rule, leaves)


def experts(spec: Facts) -> Repetition:
    """The mixture of experts alone, forward and backward."""
    block = next(part for part in build(spec).modules() if isinstance(part, Qwen3NextSparseMoeBlock))
    x = torch.randn(1, spec["tokens"], spec["model"]["hidden_size"], requires_grad=True)
    forward = torch.compile(block) if spec["compile"] else block
    return backward(lambda: forward(x), [x, *block.parameters()])


def load(spec: Facts) -> Repetition:
    """A Hugging Face folder as a model in memory."""
    return lambda: timed(lambda: Qwen3NextForCausalLM.from_pretrained(spec["folder"], dtype=torch.float32))


JOBS = {job.__name__: job for job in (train, prefill, decode, delta, experts, load)}


def make(spec: Facts) -> Repetition:
    """The job that a specification names."""
    torch.manual_seed(0)
    torch.set_num_threads(spec["threads"])
    return JOBS[spec["job"]](spec)


if __name__ == "__main__":
    serve(make)
