"""A user's own text into a prepared folder.

What: files -> documents -> ids -> train, valid and test stores, in one pass.
Why: after it, the folder's path is a corpus like any other.
When not: the corpora with recipes are built by `memjax.data.prepared.prepare`.
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memjax.data.cache import Progress
from memjax.data.folder import is_prepared, open_split, read_about, write_folder
from memjax.data.recipe import SPLITS, split_of
from memjax.data.store import SHARD_TOKENS, StoreWriter, TokenStore
from memjax.data.text import (
    DocumentRule,
    ErrorRule,
    TextCounts,
    TextFile,
    check_rules,
    find_text_files,
    read_documents,
)
from memjax.data.tokenizer import Tokenizer, load_tokenizer
from memjax.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedText:
    """What `prepare_text` made or found.

    Attributes:
        folder: name it in `data.corpora`.
        reused: the folder was there, made from the same files in the same way.
        counts: what reading met.
        stores: the store of each split.
    """

    folder: Path
    reused: bool
    counts: TextCounts
    stores: Mapping[str, TokenStore]


def _file_record(file: TextFile) -> dict[str, Any]:
    try:
        with file.path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return {"name": file.name, "bytes": stream.tell(), "sha256": digest}
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror}") from None


def _check_same(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What an existing folder says of itself; DataError unless it is what we want."""
    if not is_prepared(folder):
        raise DataError(
            f"{folder} is there and is no prepared corpus; choose another folder"
        )
    about = read_about(folder)
    for field, value in wanted.items():
        if about.get(field) != value:
            raise DataError(
                f"{folder} was prepared with different {field}; choose another folder, "
                "or delete it"
            )
    return about


def _write_splits(
    scratch: Path,
    files: list[TextFile],
    tokenizer: Tokenizer,
    shard_tokens: int,
    rules: dict[str, Any],
    progress: Progress,
) -> TextCounts:
    counts = TextCounts()
    with ExitStack() as stack:
        writers: dict[str, StoreWriter] = {}
        for split in SPLITS:
            writers[split] = StoreWriter(scratch / split, tokenizer, shard_tokens)
            stack.callback(writers[split].abandon)
        number = 0
        for file in files:
            first = number
            for document in read_documents([file], counts=counts, **rules):
                writers[split_of(number)].add(document)
                number += 1
            progress(f"{file.path}: {number - first} documents")
        if number == 0:
            raise DataError(f"no document in {', '.join(str(f.path) for f in files)}")
        if writers["valid"].n_documents == 0:
            raise DataError(
                f"{number} documents are too few: of each 20, number 10 is the valid "
                "part and number 20 the test part, so at least 10 are needed "
                "(documents = 'line' makes one of every line of a .txt file)"
            )
        if writers["test"].n_documents == 0:
            logger.warning("%d documents leave the test part empty", number)
        for writer in writers.values():
            writer.close()
    return counts


def prepare_text(
    sources: Iterable[str | os.PathLike[str]],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: str = "bytes",
    documents: DocumentRule = "line",
    errors: ErrorRule = "strict",
    text_field: str = "text",
    shard_tokens: int = SHARD_TOKENS,
    progress: Progress | None = None,
) -> PreparedText:
    """Write files of text into a folder that `data.corpora` can name.

    Document k (from 0, over all files) goes to valid if k mod 20 = 9, to test if
    k mod 20 = 19, else to train.

    Args:
        sources: .txt, .jsonl and .parquet files and folders of them; the rules of
            reading are in `memjax.data.text`.
        out_dir: the new folder. If it is there, made from the same files in the same
            way, it is checked and used; anything else there is an error.
        tokenizer, documents, errors, text_field: see `load_tokenizer` and
            `read_documents`.
        shard_tokens: ids of a shard file.
        progress: called with a line for people after each file; by default the log.

    Raises:
        ConfigError: an unknown rule or tokenizer.
        DataError: what `read_documents` raises; no document at all; fewer than 10,
            which leaves the valid part empty (fewer than 20 only warn that the test
            part is); another folder in the way; a place that cannot be written. The
            folder is whole or not there at all.

    Cost: reads the files twice (hashes first), and holds one document at a time.
    """
    check_rules(documents, errors)
    if not isinstance(shard_tokens, int) or shard_tokens < 1:
        raise ConfigError("shard_tokens", shard_tokens, "an integer >= 1")
    folder = Path(out_dir)
    encoder = load_tokenizer(tokenizer)
    files = find_text_files(sources)
    rules = {"documents": documents, "errors": errors, "text_field": text_field}
    about = {
        "tokenizer": encoder.fingerprint,
        "files": [_file_record(file) for file in files],
        "shard_tokens": shard_tokens,
        **rules,
    }

    def write(scratch: Path) -> dict[str, Any]:
        counts = _write_splits(
            scratch, files, encoder, shard_tokens, rules, progress or logger.info
        )
        return {"name": folder.absolute().name, "counts": asdict(counts)}

    in_the_way = folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
    made = not in_the_way and write_folder(folder, about, write)
    saved = _check_same(folder, about)
    return PreparedText(
        folder=folder,
        reused=not made,
        counts=TextCounts(**saved["counts"]),
        stores={split: open_split(folder, split) for split in SPLITS},
    )
