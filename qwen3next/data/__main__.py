"""Text to a flat file of tokens: `python -m qwen3next.data tokenize SOURCE OUT.bin [--tokenizer FILE] [...]`.

The file can be trained on, `--data.source OUT.bin`. All cores are used; an interrupted run goes on where it stopped.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from qwen3next.config import DataConfig, OnError
from qwen3next.data.documents import LeftOut
from qwen3next.data.token_writer import write_token_file
from qwen3next.errors import Parser, exit_on_input_error
from qwen3next.tokenizer import load_tokenizer


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog="qwen3next.data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="tokenize")
    tokenize = commands.add_parser("tokenize", help="text to a .bin file")
    tokenize.add_argument("source", help="as data.source: a file, a folder, a glob, stdlib or docstrings")
    tokenize.add_argument("out", type=Path, help="the file to write, NAME.bin")
    for name in ("tokenizer", "text_field", "prompt_field", "messages_field"):
        default = getattr(DataConfig(), name)
        tokenize.add_argument(f"--{name.replace('_', '-')}", default=default, help=f"as data.{name} ({default!r})")
    tokenize.add_argument("--roles", nargs="+", default=list(DataConfig().roles), help="as data.roles (assistant)")
    tokenize.add_argument("--on-error", choices=get_args(OnError), default="fail", help="as data.on_error (fail)")
    tokenize.add_argument("--overwrite", action="store_true", help="replace the file if it is there")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """The whole command."""
    args = parse(argv)
    config = DataConfig(
        tokenizer=args.tokenizer,
        text_field=args.text_field,
        prompt_field=args.prompt_field,
        messages_field=args.messages_field,
        roles=tuple(args.roles),
        on_error=args.on_error,
    )
    facts = write_token_file(args.source, args.out, config, load_tokenizer(config.tokenizer), overwrite=args.overwrite)
    left_out = LeftOut(config.on_error)
    left_out.counts.update(facts["left_out"])
    told = f"; left out: {left_out}" if facts["left_out"] else ""
    print(f"{args.out}: {facts['documents']:,} documents, {facts['tokens']:,} tokens ({facts['dtype']}){told}")


if __name__ == "__main__":
    with exit_on_input_error():
        main(sys.argv[1:])
