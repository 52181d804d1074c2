"""Anything that can be decoded from: a run's folder or a Hugging Face folder."""

from pathlib import Path
from typing import NamedTuple

from qwen3next.config import Compute, ModelConfig
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


def default_compute(config: ModelConfig) -> Compute:
    """In the dtype of the parameters; float32 for float16, whose numbers are too small for activations."""
    return Compute(dtype="bfloat16" if config.dtype == "bfloat16" else "float32")


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads either kind of folder; `InputError` if it is neither or damaged.

    A run that was made from a Hugging Face folder has that one's config.json, which then says how a text ends.
    """
    require(folder.is_dir(), f"{folder} is not a folder; allowed: a run of train.py or a Hugging Face folder")
    published = (folder / "config.json").is_file()
    require(is_run(folder) or published, f"{folder} holds no checkpoint; needed: {CONFIG} or config.json")
    if is_run(folder):
        config, model = load_run(folder)
        compute = config.compute
        if not published:
            tokenizer = load_tokenizer(config.data.tokenizer)
            return Checkpoint(model, tokenizer, (tokenizer.end_of_text,), compute)
    else:
        model = load_pretrained(folder)
        compute = default_compute(model.config)
    ends, path = read_end_of_text(folder), folder / TOKENIZER
    tokenizer = load_tokenizer(str(path), ends[0] if ends else None) if path.is_file() else None
    return Checkpoint(model, tokenizer, ends or ((tokenizer.end_of_text,) if tokenizer else ()), compute)
