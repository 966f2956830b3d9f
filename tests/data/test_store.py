"""Token stores: what is written comes back, and damage is met when opening."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memjax.data.store import TokenStore, write_store
from memjax.data.tokenizer import ByteTokenizer
from memjax.errors import DataError


class WideTokenizer(ByteTokenizer):
    """Gives ids up to `top`, one for each byte."""

    def __init__(self, top, vocab_size=None):
        self.vocab_size = vocab_size or top + 2
        self.separator = self.vocab_size - 1
        self.fingerprint = f"wide-{top}"
        self._top = top

    def encode(self, text):
        return np.full(len(text), self._top, np.int64)


@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(1, 9))
def test_documents_come_back_whatever_the_shards(
    tmp_path_factory, documents, shard_tokens
):
    path = tmp_path_factory.mktemp("store") / "s"
    store = write_store(path, documents, ByteTokenizer(), shard_tokens=shard_tokens)
    n_bytes = sum(map(len, documents))
    assert (len(store), store.n_tokens, store.n_bytes) == (
        len(documents),
        n_bytes,
        n_bytes,
    )
    assert len(list(path.glob("tokens-*.bin"))) == -(-n_bytes // shard_tokens)
    for opened in (store, TokenStore(path), pickle.loads(pickle.dumps(store))):
        assert [bytes(ids.astype(np.uint8)) for ids in opened] == documents
        assert opened.fingerprint == store.fingerprint


def test_the_fingerprint_is_of_the_content(tmp_path):
    def fingerprint(name, documents, tokenizer=None):
        store = write_store(tmp_path / name, documents, tokenizer or ByteTokenizer())
        return store.fingerprint

    first = fingerprint("a", [b"ab", b"c"])
    assert first == fingerprint("b", [b"ab", b"c"])
    others = [
        fingerprint("c", [b"a", b"bc"]),
        fingerprint("d", [b"c", b"ab"]),
        fingerprint("e", [b"ab", b"c"], WideTokenizer(97, 257)),
    ]
    assert len({first, *others}) == 4


@pytest.mark.parametrize(
    ("top", "n_bytes"),
    [(254, 1), (255, 1), (256, 2), (65535, 2), (65536, 4), (2**24, 4)],
)
def test_ids_take_the_narrowest_width(tmp_path, top, n_bytes):
    store = write_store(tmp_path / "s", [b"abc"], WideTokenizer(top))
    assert (tmp_path / "s" / "tokens-00000.bin").stat().st_size == 3 * n_bytes
    assert store.document(0).tolist() == [top] * 3
    assert store.document(0).dtype == np.int32
    assert store.n_bytes == 3


def test_an_id_outside_the_text_ids_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"document 0 has an id outside 0\.\.8"):
        write_store(tmp_path / "s", [b"abc"], WideTokenizer(9, vocab_size=10))
    with pytest.raises(DataError, match="is no token store"):
        TokenStore(tmp_path / "s")


def test_documents_out_of_range_are_errors(tmp_path):
    store = write_store(tmp_path / "s", [b"abc"], ByteTokenizer())
    for number in (-1, 1):
        with pytest.raises(DataError, match=rf"document {number} is outside 0\.\.0"):
            store.document(number)


@pytest.mark.parametrize("name", ["tokens-00001.bin", "documents.bin"])
def test_a_changed_cut_or_missing_file_is_an_error(tmp_path, name):
    write_store(tmp_path / "s", [b"abcdef"], ByteTokenizer(), shard_tokens=4)
    path = tmp_path / "s" / name
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(DataError, match=rf"{name} is damaged: it has sha256 \w+, want"):
        TokenStore(tmp_path / "s")
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=rf"{name} is damaged: it has sha256"):
        TokenStore(tmp_path / "s")
    path.unlink()
    with pytest.raises(DataError, match=rf"{name} is damaged: it is missing"):
        TokenStore(tmp_path / "s")


def test_a_damaged_index_is_an_error(tmp_path):
    write_store(tmp_path / "s", [b"abcdef"], ByteTokenizer())
    path = tmp_path / "s" / "index.json"
    index = json.loads(path.read_text())
    cases = {
        "its format is not 1": {**index, "format": 2},
        "entry 'shards' is missing": {k: v for k, v in index.items() if k != "shards"},
        "its counts do not fit": {**index, "n_bytes": 7},
    }
    for message, content in cases.items():
        path.write_text(json.dumps(content))
        with pytest.raises(DataError, match=message):
            TokenStore(tmp_path / "s")
    path.write_text("{")
    with pytest.raises(DataError, match=r"index\.json is damaged"):
        TokenStore(tmp_path / "s")


def test_a_store_is_never_written_over(tmp_path):
    write_store(tmp_path / "s", [b"a"], ByteTokenizer())
    with pytest.raises(FileExistsError):
        write_store(tmp_path / "s", [b"b"], ByteTokenizer())
