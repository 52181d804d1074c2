"""Documents, split, rows and batches: every prediction exactly once, none across documents, all decided by the seed."""

import json
import os
import random

import grain
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from qwen3next import data
from qwen3next.config import DataConfig
from qwen3next.data import (
    IGNORED_LABEL,
    Document,
    RowSource,
    eval_batches,
    read_documents,
    split_documents,
    tokenize,
    train_batches,
)
from qwen3next.errors import InputError
from qwen3next.tokenizer import ByteTokenizer, HFTokenizer

END = ByteTokenizer.end_of_text


def _documents(lengths):
    """Documents of these lengths; no pair of neighbouring bytes is in two of them at the same place."""
    return [Document(f"d{n}", bytes((n * 7 + i * 3) % 251 for i in range(length))) for n, length in enumerate(lengths)]


def _corpus(lengths):
    return tokenize(_documents(lengths), ByteTokenizer())


def _read(source, **changes):
    return read_documents(DataConfig(source=str(source), **changes))


def _one_line(error):
    message = str(error.value)
    assert "\n" not in message
    return message


# --- Reading


def test_one_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\r\nno final newline")
    assert _read(path) == [Document(str(path), b"\xff\r\nno final newline")]


def test_a_folder_is_read_in_sorted_order_whatever_the_file_system_says(tmp_path, monkeypatch):
    names = ["b.txt", "a/z.md", "a/b/c.py", "Z", "e.jsonl", "a.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    for name in (".git/config", ".hidden", "__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("hidden")
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe")
    expected = ["Z", "a/b/c.py", "a/z.md", "a.txt", "b.txt", "e.jsonl:1"]
    documents = _read(tmp_path)
    assert [os.path.relpath(document.name, tmp_path) for document in documents] == expected

    walk, shuffle = os.walk, random.Random(0).shuffle

    def shuffled(*args, **kwargs):
        for folder, folders, files in walk(*args, **kwargs):
            shuffle(folders)
            shuffle(files)
            yield folder, folders, files

    monkeypatch.setattr(os, "walk", shuffled)
    assert all(_read(tmp_path) == documents for _ in range(5))
    assert _read(tmp_path / "a" / "**" / "*") == documents[1:3]


def test_a_glob_is_read_in_sorted_order(tmp_path):
    names = [f"{letter}.txt" for letter in "abcdefghijkl"]
    for name in [*reversed(names), "other.md"]:
        (tmp_path / name).write_text("x")
    assert [os.path.basename(document.name) for document in _read(tmp_path / "*.txt")] == names


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert len(_read(tmp_path / "a[1].txt")) == 1


def test_standard_library():
    documents = _read("stdlib")
    names = [document.name for document in documents]
    assert len(names) > 200
    assert names == sorted(set(names), key=lambda name: name.split(os.sep))
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert all(name.endswith(".py") and "-packages" not in name for name in names)
    assert all(document.text for document in documents)


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "é\\n", "n": 1}\n\n  \r\n{"text": ""}\n{"body": "x", "text": "last"}'.encode())
    assert _read(path) == [Document(f"{path}:1", "é\n".encode()), Document(f"{path}:5", b"last")]


