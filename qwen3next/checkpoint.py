"""Anything that can be decoded from: a run's folder or a Hugging Face folder."""

from pathlib import Path
from typing import NamedTuple

from qwen3next.config import Compute
from qwen3next.errors import require
from qwen3next.hf import load_pretrained
from qwen3next.hf_config import read_end_of_text
from qwen3next.model import Qwen3Next
from qwen3next.run_folder import CONFIG, TOKENIZER, is_run, load_run
from qwen3next.tokenizer import Tokenizer, load_tokenizer


class Checkpoint(NamedTuple):
    """A model, its tokenizer (`None` if the folder has none), the ids that end a text, and how the model computes."""

    model: Qwen3Next
    tokenizer: Tokenizer | None
    end_of_text: tuple[int, ...]
    compute: Compute


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads either kind of folder; `InputError` if it is neither or damaged."""
    require(folder.is_dir(), f"{folder} is not a folder; allowed: a run of train.py or a Hugging Face folder")
    if is_run(folder):
        config, model = load_run(folder)
        tokenizer = load_tokenizer(config.data.tokenizer)
        return Checkpoint(model, tokenizer, (tokenizer.end_of_text,), config.compute)
    require((folder / "config.json").is_file(), f"{folder} holds no checkpoint; needed: {CONFIG} or config.json")
    ends = read_end_of_text(folder)
    model, path = load_pretrained(folder), folder / TOKENIZER
    tokenizer = load_tokenizer(str(path), ends[0] if ends else None) if path.is_file() else None
    ends = ends or ((tokenizer.end_of_text,) if tokenizer else ())
    return Checkpoint(model, tokenizer, ends, Compute(dtype=model.config.dtype))
