"""Token stores: documents as ids on disk.

What: shards of ids, a table of documents and an index with their hashes, in a folder.
Why: written once as a stream and memory-mapped, a corpus may exceed the memory.
When not: the separators are not stored; packing puts one before each document.

    index.json     what there is: counts, dtype, tokenizer, sha256 of every file
    tokens-N.bin   `shard_tokens` little-endian ids each (the last may have fewer)
    documents.bin  int64 [n_documents, 2]: tokens and bytes of each document
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from memjax.data.tokenizer import Tokenizer
from memjax.errors import DataError

FORMAT = 1
SHARD_TOKENS = 1 << 26
INDEX = "index.json"
_DOCUMENTS = "documents.bin"


def _dtype_for(n_ids: int) -> np.dtype:
    """The narrowest unsigned little-endian dtype that holds 0..n_ids - 1."""
    for width in ("<u1", "<u2", "<u4"):
        if n_ids <= 1 << (8 * np.dtype(width).itemsize):
            return np.dtype(width)
    raise DataError(f"a vocabulary of {n_ids} ids does not fit 32 bits")


class _ShardWriter:
    """Writes a stream of ids into files of equal length, hashing as it goes."""

    def __init__(self, folder: Path, shard_tokens: int) -> None:
        self._folder = folder
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self.shards: list[dict[str, Any]] = []

    def write(self, ids: np.ndarray) -> None:
        while len(ids):
            if self._file is None:
                name = f"tokens-{len(self.shards):05d}.bin"
                self.shards.append({"file": name, "n_tokens": 0})
                self._file = (self._folder / name).open("wb")
                self._hash = hashlib.sha256()
            shard = self.shards[-1]
            part = ids[: self._shard_tokens - shard["n_tokens"]]
            content = part.tobytes()
            self._file.write(content)
            self._hash.update(content)
            shard["n_tokens"] += len(part)
            ids = ids[len(part) :]
            if shard["n_tokens"] == self._shard_tokens:
                self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self.shards[-1]["sha256"] = self._hash.hexdigest()


class StoreWriter:
    """Writes one store, document by document; `write_store` is the short form.

    Args:
        folder: created; must not exist. It is not a store before `close`.
        tokenizer: encodes the documents.
        shard_tokens: ids of a shard.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._tokenizer = tokenizer
        self._dtype = _dtype_for(tokenizer.separator)
        self._shard_tokens = shard_tokens
        self._shards = _ShardWriter(folder, shard_tokens)
        self._documents = (folder / _DOCUMENTS).open("wb")
        self._documents_hash = hashlib.sha256()
        self.n_documents = 0
        self.n_tokens = 0
        self.n_bytes = 0

    def add(self, document: bytes) -> None:
        """Append one document."""
        ids = self._tokenizer.encode(document)
        if len(ids) and (ids.min() < 0 or ids.max() >= self._tokenizer.separator):
            raise DataError(
                f"document {self.n_documents} has an id outside "
                f"0..{self._tokenizer.separator - 1}"
            )
        self._shards.write(ids.astype(self._dtype))
        row = np.array([len(ids), len(document)], "<i8").tobytes()
        self._documents.write(row)
        self._documents_hash.update(row)
        self.n_documents += 1
        self.n_tokens += len(ids)
        self.n_bytes += len(document)

    def close(self) -> None:
        """Finish the files and write the index."""
        self.abandon()
        index = {
            "format": FORMAT,
            "tokenizer": self._tokenizer.fingerprint,
            "separator": self._tokenizer.separator,
            "dtype": self._dtype.str,
            "n_documents": self.n_documents,
            "n_tokens": self.n_tokens,
            "n_bytes": self.n_bytes,
            "shard_tokens": self._shard_tokens,
            "shards": self._shards.shards,
            "documents": {
                "file": _DOCUMENTS,
                "sha256": self._documents_hash.hexdigest(),
            },
        }
        (self._folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")

    def abandon(self) -> None:
        """Close the files without making the folder a store."""
        self._shards.close()
        self._documents.close()


def write_store(
    folder: str | os.PathLike[str],
    documents: Iterable[bytes],
    tokenizer: Tokenizer,
    *,
    shard_tokens: int = SHARD_TOKENS,
) -> "TokenStore":
    """Write documents into a new store and open it.

    Args:
        folder: created; FileExistsError when it is there.
        documents: their bytes, taken one at a time.
        tokenizer: encodes them; DataError if it gives an id that is not a text id.
        shard_tokens: ids of a shard file.

    Cost: one document and one document's ids in memory.
    """
    writer = StoreWriter(Path(folder), tokenizer, shard_tokens)
    try:
        for document in documents:
            writer.add(document)
        writer.close()
    finally:
        writer.abandon()
    return TokenStore(folder)


class TokenStore:
    """An open store. Reading is safe between threads; pickles as its path.

    Attributes:
        folder, n_documents, n_tokens, n_bytes, separator: what the names say;
            n_tokens counts no separators.
        tokenizer: fingerprint of the tokenizer that wrote it.
        fingerprint: sha256 (16 hex digits) over the hashes of all its files: equal
            for equal documents and ids, wherever the folder lies.
        lengths, n_bytes_each: int64 [n_documents], tokens and bytes of documents.
        starts: int64 [n_documents], place of a document's first token.

    Raises:
        DataError: no store there, or a file that is missing, cut or changed.

    Cost: opening reads every file once to check its hash (about 1 GB/s).
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, check_hashes: bool = True
    ) -> None:
        self.folder = Path(folder)
        index = self._read_index()
        try:
            self._shard_files = [self.folder / s["file"] for s in index["shards"]]
            hashes = [s["sha256"] for s in index["shards"]]
            counts = [s["n_tokens"] for s in index["shards"]]
            documents = self.folder / index["documents"]["file"]
            hashes.append(index["documents"]["sha256"])
            self._dtype = np.dtype(index["dtype"])
            self._shard_tokens = index["shard_tokens"]
            self.n_documents: int = index["n_documents"]
            self.n_tokens: int = index["n_tokens"]
            self.n_bytes: int = index["n_bytes"]
            self.separator: int = index["separator"]
            self.tokenizer: str = index["tokenizer"]
        except (KeyError, TypeError) as error:
            raise self._damaged(INDEX, f"its entry {error} is missing") from None
        if check_hashes:
            for path, wanted in zip(
                [*self._shard_files, documents], hashes, strict=True
            ):
                self._check_hash(path, wanted)
        identity = json.dumps([self.tokenizer, self._dtype.str, *hashes])
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._shards = [self._map(p) for p in self._shard_files]
        table = np.fromfile(documents, "<i8").reshape(-1, 2)
        self.lengths = np.ascontiguousarray(table[:, 0])
        self.n_bytes_each = np.ascontiguousarray(table[:, 1])
        self.starts = np.cumsum(self.lengths) - self.lengths
        if (
            [len(s) for s in self._shards] != counts
            or sum(counts) != self.n_tokens
            or len(table) != self.n_documents
            or self.lengths.sum() != self.n_tokens
            or self.n_bytes_each.sum() != self.n_bytes
        ):
            raise self._damaged(INDEX, "its counts do not fit the files")

    def _damaged(self, file: str, why: str) -> DataError:
        return DataError(
            f"{self.folder / file} is damaged: {why}; delete the folder it was "
            "prepared into and prepare it again"
        )

    def _read_index(self) -> dict[str, Any]:
        path = self.folder / INDEX
        try:
            index = json.loads(path.read_text())
        except FileNotFoundError:
            raise DataError(
                f"{self.folder} is no token store: no {INDEX} in it"
            ) from None
        except ValueError as error:
            raise self._damaged(INDEX, str(error)) from None
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise self._damaged(INDEX, f"its format is not {FORMAT}")
        return index

    def _check_hash(self, path: Path, wanted: str) -> None:
        if not path.is_file():
            raise self._damaged(path.name, "it is missing")
        with path.open("rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
        if got != wanted:
            raise self._damaged(path.name, f"it has sha256 {got}, wanted {wanted}")

    def _map(self, path: Path) -> np.ndarray:
        return np.memmap(path, dtype=self._dtype, mode="r")

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fill `out`, integers [n], with the tokens start .. start + n - 1."""
        filled = 0
        while filled < len(out):
            shard, offset = divmod(start + filled, self._shard_tokens)
            part = self._shards[shard][offset : offset + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)

    def document(self, number: int) -> np.ndarray:
        """Ids of one document, int32, without the separator."""
        if not 0 <= number < self.n_documents:
            raise DataError(f"document {number} is outside 0..{self.n_documents - 1}")
        out = np.empty(self.lengths[number], np.int32)
        self.read_into(out, int(self.starts[number]))
        return out

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.document, range(self.n_documents))

    def __len__(self) -> int:
        return self.n_documents

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.folder,)


def _reopen(folder: Path) -> TokenStore:
    """For another process of the same run: the hashes were checked at first opening."""
    return TokenStore(folder, check_hashes=False)
