"""Flat token files: what is written is what text gives, also after an interruption; what does not fit is refused."""

import fcntl
import json
import pickle

import numpy as np
import pytest
from folders import one_line

from qwen3next.config import DataConfig
from qwen3next.data import __main__ as command
from qwen3next.data import token_writer
from qwen3next.data.texts import read_texts
from qwen3next.data.token_files import FileTokens
from qwen3next.data.token_writer import write_token_file
from qwen3next.errors import InputError
from qwen3next.tokenizer import ByteTokenizer, HFTokenizer, byte_tokenizer_for_others

END, BYTES = ByteTokenizer.end_of_text, ByteTokenizer()


@pytest.fixture
def folder(tmp_path):
    """Forty files, one of them empty."""
    source = tmp_path / "text"
    source.mkdir()
    for number in range(40):
        (source / f"{number:02}.txt").write_text(f"text {number}\n" * number)
    return tmp_path


def _write(folder, out="out.bin", tokenizer=BYTES, overwrite=False, **config):
    return write_token_file(str(folder / "text"), folder / out, DataConfig(**config), tokenizer, overwrite=overwrite)


def _read(source, vocab_size=257, tokenizer=BYTES, **config):
    config = DataConfig(source=(str(source),), held_out=0.2, sequence_length=32, **config)
    return read_texts(config, tokenizer, vocab_size, 0)[0]


def _rows(rows):
    return [[values.tolist() for values in rows[number].values()] for number in range(len(rows))]


def test_a_file_trains_as_its_text_does(folder):
    facts = _write(folder)
    assert facts["documents"] == 39 and facts["left_out"] == {"empty": 1} and facts["dtype"] == "uint16"
    text, file = _read(folder / "text"), _read(folder / "out.bin")
    for side in ("train", "held_out"):
        plain, packed = getattr(text, side), getattr(file, side)
        assert _rows(plain) == _rows(packed)
        assert plain.corpus.text_bytes.tolist() == packed.corpus.text_bytes.tolist()
    assert sorted(path.name for path in folder.glob("out*")) == ["out.bin", "out.bin.documents", "out.bin.json"]
    again = pickle.loads(pickle.dumps(file.train))  # as a worker gets it
    assert len(pickle.dumps(file.train.corpus.tokens)) < 1000 and _rows(again) == _rows(file.train)


def test_prompts_are_only_read_from_a_file_too(folder):
    records = [{"prompt": "ask" * n, "text": "tell" * n} for n in range(1, 30)]
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DataConfig(prompt_field="prompt")
    facts = write_token_file(str(path), folder / "a.bin", config, BYTES)
    assert facts["learnt"] and (folder / "a.bin.learnt").stat().st_size == facts["tokens"]
    text, file = _read(path, prompt_field="prompt"), _read(folder / "a.bin")
    assert _rows(text.train) == _rows(file.train) and _rows(text.held_out) == _rows(file.held_out)
    assert text.train.predictions == file.train.predictions < text.train.facts.tokens