def test_jsonl_field(tmp_path):
    path = tmp_path / "a.JSONL"
    path.write_text('{"body": "x", "text": 3}\n')
    assert _read(path, text_field="body") == [Document(f"{path}:1", b"x")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b'{"text": "\xff"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["text"]', "no string 'text'"),
        (b'"text"', "no string 'text'"),
        (b'{"txt": "a"}', "no string 'text'"),
        (b'{"text": 3}', "no string 'text'"),
        (b'{"text": null}', "no string 'text'"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(InputError, match=message) as error:
        _read(path)
    assert f"{path}:3 " in _one_line(error)


@pytest.mark.parametrize("source", ["", "missing", "missing/*.txt", "empty.txt", "folder", "pipe", "blank.jsonl", "\0"])
def test_a_source_without_text_is_refused(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(
        InputError, match=r"data\.source: no text in .*'stdlib', 'docstrings', a file, a folder"
    ) as error:
        _read(source)
    assert repr(source) in _one_line(error)


@pytest.mark.parametrize(("place", "name", "culprit"), [(data.Path, "read_bytes", "a.txt"), (os, "scandir", "locked")])
def test_what_cannot_be_read_is_named(tmp_path, monkeypatch, place, name, culprit):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "locked").mkdir()
    original = getattr(place, name)

    def refuse(path):
        if os.path.basename(path) == culprit:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(place, name, refuse)
    with pytest.raises(InputError, match=f"cannot read '.*{culprit}': Permission denied"):
        _read(tmp_path)


def test_a_name_that_is_too_long_is_refused():
    with pytest.raises(InputError, match=r"cannot read 'xxx.*: File name too long"):
        _read("x" * 5000)


# --- Splitting


def test_split_keeps_whole_documents_and_the_share():
    documents = _documents(range(1, 101))
    train, held_out = split_documents(documents, 0.1, seed=3)
    assert (len(train), len(held_out)) == (90, 10)
    assert sorted(train + held_out, key=documents.index) == documents
    assert train == sorted(train, key=documents.index)
    assert held_out == sorted(held_out, key=documents.index)
    assert held_out != documents[-10:]


def test_split_is_decided_by_the_seed():
    documents = _documents(range(1, 101))
    assert split_documents(documents, 0.1, 3) == split_documents(documents, 0.1, 3)
    assert split_documents(documents, 0.1, 3) != split_documents(documents, 0.1, 4)


@pytest.mark.parametrize("held_out", [1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("count", [2, 3, 40])
def test_split_leaves_a_document_on_each_side(held_out, count):
    train, evaluation = split_documents(_documents([3] * count), held_out, 2**32 - 1)
    assert train and evaluation and len(train) + len(evaluation) == count


@pytest.mark.parametrize(
    ("text", "held_out", "cut"),
    [
        (b"line\n" * 100, 0.03, 485),
        (b"line\n" * 100, 0.031, 480),
        (b"x" * 1000, 0.03, 970),
        (b"title\n" + b"x" * 994, 0.03, 970),
        ("é".encode() * 50, 0.03, 96),
        (b"\x80" * 100, 0.03, 97),
        (b"ab", 1e-9, 1),
        (b"ab", 1 - 1e-9, 1),
        (b"\n\n", 0.5, 1),
    ],
)
def test_a_single_document_is_cut_at_its_tail(text, held_out, cut):
    train, evaluation = split_documents([Document("a", text)], held_out, 0)
    assert train == [Document("a", text[:cut])]
    assert evaluation == [Document("a", text[cut:])]


@pytest.mark.parametrize("held_out", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_share_outside_its_range_is_refused(held_out):
    with pytest.raises(InputError, match=r"data\.held_out: .*between 0 and 1"):
        split_documents(_documents([3, 3]), held_out, 0)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(InputError, match="d0 is the only document"):
        split_documents(_documents([1]), 0.5, 0)
    with pytest.raises(InputError, match="no document"):
        split_documents([], 0.5, 0)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_outside_uint32_is_refused(seed):
    with pytest.raises(InputError, match=r"seed: .*from 0 to 4294967295"):
        split_documents(_documents([3, 3]), 0.5, seed)
    with pytest.raises(InputError, match=r"seed: .*from 0 to 4294967295"):
        train_batches(_corpus([100]), DataConfig(sequence_length=4, batch_size=2), seed)


# --- Tokenizing


def test_corpus_layout():
    corpus = tokenize([Document("a", b"xy"), Document("b", b""), Document("c", b"z")], ByteTokenizer())
    assert corpus.tokens.tolist() == [END, 120, 121, END, END, END, END, 122, END]
    assert corpus.starts.tolist() == [0, 4, 6]
    assert (corpus.tokens.dtype, corpus.starts.dtype, corpus.text_bytes) == (np.int32, np.int64, 3)


def test_tokenizer_errors_name_the_document(tmp_path):
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<eos>"], initial_alphabet=level.alphabet(), show_progress=False
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = level
    tokenizer.train_from_iterator(["some text"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HFTokenizer(tmp_path / "tokenizer.json")
    documents = [Document("good.txt", "é".encode()), Document("bad.txt", b"ab\xff")]
    corpus = tokenize(documents[:1], tokenizer)
    assert (corpus.text_bytes, corpus.end_of_text) == (2, 0)
    with pytest.raises(InputError, match=r"data\.source: bad\.txt: text is not UTF-8 at byte 2"):
        tokenize(documents, tokenizer)


def test_ids_outside_the_vocabulary_are_refused():
    documents = [Document("low", b"\x05"), Document("high", b"\xfe")]
    assert tokenize(documents, ByteTokenizer(), vocab_size=257).tokens.max() == END
    with pytest.raises(InputError, match="low has id 256; the vocabulary has 256"):
        tokenize(documents, ByteTokenizer(), vocab_size=256)
    tokenizer = ByteTokenizer()
    tokenizer.end_of_text = 0
    with pytest.raises(InputError, match="high has id 254; the vocabulary has 254"):
        tokenize(documents, tokenizer, vocab_size=254)
    with pytest.raises(InputError, match="no document"):
        tokenize([], ByteTokenizer())


# --- Rows


def _check_rows(lengths, sequence_length):
    """Compare all rows with a list, token by token, of what they must hold."""
    documents = _documents(lengths)
    rows = RowSource(tokenize(documents, ByteTokenizer()), sequence_length)
    run = [(n, token) for n, document in enumerate(documents) for token in (END, *document.text, END)]
    expected = []
    for (here, token), (there, label) in zip(run, [*run[1:], (None, None)], strict=True):
        expected.append((here, token, label if here == there else IGNORED_LABEL))
    assert len(rows) * sequence_length in range(len(run) - 1, len(run) - 1 + sequence_length)
    seen = []
    for i in range(len(rows)):
        row = rows[i]
        assert set(row) == {"input_ids", "labels", "segment_ids"}
        assert all(value.dtype == np.int32 and value.shape == (sequence_length,) for value in row.values())
        members = expected[i * sequence_length : (i + 1) * sequence_length]
        padding = sequence_length - len(members)
        assert row["input_ids"].tolist() == [token for _, token, _ in members] + [END] * padding
        assert row["labels"].tolist() == [label for _, _, label in members] + [IGNORED_LABEL] * padding
        order = list(dict.fromkeys(n for n, _, _ in members))
        assert row["segment_ids"].tolist() == [order.index(n) + 1 for n, _, _ in members] + [0] * padding
        seen += [member for member in members if member[2] != IGNORED_LABEL]
    assert seen == [member for member in expected if member[2] != IGNORED_LABEL]
    assert len(seen) == sum(length + 1 for length in lengths)


@pytest.mark.parametrize(
    "lengths", [[0], [1], [2], [6], [7], [0, 0, 0], [1, 0, 2], [6, 6], [7, 1], [5, 0, 30], [8] * 5, [40]]
)
@pytest.mark.parametrize("sequence_length", [1, 2, 3, 8, 64])
def test_every_prediction_is_in_exactly_one_row(lengths, sequence_length):
    _check_rows(lengths, sequence_length)


@given(st.lists(st.integers(0, 3) | st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 20))
def test_every_prediction_is_in_exactly_one_row_of_any_corpus(lengths, sequence_length):
    _check_rows(lengths, sequence_length)


def test_rows_that_are_not_there():
    rows = RowSource(_corpus([10]), 4)
    assert len(rows) == 3
    for index in (-1, 3):
        with pytest.raises(IndexError):
            rows[index]
    assert rows[np.int64(2)]["segment_ids"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("value", [0, -3])
def test_sizes_below_one_are_refused(value):
    with pytest.raises(InputError, match=r"data\.sequence_length: "):
        RowSource(_corpus([10]), value)
    with pytest.raises(InputError, match=r"data\.batch_size: "):
        eval_batches(_corpus([10]), value, 4)


# --- Batches


def _config(sequence_length=4, batch_size=3):
    return DataConfig(sequence_length=sequence_length, batch_size=batch_size)


def _first_inputs(batches, count):
    """The input rows of the first `count` batches, each as bytes."""
    iterator = iter(batches)
    return [row.tobytes() for _ in range(count) for row in next(iterator)["input_ids"]]


def test_training_takes_every_row_once_an_epoch_in_a_new_order():
    corpus = tokenize([Document("a", bytes(range(38)))], ByteTokenizer())  # 10 rows, all different
    rows = RowSource(corpus, 4)
    every = sorted(rows[i]["input_ids"].tobytes() for i in range(len(rows)))
    assert len(set(every)) == len(rows) == 10
    taken = _first_inputs(train_batches(corpus, _config(), seed=5), 10)  # 30 rows: 3 epochs, batches straddle them
    epochs = [taken[:10], taken[10:20], taken[20:]]
    assert all(sorted(epoch) == every for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs} | {tuple(every)}) == 4


def test_training_batches():
    batch = next(iter(train_batches(_corpus([5, 9, 30]), _config(8, 2), seed=0)))
    assert {key: (value.shape, value.dtype) for key, value in batch.items()} == {
        key: ((2, 8), np.int32) for key in ("input_ids", "labels", "segment_ids")
    }


def test_training_order_is_decided_by_the_seed():
    corpus = tokenize([Document("a", bytes(range(200)))], ByteTokenizer())
    orders = [_first_inputs(train_batches(corpus, _config(), seed), 40) for seed in (1, 1, 2, 2**32 - 1)]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("stops", [(1,), (0, 5), (10, 11, 20)])
def test_training_resumes_where_it_stopped(stops):
    batches = train_batches(tokenize([Document("a", bytes(range(38)))], ByteTokenizer()), _config(), seed=1)
    straight = _first_inputs(batches, 25)
    taken, iterator = [], iter(batches)
    for step in range(25):
        if step in stops:
            state = json.loads(json.dumps(iterator.get_state()))
            iterator = iter(batches)
            iterator.set_state(state)
        taken += [row.tobytes() for row in next(iterator)["input_ids"]]
    assert taken == straight


def test_training_reads_nothing_ahead(monkeypatch):
    read = []
    get = RowSource.__getitem__
    monkeypatch.setattr(RowSource, "__getitem__", lambda self, index: read.append(index) or get(self, index))
    iterator = iter(train_batches(_corpus([100]), _config(), seed=1))
    next(iterator)
    next(iterator)
    assert len(read) <= 9


def test_grain_alone_would_say_nothing_about_too_few_rows():
    rows = RowSource(_corpus([6]), 4)
    dataset = grain.MapDataset.source(rows).shuffle(seed=0).batch(3, drop_remainder=True).to_iter_dataset()
    assert list(dataset) == []


def test_fewer_rows_than_a_batch_are_refused():
    corpus = _corpus([10])  # 3 rows
    assert len(_first_inputs(train_batches(corpus, _config(batch_size=3), 0), 1)) == 3
    with pytest.raises(
        InputError, match=r"data\.batch_size: 4 rows .* only 3 rows of data\.sequence_length 4"
    ) as error:
        train_batches(corpus, _config(batch_size=4), 0)
    _one_line(error)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7])
def test_evaluation_takes_every_row_once_in_order(batch_size):
    corpus = _corpus([5, 0, 9, 1])  # 23 tokens: 6 rows of 4, the last with padding
    rows = RowSource(corpus, 4)
    batches = list(eval_batches(corpus, batch_size, 4))
    assert len(batches) == -(-len(rows) // batch_size)
    for key in ("input_ids", "labels", "segment_ids"):
        assert all(batch[key].shape == (batch_size, 4) and batch[key].dtype == np.int32 for batch in batches)
        together = np.concatenate([batch[key] for batch in batches])
        assert together[: len(rows)].tolist() == [rows[i][key].tolist() for i in range(len(rows))]
        filling = {"input_ids": END, "labels": IGNORED_LABEL, "segment_ids": 0}[key]
        assert (together[len(rows) :] == filling).all()
    assert sum((batch["labels"] != IGNORED_LABEL).sum() for batch in batches) == 5 + 0 + 9 + 1 + 4
