"""A run's sources: what is told of them, and what their fingerprint depends on."""

import pytest

from qwen3next.config import DataConfig
from qwen3next.data.packing import Rows
from qwen3next.data.texts import bytes_per_label, held_out_text, read_texts, text_fingerprint
from qwen3next.errors import InputError
from qwen3next.tokenizer import ByteTokenizer


def _config(size=4, **changes):
    return DataConfig(sequence_length=size, batch_size=3, **changes)


def test_texts_are_told_and_fingerprinted(tmp_path):
    for name, size in (("a", 300), ("b", 200)):
        (tmp_path / name).mkdir()
        for number in range(10):
            (tmp_path / name / f"{number}.txt").write_text(f"{name}{number}" * (size // 10))
    (tmp_path / "a" / "empty").touch()
    a, b = (str(tmp_path / name) for name in "ab")

    def read(source, **changes):
        return read_texts(_config(16, held_out=0.2, source=source, **changes), ByteTokenizer(), 257, 0)

    (one,) = read((a,))
    assert list(one.describe()) == [
        f"train on {a}: 8 documents, 480 bytes, 488 tokens; 31 rows of 16, 98.39% of them real; 8 documents cut, "
        "0 dropped",
        f"held out {a}: 2 documents, 120 bytes, 122 tokens; 8 rows of 16, 95.31% of them real; 2 documents cut, "
        "0 dropped",
        f"left out of {a}: 1 empty",
    ]
    assert len(one.held_out_text) == 120
    (tmp_path / "a" / "short.txt").write_text("short")
    (dropped,) = read((a,), packing="best_fit", long_documents="drop")
    assert ", 8 dropped (488 tokens lost)" in next(iter(dropped.describe()))
    assert dropped.train.facts.tokens == 6
    assert dropped.held_out.facts.dropped == 0  # what is measured is the whole
    sources = [(a,), (b,), (f"{a}=1", f"{b}=1"), (f"{a}=2", f"{b}=2"), (f"{a}=2", f"{b}=1"), (f"{b}=1", f"{a}=1")]
    prints = [text_fingerprint(read(source)) for source in sources]
    assert prints[2] == prints[3] and len(set(prints)) == 5
    assert text_fingerprint([one]) != text_fingerprint([dropped])
    both = read((f"{a}=1", f"{b}=1"))
    labels = sum(int((row["labels"] >= 0).sum()) for text in both for row in map(text.held_out.__getitem__, range(3)))
    assert labels == 96 and bytes_per_label(both) == (120 + 80) / (122 + 82)
    assert held_out_text(both) == both[0].held_out_text + both[1].held_out_text
    (packed,) = read((a,), packing="best_fit")
    assert packed.held_out.fingerprint == Rows(packed.held_out.corpus, 16, "best_fit").fingerprint


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_outside_uint32_is_refused(seed):
    with pytest.raises(InputError, match=r"seed: .*from 0 to 4294967295"):
        read_texts(_config(), ByteTokenizer(), 257, seed)


def _records(path, prompt, completion, count=20):
    path.write_text("".join(f'{{"prompt": "{prompt}", "text": "{completion}"}}\n' for _ in range(count)))
    return (str(path),)


def test_a_text_of_which_nothing_is_left_to_learn_is_refused(tmp_path):
    source = _records(tmp_path / "a.jsonl", "p" * 60, "abc")

    def read(**changes):
        config = _config(16, source=source, prompt_field="prompt", held_out=0.2, packing="none", **changes)
        return read_texts(config, ByteTokenizer(), 257, 0)

    with pytest.raises(InputError, match=r"no token of .*a\.jsonl is left to learn"):
        read(long_documents="truncate")
    with pytest.raises(
        InputError, match=r"data\.long_documents drop leaves nothing of .*a\.jsonl: each .* 16; allowed"
    ):
        read(long_documents="drop")
    (text,) = read()
    assert next(iter(text.describe())).endswith("0 dropped; 6.25% of tokens learnt")  # 4 of 64
