"""A user's own files as documents.

What: .txt, .jsonl and .parquet files, and folders of them, read as a stream.
Why: each rule is written once, so the same files always give the same documents.
When not: corpora with recipes do not pass through here.

The rules.
- Files are UTF-8; a byte-order mark at the beginning is dropped. A byte that is not
  UTF-8 is an error naming file and byte, or, on request, becomes a counted U+FFFD.
- .txt: "\\n", "\\r\\n" and "\\r" end a line. A document is a line without its end
  (`documents="line"`), or the whole file, its line ends written "\\n"
  (`documents="file"`).
- .jsonl: "\\n" alone ends a record (a "\\r" before it goes with it), so U+2028, U+0085
  or a vertical tab inside a text does not. A document is the string in the field
  `text_field` of a record, as it is.
- .parquet: a document is the string in the column `text_field` of a row, as it is.
- Documents, lines and records of nothing but white space, and nulls of a parquet
  column, are dropped and counted.
- A folder stands for all its files of these kinds, its folders' too, sorted by path;
  other files and hidden ones are passed over.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memjax.errors import ConfigError, DataError, MissingExtraError

logger = logging.getLogger(__name__)

SUFFIXES = (".txt", ".jsonl", ".parquet")
_MARK = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")

DocumentRule = Literal["line", "file"]
ErrorRule = Literal["strict", "replace"]


@dataclass(kw_only=True)
class TextCounts:
    """What reading has met so far.

    Attributes:
        n_documents: documents given out.
        n_blank: lines, records and nulls dropped because they hold no text.
        n_replaced: places replaced by U+FFFD.
        n_empty_files: files without a document.
    """

    n_documents: int = 0
    n_blank: int = 0
    n_replaced: int = 0
    n_empty_files: int = 0


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A file to read, and its name in messages and records (without the folders above
    the source it was found in)."""

    path: Path
    name: str


def find_text_files(sources: Iterable[str | os.PathLike[str]]) -> list[TextFile]:
    """The files that `sources` (files and folders) stand for, in reading order.

    Raises:
        DataError: a source is missing or of another kind, a folder holds no file of
            these kinds, or there is no source.
    """
    found: list[TextFile] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = sorted(
                (path.relative_to(source) for path in source.rglob("*")),
                key=lambda path: path.parts,
            )
            files = [
                TextFile(path=source / path, name=path.as_posix())
                for path in inside
                if path.suffix in SUFFIXES
                and not any(part.startswith(".") for part in path.parts)
                and (source / path).is_file()
            ]
            if not files:
                raise DataError(f"{source} holds no {', '.join(SUFFIXES)} file")
            found += files
        elif not source.is_file():
            raise DataError(f"{source} is no file and no folder")
        elif source.suffix not in SUFFIXES:
            raise DataError(f"{source} is of another kind than {', '.join(SUFFIXES)}")
        else:
            found.append(TextFile(path=source, name=source.name))
    if not found:
        raise DataError("no source was given: a file or a folder is needed")
    return found


