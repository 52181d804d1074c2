"""Tokenizers: ids, round trips, what is refused, and streaming that adds up to `decode`."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from qwen3next.errors import InputError
from qwen3next.tokenizer import ByteTokenizer, HFTokenizer, load_tokenizer

TEXT = "héllo wörld €5 — 日本語 🙂 def f(x):\n    return x\n"


def _save(path, model, trainer, decoder, pre_tokenizer, change=None):
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.save(str(path))
    if change is not None:
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))
    return str(path)


def _byte_level(path, special_tokens=("<|endoftext|>",), change=None):
    """A byte-level BPE, as Qwen has, with 20 merges."""
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + len(special_tokens) + 20,
        special_tokens=list(special_tokens),
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    return _save(path, tokenizers.models.BPE(), trainer, tokenizers.decoders.ByteLevel(), level, change)


def _byte_fallback(path):
    """A BPE of words with leading spaces and `<0xE2>` tokens for unknown characters, as Llama has."""
    names = ["</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    model = tokenizers.models.BPE(byte_fallback=True, unk_token="</s>")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=["</s>"], show_progress=False, limit_alphabet=30
    )

    def add_bytes(config):
        vocabulary = list(config["model"]["vocab"])
        config["model"]["vocab"] = {name: number for number, name in enumerate(names + vocabulary[1:])}

    decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _save(path, model, trainer, decoder, tokenizers.pre_tokenizers.Metaspace(), add_bytes)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return HFTokenizer(_byte_level(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


def _streamed(tokenizer, tokens):
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokens]
    return pieces, "".join(pieces) + stream.flush()


def test_bytes_ids():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    tokens = tokenizer.encode("aé")
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.encode(b"\xff\x00").tolist() == [255, 0]
    assert tokenizer.encode("").shape == (0,)


def test_bytes_decode_drops_the_end_and_replaces_invalid_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([256, 97, 256, 0xC3, 0xA9, 0xFF, 256, 900, -1]) == "aé\ufffd"
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_bytes_from_the_command_line_survive():
    assert ByteTokenizer().encode(b"a\xff".decode(errors="surrogateescape")).tolist() == [97, 255]


def test_streaming_never_prints_half_a_character():
    pieces, whole = _streamed(ByteTokenizer(), "a€b".encode())
    assert pieces == ["a", "", "", "€", "b"]
    assert whole == "a€b"


def test_a_stream_starts_anew_after_flush():
    stream = ByteTokenizer().stream()
    assert [stream.push(0xE2), stream.flush(), stream.flush(), stream.push(97)] == ["", "\ufffd", "", "a"]


@given(st.lists(st.integers(0, 256) | st.sampled_from([0xC3, 0xA9, 0xE2, 0x82, 0xAC, 97, 256]), max_size=30))
def test_bytes_streaming_adds_up(tokens):
    assert _streamed(ByteTokenizer(), tokens)[1] == ByteTokenizer().decode(tokens)


@given(st.text(max_size=30) | st.just(TEXT))
def test_byte_level_round_trip(byte_level, text):
    tokens = byte_level.encode(text)
    assert tokens.dtype == np.int32
    assert byte_level.decode(tokens) == text
    assert byte_level.encode(text.encode()).tolist() == tokens.tolist()
    assert _streamed(byte_level, tokens)[1] == text


@given(st.lists(st.integers(0, 280), max_size=30))
def test_byte_level_streaming_adds_up_for_any_ids(byte_level, tokens):
    assert _streamed(byte_level, tokens)[1] == byte_level.decode(tokens)


def test_byte_level_streaming_prints_whole_characters_as_they_come(byte_level):
    pieces, whole = _streamed(byte_level, byte_level.encode(TEXT))
    assert whole == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(piece != "" for piece in pieces) > 20


def test_byte_fallback_streaming_adds_up(tmp_path):
    tokenizer = HFTokenizer(_byte_fallback(tmp_path / "tokenizer.json"))
    assert tokenizer.end_of_text == 0
    tokens = tokenizer.encode("héllo 🦊 wörld ☃")
    assert len(set(tokens.tolist()) & set(range(1, 257))) >= 4, "no byte tokens: the test tests nothing"
    pieces, whole = _streamed(tokenizer, tokens)
    assert whole == tokenizer.decode(tokens) == "héllo 🦊 wörld ☃"
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_are_neither_added_nor_decoded(tmp_path):
    def add_template(config):
        ids = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
        begin, text = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        config["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": ids,
        }

    path = _byte_level(tmp_path / "tokenizer.json", change=add_template)
    assert tokenizers.Tokenizer.from_file(path).encode("ab").ids[0] == 0
    tokenizer = HFTokenizer(path)
    assert 0 not in tokenizer.encode("ab")
    assert tokenizer.decode([0, *tokenizer.encode("ab"), 0, 99999, -1]) == "ab"


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    def cut_and_pad(config):
        config["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        config["padding"] = {
            "strategy": {"Fixed": 50},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }

    path = _byte_level(tmp_path / "tokenizer.json", change=cut_and_pad)
    assert len(tokenizers.Tokenizer.from_file(path).encode("0123456789").ids) == 50
    assert len(HFTokenizer(path).encode("0123456789")) == 10


def test_end_of_text_and_vocabulary(tmp_path):
    path = _byte_level(tmp_path / "tokenizer.json", ["<eos>", "<|im_end|>", "</s>"])
    tokenizer = load_tokenizer(path)
    assert tokenizer.end_of_text == 1, "the names have an order: <|im_end|> comes before </s> and <eos>"
    assert tokenizer.vocab_size == 256 + 3 + 20
    assert load_tokenizer(path, end_of_text=0).end_of_text == 0


def test_vocabulary_counts_past_gaps(tmp_path):
    def leave_a_gap(config):
        config["model"]["vocab"]["far"] = 1000

    assert HFTokenizer(_byte_level(tmp_path / "tokenizer.json", change=leave_a_gap)).vocab_size == 1001


@pytest.mark.parametrize("end_of_text", [None, -1, 10_000])
def test_no_end_of_text_is_refused(tmp_path, end_of_text):
    path = _byte_level(tmp_path / "tokenizer.json", [])
    with pytest.raises(InputError, match=r"tokenizer.json.*end of text.*<\|endoftext\|>.*below 276"):
        load_tokenizer(path, end_of_text)


def test_another_end_of_text_for_bytes_is_refused():
    assert load_tokenizer("bytes", 256).end_of_text == 256
    with pytest.raises(InputError, match="256, not 0"):
        load_tokenizer("bytes", 0)


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", "not json", '{"model": {"type": "BPE"}}'])
def test_not_a_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=r"data\.tokenizer: cannot read '.*tokenizer\.json'.*'bytes'") as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        load_tokenizer(str(tmp_path))


def test_text_that_cannot_be_read_is_refused(byte_level):
    with pytest.raises(InputError, match="not UTF-8 at byte 1"):
        byte_level.encode(b"a\xff")
    for tokenizer in (byte_level, ByteTokenizer()):
        with pytest.raises(InputError, match="surrogate at character 1"):
            tokenizer.encode("a\ud800")
