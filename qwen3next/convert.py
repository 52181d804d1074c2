"""From a run of train.py to a Hugging Face folder and back, and from one Hugging Face folder to another.

python -m qwen3next.convert runs/tiny exported                    # a run: a Hugging Face folder comes out
python -m qwen3next.convert CHECKPOINT runs/from_hf               # a Hugging Face folder: a run comes out
python -m qwen3next.convert CHECKPOINT smaller --to hf --dtype bfloat16 --max-shard-size 2GB
python -m qwen3next.convert CHECKPOINT runs/from_hf --dry-run     # the plan alone, from the headers

Tensors go from file to file a few megabytes at a time; memory does not grow with the model.
"""

import argparse
import collections
import dataclasses
import json
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import tokenizers

from qwen3next.adapters import is_adapter, read_adapter
from qwen3next.checkpoint import base_of, default_compute
from qwen3next.cli import dump_config, load_config
from qwen3next.config import DataConfig, RunConfig, StoredDtype, TrainConfig
from qwen3next.errors import InputError, Parser, exit_on_input_error, require
from qwen3next.factors import fitted
from qwen3next.hf import Plan, decide_tie, plan_pretrained, table, write_companions
from qwen3next.leaves import find_faults, leaf_dtype, leaves_by_path, require_no
from qwen3next.model import abstract_model
from qwen3next.progress import human_bytes, transfer
from qwen3next.run_folder import CONFIG, TOKENIZER, WEIGHTS, is_run
from qwen3next.tensor_files import FLOATS, Stored, read_header
from qwen3next.tensor_writer import (
    Layout,
    Spec,
    check_new_folder,
    copy,
    kind_spec,
    lay_out_file,
    lay_out_folder,
    new_folder,
    parse_size,
    write_index,
)
from qwen3next.tokenizer import byte_tokenizer_for_others, load_tokenizer

MTP = "mtp.safetensors"
_DTYPES = "dtypes"  # metadata of a run's weights: published tensors that had another dtype than the leaf they are in


def plan_run(folder: Path) -> tuple[Plan, dict[str, str]]:
    """What a run holds, by published names; and the dtypes that some tensors had where they came from."""
    config, file = load_config(folder / CONFIG).model, folder / WEIGHTS
    require(file.is_file(), f"{folder} holds no weights yet; needed: {WEIGHTS}")
    held, metadata = read_header(file)
    model = abstract_model(config)
    faults, leaves = find_faults(file, leaves_by_path(model), held), tuple(table(model))
    tensors = {} if faults else dict(part for leaf in leaves for part in leaf.cut(held[leaf.path]))
    extra = read_header(folder / MTP)[0] if (folder / MTP).is_file() else {}
    try:
        dtypes = dict(json.loads(metadata.get(_DTYPES, "{}")))
    except (ValueError, TypeError) as error:
        raise InputError(f"{file}: its metadata {_DTYPES!r} cannot be read ({error})") from error
    return Plan(folder, config, leaves, tensors, faults, extra), dtypes


