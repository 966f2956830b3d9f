"""Keys and next tokens of a text on disk: what kNN-LM searches.

What: `write_datastore`, whole or not at all; `open_datastore`, which refuses another
    model's; memory-mapped, so its size is bounded by the disk.
Why: neighbours among another model's hidden states look plausible and mean nothing.
When not: how keys are computed or searched; see knn and knn_search.

    keys.npy    [S, D] float16 or float32, the hidden states
    values.npy  [S] uint16 or int32, the token that followed each
    about.json  sizes, and of which model, text and settings it is
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memjax.errors import CheckpointError, ConfigError, DataError

ABOUT = "about.json"
KEYS, VALUES = "keys.npy", "values.npy"
FORMAT = 1
KEY_DTYPES = ("float16", "float32")
_MOST = 2**31 - 1


@dataclass(frozen=True)
class Datastore:
    """An open datastore.

    Attributes:
        keys: [S, D], memory-mapped, read only.
        values: integers [S], memory-mapped, read only.
        about: what about.json says of its model, text and settings.
    """

    keys: np.ndarray
    values: np.ndarray
    about: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.values)


def value_dtype(vocab_size: int) -> np.dtype:
    """The narrowest dtype of ours that holds every token id: uint16 or int32.

    Differs from the release (urvashik/knnlm fairseq/knnlm.py), whose float16 stores
    keep ids in int16 and so lose those above 32767.
    """
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def write_datastore(
    folder: Path,
    about: Mapping[str, Any],
    chunks: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    n_entries: int,
    width: int,
    vocab_size: int,
    key_dtype: str = "float16",
) -> None:
    """Write a datastore in one move; one that stands there is replaced.

    Args:
        folder: where it shall be.
        about: plain data: model, text and settings; see `open_datastore`.
        chunks: keys [N, width] and values [N], in order, together n_entries.
        n_entries: S, 1 .. 2^31 - 1.
        width: D of a key.
        vocab_size: V; values are in [0, V).
        key_dtype: one of KEY_DTYPES.

    Raises:
        ConfigError: n_entries or key_dtype is not allowed.
        DataError: a key that is not finite in key_dtype, a value outside [0, V), more
            or fewer entries than said, or a place that cannot be written.
        After any error the folder is as it was. A process that is killed outright
        leaves `.NAME.*.tmp` beside it, which nothing reads.
    """
    if key_dtype not in KEY_DTYPES:
        raise ConfigError("knn.key_dtype", key_dtype, f"one of {KEY_DTYPES}")
    if not 1 <= n_entries <= _MOST:
        raise ConfigError("knn.n_tokens", n_entries, f"1..{_MOST}")
    mark = uuid.uuid4().hex[:8]
    scratch = folder.parent / f".{folder.name}.{mark}.tmp"
    old = folder.parent / f".{folder.name}.{mark}.old.tmp"
    try:
        scratch.mkdir(parents=True)
        arrays = {
            KEYS: _create(scratch / KEYS, np.dtype(key_dtype), (n_entries, width)),
            VALUES: _create(scratch / VALUES, value_dtype(vocab_size), (n_entries,)),
        }
        done = 0
        for keys_ND, values_N in chunks:
            stop = done + len(values_N)
            if stop > n_entries:
                raise DataError(f"{folder}: more entries than the {n_entries} promised")
            arrays[KEYS][done:stop] = _checked_keys(keys_ND, key_dtype)
            arrays[VALUES][done:stop] = _checked_values(values_N, vocab_size)
            done = stop
        if done != n_entries:
            raise DataError(f"{folder}: {done} entries, not the {n_entries} promised")
        for array in arrays.values():
            array.flush()
        arrays.clear()
        content = {"format": FORMAT, "vocab_size": vocab_size, **about}
        (scratch / ABOUT).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        if folder.exists():
            os.rename(folder, old)
        os.rename(scratch, folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def open_datastore(folder: Path, about: Mapping[str, Any]) -> Datastore:
    """The datastore in `folder`, if it is the one that `about` describes.

    Args:
        about: what `write_datastore` was given for the model, text and settings at
            hand.

    Raises:
        CheckpointError: it is of another model, text or setting; names each field that
            differs, with both values.
        DataError: it is not there, damaged or of another format.
    """
    try:
        found = json.loads((folder / ABOUT).read_text("utf-8"))
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"no {ABOUT} of format {FORMAT}")
        keys, values = (np.load(folder / x, mmap_mode="r") for x in (KEYS, VALUES))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} holds no whole datastore ({error}); build it anew"
        ) from None
    there = {k: v for k, v in found.items() if k not in ("format", "vocab_size")}
    old, new = _flat(there), _flat(json.loads(json.dumps(about)))
    lines = [
        f"{name} is {old.get(name, 'absent')!r} there and {new.get(name, 'absent')!r} "
        "now"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if lines:
        raise CheckpointError(
            f"{folder} is the datastore of another model, text or setting: "
            f"{'; '.join(lines)}; allowed: the same ones, or build it anew"
        )
    if keys.ndim != 2 or values.shape != keys.shape[:1]:
        raise DataError(
            f"{folder} is damaged: keys {keys.shape} and values {values.shape}; build "
            "it anew"
        )
    return Datastore(keys, values, found)


def _create(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.memmap:
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)


def _checked_keys(keys_ND: np.ndarray, key_dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        stored = np.asarray(keys_ND).astype(key_dtype)
    if not np.isfinite(stored).all():
        raise DataError(
            f"a key is not finite in knn.key_dtype = {key_dtype!r}: the model's hidden "
            "states are not finite, or only float32 holds them"
        )
    return stored


def _checked_values(values_N: np.ndarray, vocab_size: int) -> np.ndarray:
    values_N = np.asarray(values_N)
    outside = (values_N < 0) | (values_N >= vocab_size)
    if outside.any():
        raise DataError(
            f"token {values_N[outside][0]} is not allowed: 0 <= token < {vocab_size}"
        )
    return values_N


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested objects by dotted name."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat.update(_flat(inner, f"{prefix}.{name}" if prefix else name))
    return flat
