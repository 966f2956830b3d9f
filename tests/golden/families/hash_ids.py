"""Family hash_ids: row ids of token ids, on the host, in chunks, and packed in jit."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from memjax.ops.ngram_hash import (
    DEAD,
    NgramLayout,
    host_ngram_rows,
    next_history,
    ngram_rows,
)
from tests.golden.case import Case
from tests.golden.families.layout import SIZE_KEYS, layouts_of, vocab_size_of

_ARRAY = re.compile(
    r"(raw|compressed|rows|splits|token_mask|hash|row)(_\d+)?(_layer\d+)?"
)


def run(case: Case) -> None:
    unknown = [key for key in case.data if not _ARRAY.fullmatch(key)]
    assert not unknown, f"arrays without a meaning here: {unknown}"
    sizes, pad_id = _vocabularies(case)
    errors = []
    for vocab_size in sizes:
        try:
            _run(case, layouts_of(case.settings, vocab_size, pad_id))
            return
        except AssertionError as error:
            errors.append(f"vocabulary of {vocab_size}: {error}")
    raise AssertionError("; ".join(errors) or "no vocabulary size is recorded")


def _run(case: Case, layouts: Mapping[int, NgramLayout]) -> None:
    inputs = {
        key.removeprefix("raw"): _ids(case, key.removeprefix("raw"))
        for key in case.data
        if key.startswith("raw")
    }
    for place, layout in enumerate(layouts.values()):
        for suffix, (ids, demo) in inputs.items():
            rows = host_ngram_rows(ids, layout, compat="demo" if demo else "strict")
            _compare(case, "host", suffix, rows, layout, place)
            if "splits" + suffix in case.data:
                rows = _in_chunks(ids, layout, case.data["splits" + suffix])
                _compare(case, "chunks", suffix, rows, layout, place)
        plain = {suffix: ids for suffix, (ids, demo) in inputs.items() if not demo}
        for suffix, rows in _packed(plain, layout).items():
            _compare(case, "packed", suffix, rows, layout, place)


def _ids(case: Case, suffix: str) -> tuple[np.ndarray, bool]:
    """Ids with DEAD where masked, and whether negative ids are the demo's tokens."""
    ids = case.data.get("compressed" + suffix, case.data["raw" + suffix])
    mask = case.data.get("token_mask" + suffix)
    if mask is None:
        return ids, bool((ids < 0).any())
    return np.where(mask, ids, DEAD).astype(ids.dtype), False


def _compare(
    case: Case, name: str, suffix: str, rows: Any, layout: NgramLayout, place: int
) -> None:
    name = f"{name}{suffix} of layer {layout.layer_id}"
    if "rows" + suffix in case.data:
        case.equal(name, rows, case.data["rows" + suffix][..., place, :])
        return
    within, whole = (
        f"{kind}{suffix}_layer{layout.layer_id}" for kind in ("hash", "row")
    )
    case.equal(name, rows - np.array(layout.offsets), case.data[within])
    if whole in case.data:
        case.equal(name, rows, case.data[whole])


def _in_chunks(ids: np.ndarray, layout: NgramLayout, lengths: Any) -> np.ndarray:
    history, parts = None, []
    assert sum(lengths) == ids.shape[-1], "the lengths of the chunks are wrong"
    for chunk in np.split(ids, np.cumsum(lengths)[:-1], axis=-1):
        parts.append(host_ngram_rows(chunk, layout, history_BN=history))
        history = next_history(chunk, history, layout.max_order)
    return np.concatenate(parts, axis=-2)


def _packed(
    inputs: Mapping[str, np.ndarray], layout: NgramLayout
) -> dict[str, np.ndarray]:
    """Rows from inside jit, all sequences as documents of one packed row."""
    sequences = [ids for batch in inputs.values() for ids in batch]
    if not sequences:
        return {}
    lengths = [len(ids) for ids in sequences]
    segments_T = np.repeat(np.arange(1, len(lengths) + 1), lengths)

    @jax.jit
    def rows_of(ids_T: jax.Array, segments_T: jax.Array) -> jax.Array:
        return ngram_rows(ids_T, layout, segments_BT=segments_T)

    rows_TC = np.asarray(
        rows_of(np.concatenate(sequences), segments_T.astype(np.int32))
    )
    parts = iter(np.split(rows_TC, np.cumsum(lengths)[:-1]))
    return {
        suffix: np.stack([next(parts) for _ in batch])
        for suffix, batch in inputs.items()
    }


def compressed_pad_id(data: Mapping[str, Any], pad_id: int) -> int:
    """What the raw padding id became where a sequence holds it, or else itself."""
    for key in data:
        compressed = key.replace("raw", "compressed", 1)
        if key.startswith("raw") and compressed in data:
            found = data[compressed][data[key] == pad_id]
            if found.size:
                return int(found[0])
    return pad_id


def _vocabularies(case: Case) -> tuple[list[int], int]:
    """Vocabulary size and compressed padding id, of the case or of its layout.

    Cases in the demo's spelling leave the size to the layout case of the same
    configuration; without one, any size recorded in the folder may be meant, and the
    padding id is compressed as where it occurs among the ids.
    """
    settings = case.settings
    own = vocab_size_of(settings.values)
    for key in (*SIZE_KEYS, "pad_compressed_id"):
        settings.take(key, default=0)
    others = [other for other in case.manifest.cases() if other.family == "layout"]
    same = [other for other in others if other.data["config"] == settings.values]
    if "pad_compressed_id" in settings:
        pad_id = settings.take("pad_compressed_id")
    elif same:
        pad_id = same[0].data["pad_compressed_id"]
    else:
        raw = settings.take("pad_id" if "pad_id" in settings else "engram_pad_id")
        pad_id = compressed_pad_id(case.data, raw)
    if own is not None:
        return [own], pad_id
    recorded = {
        vocab_size_of(other.data | other.data["config"]) for other in same or others
    }
    largest = max(
        ids.max() for key, ids in case.data.items() if re.match(r"raw$|compressed", key)
    )
    return sorted(size for size in recorded if size and size > largest), pad_id