class Target:
    """Where everything will lie in a new folder of either kind, and from where it comes."""

    def __init__(self, plan: Plan, args: argparse.Namespace, dtypes: dict[str, str]):
        self.plan, self.args = plan, args
        self.config = plan.config if args.dtype is None else dataclasses.replace(plan.config, dtype=args.dtype)
        self.mtp = plan.extra if args.keep_mtp else {}
        self._raw = {name: Spec(*stored[2:4], stored.nbytes) for name, stored in self.mtp.items()}
        self.promoted: dict[str, str] = {}
        self._leaves, self._tensors = {}, {}
        for leaf in plan.leaves:
            dtype = leaf_dtype(leaf, plan.tensors, args.dtype)
            self._leaves[leaf.path] = kind_spec(dtype, leaf.shape)
            for _, name in leaf.parts():
                kind = plan.tensors[name].kind
                self._tensors[name] = kind_spec(dtype, leaf.tensor_shape)
                if args.dtype is None:
                    kind = dtypes.get(name, kind)
                    require(kind in FLOATS, f"{plan.folder}: metadata gives tensor {name} dtype {kind}")
                    self._tensors[name] = kind_spec(FLOATS[kind], leaf.tensor_shape)
                    if kind != self._leaves[leaf.path].kind:
                        self.promoted[name] = kind

    def layouts(self, folder: Path) -> list[Layout]:
        """Of the folder's files."""
        if self.args.to == "hf":
            return [lay_out_folder(folder, self._tensors | self._raw, parse_size(self.args.max_shard_size))]
        metadata = {"format": "qwen3next"} | ({_DTYPES: json.dumps(self.promoted)} if self.promoted else {})
        own = lay_out_file(folder / WEIGHTS, self._leaves, metadata)
        return [own, lay_out_file(folder / MTP, self._raw, {"format": "pt"})] if self.mtp else [own]

    def pairs(self, layouts: list[Layout]) -> Iterator[tuple[str, Stored, Stored]]:
        """Each tensor's name, and its place in the source and in the target, in the order of the source's files."""
        held = {name: stored for layout in layouts for name, stored in layout.tensors.items()}
        places = dict(held)
        if self.args.to == "run":
            places |= dict(part for leaf in self.plan.leaves for part in leaf.cut(held[leaf.path]))
        for name, stored in sorted(self.plan.tensors.items(), key=lambda item: (item[1].file, item[1].offset)):
            yield name, stored, places[name]
        for name, stored in self.mtp.items():
            yield name, stored.raw(), held[name].raw()


def _dtypes(stored: Iterable[Stored | Spec]) -> str:
    """`BF16 12 (3.40 MB), F32 2 (64 B)`."""
    counts, sizes = collections.Counter[str](), collections.Counter[str]()
    for item in stored:
        counts[item.kind] += 1
        sizes[item.kind] += item.nbytes
    return ", ".join(f"{kind} {count:,} ({human_bytes(sizes[kind])})" for kind, count in sorted(counts.items()))


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4:,} more" if len(names) > 4 else "")


def describe(plan: Plan) -> Iterator[str]:
    """What is read, a line a fact."""
    files = {stored.file.name for stored in plan.tensors.values()}
    total = sum(stored.nbytes for stored in plan.tensors.values())
    yield f"read:     {len(plan.tensors):,} tensors, {human_bytes(total)}, {len(files)} files in {plan.folder}"
    yield f"dtypes:   {_dtypes(plan.tensors.values())}"
    if plan.head is not None:
        yield "tie:      lm_head.weight stands beside the embedding it is tied to; if they are equal it is dropped"
    for fault in plan.faults:
        yield f"fault:    {fault}"


def describe_target(target: Target) -> Iterator[str]:
    """What is written."""
    args, layouts = target.args, target.layouts(Path())
    files = [f"{file} ({human_bytes(size)})" for layout in layouts for file, (_, size) in layout.files.items()]
    held = [stored for layout in layouts for stored in layout.tensors.values()]
    total = human_bytes(sum(stored.nbytes for stored in held))
    yield f"write:    {len(held):,} tensors, {total}, {len(files)} files in {args.target}: {_some(files)}"
    yield f"dtypes:   {_dtypes(held)}" + (", decay parameters in float32" if args.dtype else "")
    if args.to == "run" and target.promoted:
        yield f"promoted: to float32, with others of their stack: {_some(target.promoted)}"
    if target.plan.extra:
        what = "kept as they are" if args.keep_mtp else "ignored (--keep-mtp keeps them)"
        yield f"mtp:      {len(target.plan.extra)} tensors {what}: {_some(target.plan.extra)}"


def _write_run_files(new: Path, target: Target) -> None:
    """What makes the folder a run: its config, with the tokenizer that came along."""
    data = DataConfig(tokenizer=TOKENIZER if (new / TOKENIZER).is_file() else "bytes")
    run = RunConfig(folder=str(target.args.target))
    config = TrainConfig(target.config, data=data, compute=default_compute(target.config), run=run)
    (new / CONFIG).write_text(dump_config(config), encoding="utf-8")


