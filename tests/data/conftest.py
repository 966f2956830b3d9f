"""Small prepared folders for the tests of the data floor."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.folder import write_folder
from memjax.data.store import write_store
from memjax.data.tokenizer import ByteTokenizer

MakeConfig = Callable[..., DataConfig]


def write_prepared(
    folder: Path, documents: Iterable[bytes], valid: Iterable[bytes] = (b"held out",)
) -> None:
    """A prepared folder that trains on `documents`, in small shards."""
    splits = {"train": documents, "valid": valid, "test": [b"kept for last"]}

    def write(scratch: Path) -> None:
        for split, texts in splits.items():
            write_store(scratch / split, texts, ByteTokenizer(), shard_tokens=50)

    assert write_folder(folder, {"name": folder.name, "tokenizer": "bytes"}, write)


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """make_config(documents, ...) -> the config of a folder that holds them."""

    def make(
        documents: Iterable[bytes],
        *,
        valid: Iterable[bytes] = (b"held out",),
        name: str = "own",
        **settings: object,
    ) -> DataConfig:
        write_prepared(tmp_path / name, documents, valid)
        corpora = (CorpusConfig(name=str(tmp_path / name)),)
        defaults = {"context": 4, "batch_size": 4, "eval_stride": 4, "n_threads": 0}
        return DataConfig(corpora=corpora, **{**defaults, **settings})

    return make
