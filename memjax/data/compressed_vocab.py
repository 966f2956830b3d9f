"""Classes of tokens that an n-gram table need not tell apart.

What: `CompressedVocab`, the class of every id, built from a tokenizer or from texts.
Why: fewer distinct n-grams for the same text, and published tables are addressed so.
When not: the ids that the model reads and predicts stay those of the tokenizer.

Applied with `memjax.ops.token_classes.token_classes`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from memjax.data.normal_form import class_key
from memjax.data.tokenizer import Tokenizer, load_tokenizer
from memjax.errors import DataError


@dataclass(frozen=True, eq=False)
class CompressedVocab:
    """The class of every id; equal, and hashed, by its numbers.

    Attributes:
        table: int32 [V], read-only. Classes are numbered in the order in which their
            first id comes.
        size: V', number of classes. The multipliers of an n-gram layout depend on it.
    """

    table: np.ndarray

    def __post_init__(self) -> None:
        table = np.array(self.table, np.int32)
        table.setflags(write=False)
        object.__setattr__(self, "table", table)

    @cached_property
    def size(self) -> int:
        return int(self.table.max(initial=-1)) + 1

    @cached_property
    def sha256(self) -> str:
        """Hash of the table as int64, little-endian: the form others publish."""
        return hashlib.sha256(self.table.astype("<i8").tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompressedVocab) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __repr__(self) -> str:
        return f"CompressedVocab({len(self.table)} ids, {self.size} classes)"


def compress_vocab(texts: Sequence[str], names: Sequence[str]) -> CompressedVocab:
    """Classes of a vocabulary: ids with equal `normal_form.class_key` are one class.

    Args:
        texts: of every id, what it decodes to alone, U+FFFD where it is not UTF-8.
        names: of every id, how the vocabulary writes it. Names and normal forms share
            one namespace, as published: in the DeepSeek vocabulary 27 names equal a
            normal form, and their ids share its class.

    Returns:
        Classes numbered from 0 by first id; none for no texts.

    Raises:
        DataError: the two differ in length.

    Cost: some seconds for 129280 ids.
    Source: deepseek-ai/Engram engram_demo_v1.py (CompressedTokenizer) and
    DeepSeek-V4.1-Flash inference/engram.py (build_compressed_token_map).
    """
    if len(texts) != len(names):
        raise DataError(f"{len(texts)} texts of tokens, but {len(names)} names")
    classes: dict[str, int] = {}
    table = [
        classes.setdefault(class_key(text, name), len(classes))
        for text, name in zip(texts, names, strict=True)
    ]
    return CompressedVocab(np.array(table, np.int32))


def token_texts(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """(texts, names) of all ids that text can have, i.e. without the separator."""
    ids = range(tokenizer.separator)
    texts = [tokenizer.decode([i]).decode("utf-8", "replace") for i in ids]
    return texts, [tokenizer.name(i) for i in ids]


def compress_tokenizer(
    tokenizer: Tokenizer, *, with_separator: bool = True
) -> CompressedVocab:
    """Classes of a tokenizer's ids.

    Args:
        tokenizer: see `memjax.data.tokenizer.load_tokenizer`.
        with_separator: the separator, the last id, is the last class and shares it
            with no other id. False leaves it out, for tables that are addressed as
            published: for "deepseek" 129280 ids in 99092 classes.

    Returns:
        The same numbers each time. 257 ids of "bytes" are 228 classes: 26 letters lose
        their case, tab, line feed, carriage return and space are one.
    """
    found = compress_vocab(*token_texts(tokenizer))
    if not with_separator:
        return found
    return CompressedVocab(np.append(found.table, found.size))


def load_classes(name_or_path: str) -> CompressedVocab:
    """`compress_tokenizer(load_tokenizer(name_or_path))`, kept for the next time."""
    tokenizer = load_tokenizer(name_or_path)
    return _classes_of(name_or_path, tokenizer.fingerprint)


@lru_cache(maxsize=4)
def _classes_of(name_or_path: str, fingerprint: str) -> CompressedVocab:
    del fingerprint  # part of the key: a file may change
    return compress_tokenizer(load_tokenizer(name_or_path))
