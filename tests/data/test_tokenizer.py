"""Tokenizers: exact round trips, separators of their own, plain errors."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memjax.data.corpora import build_corpus
from memjax.data.tokenizer import load_tokenizer
from memjax.errors import ConfigError, DataError, MissingExtraError

TEXTS = ["the cat sat on the mat <|end|> ", "Über die Bäume \U0001f600 \u2028 \t\r\n"]


@given(st.binary(max_size=30))
def test_bytes_are_their_own_ids(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([256, *ids, 256]) == text


def test_bytes_have_a_separator_of_their_own():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.separator) == (257, 256)
    for bad in (-1, 257):
        with pytest.raises(
            DataError, match=rf"id {bad} at place 1 is outside 0\.\.256"
        ):
            tokenizer.decode([0, bad])


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip(
        "tokenizers", reason="needs tokenizers: pip install 'memjax[tokenizers]'"
    )


@pytest.fixture(scope="module")
def byte_level(library, tmp_path_factory):
    """A file with a small byte-level vocabulary and one added token."""
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|end|>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXTS[0]] * 3, trainer)
    tokenizer.enable_truncation(3)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_file_gives_exact_round_trips(byte_level):
    tokenizer = load_tokenizer(str(byte_level))
    for text in TEXTS:
        ids = tokenizer.encode(text.encode())
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text.encode()
        assert b"".join(tokenizer.decode([i]) for i in ids) == text.encode()
    assert len(tokenizer.encode(TEXTS[0].encode())) < len(TEXTS[0])
    assert tokenizer.encode(b"").tolist() == []


def test_no_text_can_forge_the_separator(byte_level):
    tokenizer = load_tokenizer(str(byte_level))
    size = len(json.loads(byte_level.read_text())["model"]["vocab"])
    assert tokenizer.separator == size
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.encode(b"<|end|>").tolist() == [0]
    assert tokenizer.decode([tokenizer.separator, 0]) == b"<|end|>"


def test_a_file_takes_utf8_only(byte_level):
    with pytest.raises(DataError, match="byte 1 of a document is not UTF-8"):
        load_tokenizer(str(byte_level)).encode(b"a\xff")


def test_fingerprints_tell_files_apart(byte_level, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(byte_level.read_text().replace("<|end|>", "<|END|>"))
    fingerprints = {
        load_tokenizer(name).fingerprint
        for name in ("bytes", str(byte_level), str(other))
    }
    assert len(fingerprints) == 3


def test_other_vocabularies_decode_as_the_library_does(library, tmp_path):
    path = tmp_path / "words.json"
    words = library.Tokenizer(library.models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode(b"a  b c").tolist() == [0, 1, 2]
    assert tokenizer.decode([0, 1, 3]) == b"a b"


def test_what_is_no_tokenizer_is_an_error(library, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.tokenizer = 'missing\.json'"):
        load_tokenizer("missing.json")
    for content in ("{", "{}", "[]"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(DataError, match=r"bad\.json is no tokenizers JSON file"):
            load_tokenizer(str(tmp_path / "bad.json"))


def test_without_the_library_the_extra_is_named(byte_level, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"memjax\[tokenizers\]"):
        load_tokenizer(str(byte_level))


def test_deepseek_gives_the_text_back(library):
    """4.07 bytes a token on kjv valid; the vocabulary has 129280 ids."""
    try:
        tokenizer = load_tokenizer("deepseek")
        documents = build_corpus("kjv", "valid")
    except MissingExtraError as error:
        pytest.skip(str(error))
    assert tokenizer.vocab_size == 129281
    ids = [tokenizer.encode(document) for document in documents]
    assert [tokenizer.decode(i) for i in ids] == documents
    assert sum(map(len, documents)) / sum(map(len, ids)) == pytest.approx(
        4.07, abs=5e-3
    )