@pytest.mark.parametrize(("at", "left"), [(0, 39), (1, 39), (25, 14), (38, 1)])
def test_an_interrupted_run_goes_on(folder, monkeypatch, at, left):
    monkeypatch.setattr(token_writer, "_COMMITTED", 100)
    _write(folder)
    whole = {path.name: path.read_bytes() for path in folder.glob("out.bin*")}
    encode, seen = token_writer.encode, []

    def interrupted(*args):
        for number, one in enumerate(encode(*args)):
            if number == at:
                raise KeyboardInterrupt
            yield one

    def watched(*args):
        for one in encode(*args):
            seen.append(one)
            yield one

    monkeypatch.setattr(token_writer, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _write(folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.glob("out.bin*") if path.name in whole} == whole
    monkeypatch.setattr(token_writer, "encode", watched)
    _write(folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.glob("out.bin*")} == whole
    assert len(seen) == left


def test_a_run_that_is_killed_while_files_are_put_in_place_begins_anew(folder, monkeypatch):
    monkeypatch.setattr(token_writer, "_COMMITTED", 100)
    _write(folder)
    whole = {path.name: path.read_bytes() for path in folder.glob("out.bin*")}
    new_file = token_writer.new_file

    def killed(path):
        if path.name == "out.bin.json":
            raise KeyboardInterrupt
        return new_file(path)

    monkeypatch.setattr(token_writer, "new_file", killed)
    with pytest.raises(KeyboardInterrupt):
        _write(folder, overwrite=True)
    monkeypatch.setattr(token_writer, "new_file", new_file)
    _write(folder)
    assert {path.name: path.read_bytes() for path in folder.glob("out.bin*")} == whole


def test_what_was_left_out_is_counted_over_an_interruption(folder, monkeypatch):
    monkeypatch.setattr(token_writer, "_COMMITTED", 100)
    monkeypatch.setattr("qwen3next.data.corpus._TOGETHER", 4)
    byte_tokenizer_for_others().save(str(folder / "tokenizer.json"))
    tokenizer = HFTokenizer(folder / "tokenizer.json")
    for name in ("02", "39"):
        (folder / "text" / f"{name}.txt").write_bytes(b"\xff")
    encode = token_writer.encode

    def interrupted(*args):
        for number, one in enumerate(encode(*args)):
            if number == 30:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(token_writer, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _write(folder, tokenizer=tokenizer, on_error="skip")
    monkeypatch.setattr(token_writer, "encode", encode)
    facts = _write(folder, tokenizer=tokenizer, on_error="skip")
    assert facts["left_out"] == {"empty": 1, "not UTF-8": 2} and facts["documents"] == 37


def test_a_file_is_written_by_one_process(folder):
    with (folder / "out.bin.partial").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"out\.bin is being written by another process"):
            _write(folder)
    assert _write(folder)["documents"] == 39


def test_an_interrupted_run_is_not_mixed_with_another(folder, monkeypatch):
    (folder / "text" / "39.txt").write_bytes(b"\xff")
    byte_level = folder / "tokenizer.json"
    byte_tokenizer_for_others().save(str(byte_level))
    tokenizer = HFTokenizer(byte_level)
    with pytest.raises(InputError, match=r"39\.txt: text is not UTF-8"):
        _write(folder, tokenizer=tokenizer)
    assert not list(folder.glob("out.bin*"))  # so little has been done that nothing is kept
    monkeypatch.setattr(token_writer, "_COMMITTED", 100)
    with pytest.raises(InputError, match=r"39\.txt: text is not UTF-8"):
        _write(folder, tokenizer=tokenizer)
    assert (folder / "out.bin.journal").exists()
    with pytest.raises(InputError, match=r"another on_error; allowed: the same, or to begin anew") as error:
        _write(folder, tokenizer=tokenizer, on_error="skip")
    one_line(error, "out.bin.journal")
    (folder / "text" / "39.txt").write_text("mended")
    with pytest.raises(InputError, match=r"another files; allowed"):
        _write(folder, tokenizer=tokenizer)
    (folder / "text" / "39.txt").write_bytes(b"\xff")
    facts = _write(folder, tokenizer=tokenizer, on_error="skip", overwrite=True)
    assert facts["left_out"] == {"empty": 1, "not UTF-8": 1} and facts["documents"] == 38
    assert not (folder / "out.bin.journal").exists()


def test_all_tokenizers_and_large_vocabularies(folder):
    byte_tokenizer_for_others().save(str(folder / "tokenizer.json"))
    tokenizer = HFTokenizer(folder / "tokenizer.json")
    _write(folder, tokenizer=tokenizer)
    with pytest.raises(InputError, match=r"out\.bin was made with another than 'bytes'; give that one"):
        _read(folder / "out.bin")
    assert len(_read(folder / "out.bin", tokenizer=tokenizer).train) > 1
    tokenizer.vocab_size = 2**16 + 1
    assert _write(folder, "wide.bin", tokenizer=tokenizer)["dtype"] == "uint32"
    narrow, wide = (_read(folder / name, 2**17, tokenizer) for name in ("out.bin", "wide.bin"))
    assert _rows(narrow.train) == _rows(wide.train)


# --- Files of others


def _flat(path, documents, dtype="uint16"):
    np.concatenate([[*document, END] for document in documents]).astype(dtype).tofile(path)
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_file_that_says_nothing_of_itself(tmp_path, dtype):
    documents = [list(range(n)) for n in (5, 0, 90, 3, 30, 1)]
    text = _read(_flat(tmp_path / "a.bin", documents, dtype), token_dtype=dtype)
    assert text.left_out.counts == {"empty": 1} and text.train.corpus.text_bytes is None
    lengths = sorted([*text.train.corpus.lengths, *text.held_out.corpus.lengths])
    assert lengths == [2, 4, 6, 31, 91] and text.held_out_text is None


def test_several_files_are_one_source(tmp_path):
    documents = [list(range(n)) for n in (5, 9, 33, 3, 60, 2)]
    _flat(tmp_path / "one.bin", documents)
    (tmp_path / "many").mkdir()
    for number in range(3):
        _flat(tmp_path / "many" / f"{number}.bin", documents[2 * number : 2 * number + 2])
    one, many = _read(tmp_path / "one.bin"), _read(tmp_path / "many")
    assert _rows(one.train) == _rows(many.train) and _rows(one.held_out) == _rows(many.held_out)
    tokens = many.train.corpus.tokens
    whole = np.fromfile(tmp_path / "one.bin", np.uint16)
    assert isinstance(tokens, FileTokens) and len(tokens) == len(whole)
    for begin in range(0, len(whole), 5):
        for end in range(begin, len(whole) + 1, 7):
            assert tokens[begin:end].tolist() == whole[begin:end].tolist()
    (tmp_path / "many" / "notes.txt").write_text("x")
    with pytest.raises(InputError, match=r"has \.bin files and .*notes\.txt.*; give one kind"):
        _read(tmp_path / "many")


def test_a_single_document_is_cut(tmp_path):
    path = tmp_path / "a.bin"
    np.arange(100, dtype=np.uint16).tofile(path)
    text = _read(path)
    assert (text.train.facts.tokens, text.held_out.facts.tokens) == (80, 20)
    assert text.train[0]["input_ids"][:3].tolist() == [END, 0, 1]
    assert text.held_out[0]["labels"][:20].tolist() == list(range(80, 100))


DAMAGE = {
    r"a\.bin is empty": lambda path: path.write_bytes(b""),
    r"a\.bin has 3 bytes; uint16 tokens have 2 each": lambda path: path.write_bytes(b"abc"),
    r"a\.bin has id 300; the vocabulary has 257": lambda path: np.array([1, 300], np.uint16).tofile(path),
    r"a\.bin has no document": lambda path: np.array([END, END], np.uint16).tofile(path),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_files_that_do_not_fit_are_refused(tmp_path, message):
    DAMAGE[message](tmp_path / "a.bin")
    with pytest.raises(InputError, match=message) as error:
        _read(tmp_path / "a.bin")
    one_line(error)


BESIDE = {
    r"a\.bin has \d+ tokens; .*documents tells of others": lambda folder: (folder / "a.bin").write_bytes(bytes(64)),
    r"a\.bin cannot be read .*documents": lambda folder: (folder / "a.bin.documents").unlink(),
    r"a\.bin\.json: dtype is 'int8'; allowed": lambda folder: _edit(folder, dtype="int8"),
    r"a\.bin\.json: not a readable JSON": lambda folder: (folder / "a.bin.json").write_text("{"),
    r"a\.bin cannot be read .*learnt": lambda folder: _edit(folder, learnt=True),
}


def _without_settings(folder):
    (folder / "a.bin.json").unlink()


BESIDE[r"a\.bin\.json: not a readable JSON file .*No such file"] = _without_settings


def test_what_stands_beside_a_file_is_found_through_a_link(folder):
    _write(folder, "a.bin")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "b.bin").symlink_to(folder / "a.bin")
    one, other = _read(folder / "a.bin"), _read(folder / "elsewhere" / "b.bin")
    assert one.train.fingerprint == other.train.fingerprint and other.train.corpus.text_bytes is not None


def _edit(folder, **values):
    path = folder / "a.bin.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_file_that_changes_is_another(folder):
    records = [{"prompt": "ask" * n, "text": "tell" * n} for n in range(1, 30)]
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_token_file(str(folder / "a.jsonl"), folder / "a.bin", DataConfig(prompt_field="prompt"), BYTES)
    prints = {_read(folder / "a.bin").train.fingerprint}
    for name in ("a.bin", "a.bin.learnt"):
        content = bytearray((folder / name).read_bytes())
        content[2000] ^= 1
        (folder / name).write_bytes(content)
        prints.add(_read(folder / "a.bin").train.fingerprint)
    assert len(prints) == 3


@pytest.mark.parametrize(
    "journal", ["{", "{}", '{"settings": "3"}', '{"settings": "{}", "more": 1}', '{"settings": 1}']
)
def test_a_damaged_journal_is_refused(folder, journal):
    (folder / "a.bin.journal").write_text(journal)
    with pytest.raises(InputError, match=r"a\.bin\.journal") as error:
        _write(folder, "a.bin")
    one_line(error)


@pytest.mark.parametrize("message", BESIDE)
def test_what_stands_beside_a_file_must_belong_to_it(folder, message):
    _write(folder, "a.bin")
    BESIDE[message](folder)
    with pytest.raises(InputError, match=message) as error:
        _read(folder / "a.bin")
    one_line(error)


def test_the_command(folder, capsys):
    arguments = ["tokenize", str(folder / "text"), str(folder / "out.bin")]
    command.main(arguments)
    said = capsys.readouterr()
    assert said.out == f"{folder / 'out.bin'}: 39 documents, 6,234 tokens (uint16); left out: 1 empty\n"
    with pytest.raises(InputError, match=r"out\.bin is there already; allowed: another name, or --overwrite"):
        command.main(arguments)
    command.main([*arguments, "--overwrite"])
    (folder / "dir.bin").mkdir()
    for bad, message in (
        ([], "required: tokenize"),
        (["train"], "invalid choice: 'train'"),
        (["tokenize", "x"], "required: out"),
        (["tokenize", str(folder / "text"), "out.txt"], r"out\.txt must end in \.bin"),
        (["tokenize", str(folder / "text"), str(folder / "dir.bin"), "--overwrite"], r"dir\.bin must .* be no folder"),
        (["tokenize", str(folder / "none"), str(folder / "b.bin")], "no text in"),
        (["tokenize", str(folder / "out.bin"), str(folder / "b.bin")], "holds token files already"),
    ):
        with pytest.raises(InputError, match=message):
            command.main(bad)
    assert not list(folder.glob("b.bin*"))
