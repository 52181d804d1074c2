"""Sources to documents, and which of them are held out: the same whatever the file system says, faults by name."""

import json
import os
import random

import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from folders import one_line

from qwen3next.config import DataConfig
from qwen3next.data import documents as module
from qwen3next.data.documents import Document, LeftOut, Part, draw_held_out, read_documents, split_documents
from qwen3next.errors import InputError


def _document(name, text):
    return Document(name, (Part(text),))


def _documents(lengths):
    return [_document(f"d{n}", bytes((n * 7 + i * 3) % 251 for i in range(length))) for n, length in enumerate(lengths)]


def _read(source, left_out=None, **changes):
    config = DataConfig(source=(str(source) or "x",), **changes)
    return list(read_documents(str(source), config, left_out or LeftOut(config.on_error)))


# --- Reading


def test_one_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\r\nno final newline")
    assert _read(path) == [_document(str(path), b"\xff\r\nno final newline")]


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
    assert all(document.learnt_text for document in documents)


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "é\\n", "n": 1}\n\n  \r\n{"text": ""}\n{"body": "x", "text": "last"}'.encode())
    assert _read(path) == [_document(f"{path}:1", "é\n".encode()), _document(f"{path}:5", b"last")]


def test_jsonl_field(tmp_path):
    path = tmp_path / "a.JSONL"
    path.write_text('{"body": "x", "text": 3}\n')
    assert _read(path, text_field="body") == [_document(f"{path}:1", b"x")]


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
    one_line(error, f"{path}:3 ")


@pytest.mark.parametrize("source", ["", "missing", "missing/*.txt", "empty.txt", "folder", "pipe", "blank.jsonl", "\0"])
def test_a_source_without_text_is_refused(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(
        InputError, match=r"data\.source: no text in .*'stdlib', 'docstrings', or a file, folder"
    ) as error:
        _read(source)
    one_line(error, repr(source))


@pytest.mark.parametrize(
    ("place", "name", "culprit"), [(module.Path, "read_bytes", "a.txt"), (os, "scandir", "locked")]
)
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
    train, evaluation = split_documents([_document("a", text)], held_out, 0)
    assert train == [_document("a", text[:cut])]
    assert evaluation == [_document("a", text[cut:])]


def test_what_cannot_be_split_is_refused():
    with pytest.raises(InputError, match="d0 is the only document"):
        split_documents(_documents([1]), 0.5, 0)
    with pytest.raises(InputError, match="no document"):
        split_documents([], 0.5, 0)
    with pytest.raises(InputError, match="a is the only document; give at least two"):
        split_documents([Document("a", (Part(b"prompt", learnt=False), Part(b"completion")))], 0.5, 0)


def test_the_same_documents_are_held_out_by_number():
    documents = _documents([5] * 30)
    numbers = draw_held_out(30, 0.2, 7)
    assert split_documents(documents, 0.2, 7) == tuple([documents[n] for n in side] for side in numbers)


# --- Records


RECORDS = [{"text": "one", "prompt": "p1"}, {"text": "", "prompt": "p2"}, {"text": "thrée", "prompt": ""}]


def _write_records(folder, kind, records=RECORDS):
    path = folder / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=2)
    else:
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for record in records:
            writer.write(json.dumps(record).encode())
        writer.close()
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "array_record"])
def test_records_of_every_kind_of_file(tmp_path, kind):
    path, left_out = _write_records(tmp_path, kind), LeftOut("fail")
    documents = _read(path, left_out, prompt_field="prompt")
    parts = [(Part(b"p1", False), Part(b"one")), (Part(b"", False), Part("thrée".encode()))]
    assert documents == [Document(f"{path}:{n}", part) for n, part in zip((1, 3), parts, strict=True)]
    assert left_out.counts == {"with nothing to learn": 1}
    with pytest.raises(InputError, match=r"data\.text_field: .*:1 has no string 'body'") as error:
        _read(path, text_field="body")
    one_line(error)


@pytest.mark.parametrize("kind", ["parquet", "array_record"])
def test_files_that_are_not_what_their_name_says(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(b"not such a file")
    with pytest.raises(InputError, match=rf"a\.{kind} is not a(n array_record| readable parquet) file") as error:
        _read(path)
    one_line(error)


def test_what_cannot_be_read_is_left_out_if_asked_for_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{\n{"txt": 1}\n[]\n{"text": ""}\n{"text": "\\ud800"}\n{"text": "last"}\n')
    left_out = LeftOut("skip")
    documents = _read(path, left_out, on_error="skip")
    assert [document.name for document in documents] == [f"{path}:1", f"{path}:7"]
    assert left_out.counts == {"not JSON": 1, "without the field": 2, "empty": 1, "not Unicode": 1}
    assert str(left_out) == "1 empty, 1 not JSON, 1 not Unicode, 2 without the field"
    with pytest.raises(InputError, match=r"a\.jsonl:2 is not JSON; .*data.on_error skip"):
        _read(path)
    path.write_text("{\n")
    with pytest.raises(InputError, match=r"no text in .*\(left out: 1 not JSON\)"):
        _read(path, on_error="skip")


def test_cells_of_parquet_that_no_python_value_stands_for(tmp_path):
    """Such columns are not read, and a string that is not UTF-8 is none."""
    broken = pyarrow.array([b"fine", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    nanoseconds = pyarrow.array([1, 2], pyarrow.timestamp("ns"))
    pyarrow.parquet.write_table(pyarrow.table({"text": broken, "when": nanoseconds}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet:2 has no string 'text'"):
        _read(tmp_path / "a.parquet")
    assert len(_read(tmp_path / "a.parquet", on_error="skip")) == 1


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def test_messages(tmp_path):
    (tmp_path / "t").mkdir()
    settings = {"chat_template": "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", "eos_token": "E"}
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(settings))
    path = _write_records(tmp_path, "jsonl", [{"m": CHAT}, {"m": CHAT + CHAT}])
    use = {"messages_field": "m", "tokenizer": str(tmp_path / "t" / "tokenizer.json")}
    turn = (Part(b"user:hi;", False), Part(b"assistant:ho;"))
    assert [document.parts for document in _read(path, **use)] == [turn, turn + turn]
    learnt = _read(path, **use, roles=("assistant", "user"))[0].parts
    assert learnt == (Part(b"user:hi;"), Part(b"assistant:ho;"))
    left_out = LeftOut("fail")
    _write_records(tmp_path, "jsonl", [{"m": CHAT[:1]}, {"m": CHAT}])
    assert len(_read(path, left_out, **use)) == 1 and left_out.counts == {"with nothing to learn": 1}
    for bad in ({"m": "hi"}, {"m": []}, {"m": [{"content": "hi"}]}, {"n": CHAT}, {"m": ["hi"]}):
        _write_records(tmp_path, "jsonl", [bad])
        with pytest.raises(InputError, match=r"data\.messages_field: .*:1 has no list 'm' of messages"):
            _read(path, **use)
    with pytest.raises(InputError, match=r"needs a chat template; there is no tokenizer_config\.json beside"):
        _read(path, messages_field="m")
