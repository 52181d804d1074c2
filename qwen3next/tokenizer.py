"""Tokenizers: raw bytes, or a Hugging Face `tokenizer.json`, behind one small class; and a streaming decoder."""

import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import SupportsIndex

import numpy as np
import tokenizers
from jaxtyping import Int, Int32

from qwen3next.errors import InputError

END_OF_TEXT_NAMES = ("<|endoftext|>", "<|im_end|>", "</s>", "<eos>")
TokenIds = Sequence[SupportsIndex] | Int[np.ndarray, " tokens"]


class Tokenizer(ABC):
    """Text to ids and back. Every id is in `range(vocab_size)`; `end_of_text` is put before and after a document."""

    vocab_size: int
    end_of_text: int
    fingerprint: str  # of what it makes of text

    @abstractmethod
    def encode(self, text: str | bytes) -> Int32[np.ndarray, " tokens"]:
        """The ids, with no special token added. `InputError` for text that this tokenizer cannot read."""

    def encode_batch(self, texts: Sequence[bytes]) -> list[Int32[np.ndarray, " tokens"]]:
        """`encode` of each text, on all cores if the tokenizer can."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, tokens: TokenIds) -> str:
        """The text, without special tokens and ids that have no meaning; invalid bytes become U+FFFD."""

    def stream(self) -> "TextStream":
        """A new streaming decoder."""
        return TextStream(self)


class TextStream:
    """Decodes ids one at a time; the strings it returns, joined, are `tokenizer.decode` of all the ids.

    A token's text depends on its neighbours (leading spaces, split characters), so a window of ids is decoded twice:
    without and with the ids not yet printed. What the second adds is printed once it does not end inside a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._printed, self._waiting = [], []

    def push(self, token: SupportsIndex) -> str:
        """The text that `token` completes: never half a character, "" while one is incomplete."""
        self._waiting.append(operator.index(token))
        text = self._waiting_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._printed, self._waiting = self._waiting, []
        return text

    def flush(self) -> str:
        """The rest, at the end: an incomplete character becomes U+FFFD. The stream then starts anew."""
        text = self._waiting_text()
        self._printed, self._waiting = [], []
        return text

    def _waiting_text(self) -> str:
        before = self._tokenizer.decode(self._printed)
        return self._tokenizer.decode(self._printed + self._waiting)[len(before) :]


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of the text, 256 is the end of the text. Takes any bytes, UTF-8 or not."""

    vocab_size = 257
    end_of_text = 256
    fingerprint = "bytes"

    def encode(self, text: str | bytes) -> Int32[np.ndarray, " tokens"]:
        return np.frombuffer(_as_bytes(text), np.uint8).astype(np.int32)

    def decode(self, tokens: TokenIds) -> str:
        return bytes(token for token in np.asarray(tokens).tolist() if 0 <= token < 256).decode(errors="replace")


class HFTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`, without its truncation and padding. Text must be UTF-8.

    `end_of_text` is the id given, or that of the first of `END_OF_TEXT_NAMES` in the vocabulary. Raises `InputError`
    for a file that is missing or is not a tokenizer, and for an end of text that is not in the vocabulary.
    """

    def __init__(self, path: str | Path, end_of_text: int | None = None) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare `Exception`
            allowed = "give 'bytes' or the path of a Hugging Face tokenizer.json"
            raise InputError(f"data.tokenizer: cannot read {str(path)!r} ({error}); {allowed}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        if end_of_text is None:
            end_of_text = next((ids[name] for name in END_OF_TEXT_NAMES if name in ids), None)
        if end_of_text is None or not 0 <= end_of_text < self.vocab_size:
            allowed = f"one of {', '.join(END_OF_TEXT_NAMES)}, or an id below {self.vocab_size}"
            raise InputError(
                f"data.tokenizer: {str(path)!r} has no end of text (id {end_of_text}); it must be {allowed}"
            )
        self.end_of_text = end_of_text
        self.fingerprint = hashlib.sha256(Path(path).read_bytes()).hexdigest()

    def encode(self, text: str | bytes) -> Int32[np.ndarray, " tokens"]:
        return np.array(self._tokenizer.encode(_as_utf8(text), add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[bytes]) -> list[Int32[np.ndarray, " tokens"]]:
        encoded = self._tokenizer.encode_batch_fast([_as_utf8(text) for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encoded]

    def decode(self, tokens: TokenIds) -> str:
        known = [token for token in np.asarray(tokens).tolist() if 0 <= token < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=True)


def byte_tokenizer_for_others() -> tokenizers.Tokenizer:
    """`ByteTokenizer` as a Hugging Face tokenizer of the same ids; the end of a text is the special `<|endoftext|>`.

    A text that spells the latter out gets the token, as with any Hugging Face tokenizer: that is the one difference.
    Byte-level tokenizers write a byte as a printable letter: itself, or for the 68 others one from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT_NAMES[0]])
    return tokenizer


def load_tokenizer(spec: str, end_of_text: int | None = None) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `bytes`, or the path of a `tokenizer.json`. Raises `InputError`."""
    if spec != "bytes":
        return HFTokenizer(spec, end_of_text)
    if end_of_text not in (None, ByteTokenizer.end_of_text):
        raise InputError(
            f"data.tokenizer: the end of text of 'bytes' is {ByteTokenizer.end_of_text}, not {end_of_text}"
        )
    return ByteTokenizer()


def _as_utf8(text: str | bytes) -> str:
    try:
        return _as_bytes(text).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"text is not UTF-8 at byte {error.start}; this tokenizer needs UTF-8") from error


def _as_bytes(text: str | bytes) -> bytes:
    """UTF-8; bytes that came through the command line as surrogate escapes are themselves again."""
    try:
        return text if isinstance(text, bytes) else text.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise InputError(f"text holds a lone surrogate at character {error.start}; give valid Unicode") from error