def _write_trained_tokenizer(new: Path, source: Path) -> tuple[int, ...]:
    """The tokenizer of a run that began here, as other tools read it; the ids that end a text."""
    named = load_config(source / CONFIG).data.tokenizer
    end = load_tokenizer(named if named == "bytes" else str(source / named)).end_of_text
    shared = byte_tokenizer_for_others() if named == "bytes" else tokenizers.Tokenizer.from_file(str(source / named))
    shared.save(str(new / TOKENIZER))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": shared.id_to_token(end)}
    (new / "tokenizer_config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return (end,)


def find_adapter(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """The folder with the whole model, and the one with what is to be merged into it, if there is one.

    The source may itself be a run that trained adapters, or an adapter that names its base.
    """
    source, own = args.source, is_adapter(args.source)
    if not own:
        return source, args.adapter
    require(args.adapter is None, f"{source} is an adapter itself; give its base and --adapter, or it alone")
    return base_of(source), source


def convert(args: argparse.Namespace) -> None:
    """The whole job: plan, print it, and unless it is a dry run carry it out. Raises `InputError`."""
    source, adapter = find_adapter(args)
    run = is_run(source)
    args.to = args.to or ("hf" if run or adapter else "run")
    require(not run or args.to == "hf", f"{source} is a run already; allowed: --to hf")
    there = args.target.resolve()
    for folder in (source, args.source, *([adapter] if adapter else [])):
        here = folder.resolve()
        require(there != here and there not in here.parents, f"{args.target} is or holds {folder}; give another folder")
    check_new_folder(args.target, args.overwrite)
    plan, dtypes = plan_run(source) if run else (plan_pretrained(source), {})
    if adapter and is_run(args.source):  # the run may have cast its base
        trained = load_config(args.source / CONFIG).model.dtype
        args.dtype = args.dtype or (trained if trained != plan.config.dtype else None)
    print("\n".join(describe(plan)))
    require_no(plan.faults)
    factors = read_adapter(adapter) if adapter else {}
    if factors:
        print(f"merge:    {len(factors):,} tensors with the updates of {adapter}")
    target = Target(plan, args, dtypes)
    print("\n".join(describe_target(target)), flush=True)
    if args.dry_run:
        if plan.head is None:
            fitted(factors, plan.leaves, str(adapter))
        return
    if plan.head is not None:
        plan = decide_tie(plan)
        require_no(plan.faults)
        target = Target(plan, args, dtypes)
    updates = fitted(factors, plan.leaves, str(adapter))
    total = sum(layout.nbytes for layout in target.layouts(Path()))
    with transfer("written", total, summary=True) as advance, new_folder(args.target, args.overwrite) as new:
        layouts = target.layouts(new)
        for layout in layouts:
            layout.create()
        for name, stored, place in target.pairs(layouts):
            carry = updates[name].merge if name in updates else copy
            carry(stored, place, allow_nonfinite=args.allow_nonfinite)
            advance(place.nbytes)
        # Of a run that trained adapters the run says how text was read, of any other source that itself.
        reader, ends = args.source if is_run(args.source) else source, ()
        if is_run(reader) and not (reader / "config.json").is_file():
            ends = _write_trained_tokenizer(new, reader)
        write_companions(new, source, target.config, ends, with_mtp=bool(target.mtp))
        if args.to == "hf":
            write_index(new, layouts[0])
        else:
            _write_run_files(new, target)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m qwen3next.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag: dict[str, Any] = {"action": "store_true"}
    parser.add_argument("source", type=Path, metavar="SRC", help="a run of train.py, or a Hugging Face folder")
    parser.add_argument("target", type=Path, metavar="DST", help="a new folder")
    parser.add_argument(
        "--adapter", type=Path, metavar="FOLDER", help="merge this adapter (PEFT's files) into the model"
    )
    parser.add_argument("--to", choices=("hf", "run"), help="what DST becomes (default: what SRC is not; hf if merged)")
    parser.add_argument("--dtype", choices=get_args(StoredDtype), help="cast all but decay parameters, then float32")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file's tensors (default 5GB)")
    parser.add_argument(
        "--keep-mtp", help="keep mtp.* tensors, the extra prediction head, which has no model here", **flag
    )
    parser.add_argument("--allow-nonfinite", help="take NaN and infinity too", **flag)
    parser.add_argument("--overwrite", help="replace DST, a checkpoint or run, once the new one is complete", **flag)
    parser.add_argument("--dry-run", help="print the plan and stop; no tensor is read", **flag)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """The whole command; bad input ends it with one line and status 2."""
    with exit_on_input_error():
        convert(parse(argv))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends as an error does: nothing half-made stays
    main(sys.argv[1:])
