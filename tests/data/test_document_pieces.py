"""Pieces of a store hold every document once, whole, behind its separator."""

import numpy as np
import pytest

from memjax.data.document_pieces import document_pieces
from memjax.data.store import write_store
from memjax.data.tokenizer import ByteTokenizer

DOCUMENTS = [b"one", b"", b"a longer document", b"x", b"yz"]


@pytest.mark.parametrize("size", [1, 2, 7, 18, 25, 1000])
def test_documents_come_whole_and_in_order(tmp_path, size):
    store = write_store(tmp_path / "s", DOCUMENTS, ByteTokenizer(), shard_tokens=5)
    found, pieces = [], list(document_pieces(store, size))
    for ids, segments in pieces:
        assert ids.shape == segments.shape == (1, ids.size)
        assert ids.dtype == segments.dtype == np.int32
        numbers = np.unique(segments)
        np.testing.assert_array_equal(numbers, np.arange(1, len(numbers) + 1))
        assert ids.size <= size or len(numbers) == 1
        found += [ids[segments == number] for number in numbers]
    assert len(found) == len(DOCUMENTS)
    for got, text in zip(found, DOCUMENTS, strict=True):
        assert got[0] == 256 and bytes(got[1:].tolist()) == text
    if size == 1000:
        assert len(pieces) == 1


def test_an_empty_store_has_no_pieces(tmp_path):
    store = write_store(tmp_path / "s", [], ByteTokenizer())
    assert list(document_pieces(store)) == []
