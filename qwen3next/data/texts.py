"""A run's text: each source read, split into what is trained on and what is held out, and planned as rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qwen3next.config import DataConfig
from qwen3next.data.corpus import tokenize
from qwen3next.data.documents import LeftOut, draw_held_out, read_documents, split_documents
from qwen3next.data.packing import Rows
from qwen3next.data.token_files import read_token_files, token_files
from qwen3next.errors import require
from qwen3next.tokenizer import Tokenizer

_LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Text:
    """One source: what is trained on, its weight (the smallest of all is 100), what is held out, as text if it is."""

    name: str
    weight: int
    train: Rows
    held_out: Rows
    held_out_text: bytes | None
    left_out: LeftOut

    def describe(self) -> Iterator[str]:
        """What there is on each side, and what became of it, in lines."""
        for side, rows in (("train on", self.train), ("held out", self.held_out)):
            corpus, facts = rows.corpus, rows.facts
            said = "" if corpus.text_bytes is None else f"{int(corpus.text_bytes.sum()):,} bytes, "
            line = f"{side} {self.name}: {facts.documents:,} documents, {said}{int(corpus.lengths.sum()):,} tokens; "
            line += f"{len(rows):,} rows of {rows.sequence_length}, {facts.share:.2%} of them real; "
            line += f"{facts.cut:,} documents cut, {facts.dropped:,} dropped"
            line += f" ({facts.lost_tokens:,} tokens lost)" if facts.lost_tokens else ""
            yield line + (
                f"; {rows.predictions / facts.tokens:.2%} of tokens learnt" if corpus.learnt is not None else ""
            )
        if self.left_out.counts:
            yield f"left out of {self.name}: {self.left_out}"


def read_texts(config: DataConfig, tokenizer: Tokenizer, vocab_size: int, seed: int) -> list[Text]:
    """Every source of `data.source`, tokenized, split and planned.

    Raises `InputError` for what cannot be read, for an id that is not below `vocab_size`, and for a seed that is not a
    uint32.
    """
    require(0 <= seed <= _LARGEST_SEED, f"run.seed: {seed} is out of range; give an integer from 0 to {_LARGEST_SEED}")
    texts = []
    for name, weight in config.weights.items():
        left_out, held_out_text = LeftOut(config.on_error), None
        if files := token_files(name):
            whole = read_token_files(files, config, tokenizer, vocab_size, left_out)
            if len(whole) == 1:
                sides = whole.cut(config.held_out)
            else:
                sides = tuple(whole.select(numbers) for numbers in draw_held_out(len(whole), config.held_out, seed))
        else:
            documents = split_documents(list(read_documents(name, config, left_out)), config.held_out, seed)
            sides = tuple(tokenize(side, tokenizer, vocab_size, left_out) for side in documents)
            if not left_out.counts["not UTF-8"]:  # of these the tokenizer has read nothing
                held_out_text = b"".join(document.learnt_text for document in documents[1])
        train = Rows(sides[0], config.sequence_length, config.packing, config.long_documents)
        held_out = Rows(sides[1], config.sequence_length, config.packing)  # whole, whatever is dropped in training
        require(
            train.facts.dropped < train.facts.documents,
            f"data.long_documents drop leaves nothing of {name}: each document is longer than data.sequence_length, "
            f"{config.sequence_length}; allowed: split, truncate, or longer rows",
        )
        for rows in (train, held_out):
            require(rows.predictions > 0, f"data.source: no token of {name} is left to learn; give longer rows or text")
        texts.append(Text(name, weight, train, held_out, held_out_text, left_out))
    return texts


def text_fingerprint(texts: Sequence[Text]) -> str:
    """Of all rows, trained on and held out, and of how sources are mixed."""
    return ", ".join(f"{text.weight} {text.train.fingerprint} {text.held_out.fingerprint}" for text in texts)


def bytes_per_label(texts: Sequence[Text]) -> float | None:
    """Bytes of the held-out text for each of its labels; `None` if they are unknown."""
    sources = [text.held_out for text in texts]
    known = [int(rows.corpus.text_bytes.sum()) for rows in sources if rows.corpus.text_bytes is not None]
    return sum(known) / sum(rows.predictions for rows in sources) if len(known) == len(sources) else None


def held_out_text(texts: Sequence[Text]) -> bytes | None:
    """All that is held out, one after another; `None` if some of it is no text."""
    known = [text.held_out_text for text in texts if text.held_out_text is not None]
    return b"".join(known) if len(known) == len(texts) else None