class _Reader:
    """Reads one file by the rules above, counting into `counts`."""

    def __init__(
        self,
        file: TextFile,
        documents: DocumentRule,
        errors: ErrorRule,
        text_field: str,
        counts: TextCounts,
    ) -> None:
        self._file = file
        self._documents = documents
        self._errors = errors
        self._field = text_field
        self._counts = counts

    def read(self) -> Iterator[bytes]:
        if self._file.path.suffix == ".txt":
            texts = self._lines() if self._documents == "line" else self._whole()
        elif self._file.path.suffix == ".jsonl":
            texts = self._records()
        else:
            texts = self._rows()
        n_before = self._counts.n_documents
        for text in texts:
            if text and not text.isspace():
                self._counts.n_documents += 1
                yield text.encode()
            else:
                self._counts.n_blank += 1
        if self._counts.n_documents == n_before:
            self._counts.n_empty_files += 1
            logger.warning("%s holds no document", self._file.path)

    def _decode(self, content: bytes, place: int | str) -> str:
        """Text of some bytes; `place` is the offset of the first, or where they are."""
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            if self._errors == "strict":
                byte = error.start
                where = f"byte {place + byte}" if isinstance(place, int) else place
                raise DataError(
                    f"{self._file.path}: {where} is not UTF-8 (0x{content[byte]:02X}); "
                    "mend the file, or ask for errors='replace'"
                ) from None
        text = content.decode("utf-8", "replace")
        # A U+FFFD that was in the file is three bytes that nothing else can give.
        self._counts.n_replaced += text.count("\ufffd") - content.count(b"\xef\xbf\xbd")
        return text

    def _byte_lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Number from 1, offset and content of what "\\n" ends, its end cut off."""
        with self._file.path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, start=1):
                start = offset
                offset += len(line)
                if number == 1 and line.startswith(_MARK):
                    line, start = line[len(_MARK) :], len(_MARK)
                yield number, start, line.removesuffix(b"\n").removesuffix(b"\r")

    def _lines(self) -> Iterator[str]:
        for _, offset, line in self._byte_lines():
            for part in line.split(b"\r"):
                yield self._decode(part, offset)
                offset += len(part) + 1

    def _whole(self) -> Iterator[str]:
        content = self._file.path.read_bytes()
        mark = len(_MARK) if content.startswith(_MARK) else 0
        text = self._decode(content[mark:], mark)
        if text:
            yield text.replace("\r\n", "\n").replace("\r", "\n")

    def _records(self) -> Iterator[str]:
        for number, offset, line in self._byte_lines():
            if not line.strip():
                self._counts.n_blank += 1
                continue
            where = f"{self._file.path} line {number}"
            try:
                record = json.loads(self._decode(line, offset))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is no JSON: {error}") from None
            text = record.get(self._field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise DataError(f"{where} has no string in the field {self._field!r}")
            yield self._without_surrogates(text, where)

    def _without_surrogates(self, text: str, where: str) -> str:
        text, n_lone = _SURROGATE.subn("\ufffd", text)
        if n_lone and self._errors == "strict":
            raise DataError(
                f"{where} has half a surrogate pair, which is no text; mend the file, "
                "or ask for errors='replace'"
            )
        self._counts.n_replaced += n_lone
        return text

    def _rows(self) -> Iterator[str]:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise MissingExtraError("pyarrow", "parquet") from None
        path = self._file.path
        if path.stat().st_size == 0:
            return
        try:
            with parquet.ParquetFile(path) as file:
                yield from self._parquet_rows(pyarrow, file)
        except pyarrow.ArrowException as error:
            raise DataError(f"{path} is no parquet file: {error}") from None

    def _parquet_rows(self, pyarrow: Any, file: Any) -> Iterator[str]:
        path, schema = self._file.path, file.schema_arrow
        if self._field not in schema.names:
            raise DataError(
                f"{path} has no column {self._field!r}, only {', '.join(schema.names)}"
            )
        kind = schema.field(self._field).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"{path}: column {self._field!r} is {kind}, not string")
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[self._field]):
            # As bytes, so that text that is not UTF-8 is met by our own rule.
            for content in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                where = f"a byte in row {row}"
                yield "" if content is None else self._decode(content, where)
                row += 1


def check_rules(documents: str, errors: str) -> None:
    """ConfigError unless both are rules that `read_documents` knows."""
    if documents not in ("line", "file"):
        raise ConfigError("documents", documents, "'line' or 'file'")
    if errors not in ("strict", "replace"):
        raise ConfigError("errors", errors, "'strict' or 'replace'")


def read_documents(
    files: Iterable[TextFile],
    *,
    documents: DocumentRule = "line",
    errors: ErrorRule = "strict",
    text_field: str = "text",
    counts: TextCounts | None = None,
) -> Iterator[bytes]:
    """The documents of some files in order, UTF-8, none of them blank.

    Args:
        files: from `find_text_files`.
        documents: what a document of a .txt file is, its "line" or its "file".
        errors: what becomes of bytes that are not UTF-8: "strict" or "replace".
        text_field: field of a JSON record, or column of a parquet file.
        counts: is counted up while the documents are taken.

    Raises:
        ConfigError: an unknown rule.
        DataError: not UTF-8 (file and byte), no JSON or no such field (file and line),
            no such column; a file without documents is only a warning in the log.
        MissingExtraError: a parquet file, and pyarrow is not installed.

    Cost: one line, record or row group in memory; with "file" one file.
    """
    check_rules(documents, errors)
    counts = TextCounts() if counts is None else counts
    for file in files:
        yield from _Reader(file, documents, errors, text_field, counts).read()
