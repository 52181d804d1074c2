"""Documents to tokens: what is learnt of them, and which file a fault is in."""

import numpy as np
import pytest
import tokenizers
from folders import one_line

from qwen3next.data.corpus import tokenize
from qwen3next.data.documents import Document, LeftOut, Part
from qwen3next.errors import InputError
from qwen3next.tokenizer import ByteTokenizer, HFTokenizer

END = ByteTokenizer.end_of_text


def _document(name, *parts):
    return Document(name, tuple(part if isinstance(part, Part) else Part(part) for part in parts))


def _tokenize(documents, tokenizer=None, vocab_size=300, on_error="fail"):
    return tokenize(documents, tokenizer or ByteTokenizer(), vocab_size, LeftOut(on_error))


def test_each_document_ends_in_an_end_of_text():
    corpus = _tokenize([_document("a", b"xy"), _document("b", b""), _document("c", b"z")])
    assert corpus.tokens.tolist() == [120, 121, END, END, 122, END]
    assert corpus.spans.tolist() == [[0, 3], [3, 4], [4, 6]]
    assert corpus.lengths.tolist() == [3, 1, 2] and corpus.text_bytes.tolist() == [2, 0, 1]
    assert corpus.learnt is None and corpus.end_of_text == END


def test_what_is_only_read_is_not_learnt():
    parts = (Part(b"ab", False), Part(b"c"), Part(b"", False), Part(b"d", False), Part(b"e"))
    corpus = _tokenize([_document("a", *parts), _document("b", b"xy")])
    assert corpus.tokens.tolist() == [*b"abcde", END, *b"xy", END]
    assert corpus.learnt.tolist() == [False, False, True, False, True, True, True, True, True]
    assert corpus.text_bytes.tolist() == [2, 2]


def test_an_end_of_text_is_learnt_with_what_it_ends():
    corpus = _tokenize([_document("a", Part(b"q", False), Part(b"a"), Part(b"r", False))])
    assert corpus.learnt.tolist() == [False, True, False, False]


def test_a_digest_tells_tokens_and_what_is_learnt_apart():
    kinds = [
        [_document("a", b"xyz"), _document("b", b"z")],
        [_document("a", b"xyz"), _document("b", b"y")],
        [_document("a", b"xyz", Part(b"z", False))],
        [_document("a", b"xyzz")],
        [_document("a", b"xy"), _document("b", b"zz")],
    ]
    assert len({_tokenize(documents).digest for documents in kinds}) == len(kinds)
    renamed = [_document("other", b"xyz"), _document("names", b"z")]
    assert _tokenize(kinds[0]).digest == _tokenize(renamed).digest


@pytest.fixture
def hf(tmp_path):
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<eos>"], initial_alphabet=level.alphabet(), show_progress=False
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = level
    tokenizer.train_from_iterator(["some text"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return HFTokenizer(tmp_path / "tokenizer.json")


def test_text_that_is_not_utf8_is_named_or_left_out(hf):
    documents = [_document("good.txt", "é".encode()), _document("bad.txt", b"ab\xff"), _document("fine.txt", b"some")]
    with pytest.raises(InputError, match=r"data\.source: bad\.txt: text is not UTF-8 at byte 2") as error:
        _tokenize(documents, hf)
    one_line(error, "data.on_error skip")
    left_out = LeftOut("skip")
    corpus = tokenize(documents, hf, 300, left_out)
    assert left_out.counts == {"not UTF-8": 1}
    alone = [np.append(hf.encode(documents[n].learnt_text), 0) for n in (0, 2)]
    assert corpus.tokens.tolist() == np.concatenate(alone).tolist() and len(corpus) == 2
    with pytest.raises(InputError, match=r"no document can be read \(left out: 1 not UTF-8\)"):
        tokenize(documents[1:2], hf, 300, LeftOut("skip"))


def test_ids_outside_the_vocabulary_are_refused():
    documents = [_document("low", b"\x05"), _document("high", b"\xfe")]
    assert _tokenize(documents, vocab_size=257).tokens.max() == END
    with pytest.raises(InputError, match="low has id 256; the vocabulary has 256"):
        _tokenize(documents, vocab_size=256)
    tokenizer = ByteTokenizer()
    tokenizer.end_of_text = 0
    with pytest.raises(InputError, match="high has id 254; the vocabulary has 254"):
        _tokenize(documents, tokenizer, vocab_size=254)


def test_a_single_document_is_cut_at_its_tail():
    corpus = _tokenize([_document("a", bytes(range(9)))])
    sides = corpus.cut(0.2)
    assert [side.spans.tolist() for side in sides] == [[[0, 8]], [[8, 10]]]
    assert all(side.text_bytes is None for side in sides)
    with pytest.raises(InputError, match="has one token"):
        _tokenize([_document("a", b"")]).cut(0.5)
