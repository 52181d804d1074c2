"""Greedy decoding from a run of train.py or a Hugging Face folder.

python decode.py runs/tiny --prompt "def __init__(self"
python decode.py CHECKPOINT --prompt-ids 1,2,3 --prompt-ids 4,5 --max-new-tokens 20 --json
python decode.py BASE --adapter runs/lora --adapter ANOTHER --prompt "def mean(values):"
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO, get_args

import numpy as np

from qwen3next.adapters import read_adapter
from qwen3next.checkpoint import Checkpoint, load_checkpoint
from qwen3next.config import Dtype
from qwen3next.errors import InputError, Parser, exit_on_input_error, require
from qwen3next.factors import with_adapters
from qwen3next.generate import generate
from qwen3next.lora import adapters
from qwen3next.programs import keep_programs
from qwen3next.tokenizer import Tokenizer


def parse_ids(text: str) -> list[int]:
    """`1,2,3` as a list."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers like 1,2,3") from None


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, on which prompts of both kinds keep their order."""
    parser = Parser(prog="decode.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder: a run of train.py, or Hugging Face's")
    prompts = {"dest": "prompts", "action": "append", "default": []}
    parser.add_argument("--prompt", type=str, metavar="TEXT", help="a prompt; repeat for a batch", **prompts)
    parser.add_argument("--prompt-ids", type=parse_ids, metavar="1,2,3", help="as ids; needs no tokenizer", **prompts)
    parser.add_argument(
        "--adapter", type=Path, metavar="FOLDER", action="append", default=[], help="on the checkpoint; repeat for more"
    )
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="at most (default 100)")
    parser.add_argument(
        "--dtype", choices=get_args(Dtype), default=None, help="of the computation (default: the checkpoint's)"
    )
    parser.add_argument(
        "--compilation-cache", default="auto", metavar="auto|off|FOLDER", help="where compiled programs are kept"
    )
    parser.add_argument("--json", action="store_true", help="print a list of {prompt_ids, tokens, text} and no more")
    return parser.parse_args(argv)


def encode(prompt: str | list[int], tokenizer: Tokenizer | None) -> list[int]:
    """A prompt's ids; an empty text is the start of a document."""
    if isinstance(prompt, list):
        return prompt
    if tokenizer is None:
        raise InputError("the checkpoint has no tokenizer.json, so --prompt cannot be read; allowed: --prompt-ids")
    return tokenizer.encode(prompt).tolist() or [tokenizer.end_of_text]


class Printer:
    """Prints rows as they are made: the first row that has not ended streams, those after it wait their turn."""

    def __init__(self, prompts: list[list[int]], tokenizer: Tokenizer | None, out: TextIO):
        self._streams = [tokenizer.stream() if tokenizer else None for _ in prompts]
        self._heads = [tokenizer.decode(ids) if tokenizer else f"{','.join(map(str, ids))} ->" for ids in prompts]
        self._waiting = [""] * len(prompts)
        self._ended = [False] * len(prompts)
        self._row, self._out = -1, out

    def push(self, row: int, token: int) -> None:
        """Takes a row's next token; -1 once it has ended."""
        stream = self._streams[row]
        if token < 0 and not self._ended[row]:
            self._ended[row] = True
            self._waiting[row] += stream.flush() if stream else ""
        elif token >= 0:
            self._waiting[row] += stream.push(token) if stream else f" {token}"

    def show(self) -> None:
        """Prints what can be printed by now."""
        while self._row < len(self._streams):
            if self._row >= 0:
                print(self._waiting[self._row], end="", file=self._out, flush=True)
                self._waiting[self._row] = ""
                if not self._ended[self._row]:
                    return
                print(file=self._out)
            self._row += 1
            if self._row < len(self._streams):
                title = f"[{self._row + 1}] " if len(self._streams) > 1 else ""
                print(title + self._heads[self._row], end="", file=self._out, flush=True)


def run(checkpoint: Checkpoint, prompts: list[list[int]], args: argparse.Namespace) -> list[list[int]]:
    """Decodes all prompts together, printing unless `--json`; the tokens of each."""
    model, tokenizer, ends, compute = checkpoint
    compute = dataclasses.replace(compute, dtype=args.dtype or compute.dtype)
    printer = None if args.json else Printer(prompts, tokenizer, sys.stdout)
    made: list[list[int]] = [[] for _ in prompts]
    times = [time.perf_counter()]
    for tokens in generate(model, prompts, args.max_new_tokens, end_of_text=ends, compute=compute):
        times.append(time.perf_counter())
        for row, token in enumerate(tokens.tolist()):
            if token >= 0:
                made[row].append(token)
            if printer:
                printer.push(row, token)
        if printer:
            printer.show()
    if printer:
        for row in range(len(prompts)):
            printer.push(row, -1)
        printer.show()
    # The first token waits for the prefill's compilation and the second for the step's: they count if no others do.
    warm = min(2, len(times) - 2)
    tokens, seconds = sum(len(row[warm:]) for row in made), times[-1] - times[warm]
    since = f"from token {warm + 1} on" if warm else "compilation included"
    print(f"{tokens / seconds:.1f} tokens/s {since}; the first came after {times[1] - times[0]:.2f} s", file=sys.stderr)
    return made


def main(argv: Sequence[str]) -> None:
    """The whole command."""
    args = parse(argv)
    if not args.prompts:
        raise InputError("no prompt was given; needed: --prompt TEXT or --prompt-ids 1,2,3")
    keep_programs(args.compilation_cache)
    checkpoint = load_checkpoint(args.checkpoint)
    prompts = [encode(prompt, checkpoint.tokenizer) for prompt in args.prompts]
    models, rows = [checkpoint.model], []
    if args.adapter:
        require(not adapters(checkpoint.model), f"{args.checkpoint} has an adapter already; give its base")
        models = with_adapters(checkpoint.model, [(str(folder), read_adapter(folder)) for folder in args.adapter])
    for adapter, model in zip(args.adapter or [None], models, strict=True):
        if adapter and not args.json:
            print(f"--- {adapter}")
        made = run(checkpoint._replace(model=model), prompts, args)
        decode = checkpoint.tokenizer.decode if checkpoint.tokenizer else lambda _: None
        for ids, out in zip(prompts, made, strict=True):
            row = {"prompt_ids": ids, "tokens": out, "text": decode(np.array(out))}
            rows.append(row | ({"adapter": str(adapter)} if adapter else {}))
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    with exit_on_input_error():
        main(sys.argv[1:])
