"""Nearest entries of a datastore: exact on the device, or by faiss.

What: `exact_search` and `faiss_search`, queries -> distances and entries.
Why: the exact search needs nothing and is right; faiss is for millions of entries.
When not: keys that are arrays already; `ops.knn.nearest` searches those.
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.errors import ConfigError, MissingExtraError
from memjax.evaluate.datastore import Datastore
from memjax.ops.knn import Neighbours, nearer, no_neighbours, squared_distances

INDEXES = ("exact", "faiss")
KEY_BLOCK = 8192
QUERY_BLOCK = 1024
_ADDED = 1 << 16
_PER_LIST = 64
_MOST_LISTS = 4096


def exact_search(
    datastore: Datastore,
    queries_ND: np.ndarray,
    k: int,
    *,
    key_block: int = KEY_BLOCK,
    query_block: int = QUERY_BLOCK,
    report: Callable[[str], None] = lambda line: None,
) -> Neighbours:
    """The k nearest entries, on the device, in full precision.

    Args:
        datastore: S entries.
        queries_ND: float32 [N, D].
        k: >= 1; above S, neighbours are missing (distance +inf, entry -1).
        key_block, query_block: pairs compared at once; they do not change the result.
        report: told at every tenth of a datastore of ten blocks or more.

    Returns:
        Numpy arrays [N, K]; order and ties as in `ops.knn.nearer`.

    Cost: 3 * N * S * D operations; the datastore is read once; on the device N * D
        queries, N * K neighbours and query_block * key_block distances.
    """
    n_queries = len(queries_ND)
    step = jax.jit(nearer, donate_argnums=0)
    query_block = min(query_block, max(n_queries, 1))
    key_block = min(key_block, len(datastore))
    queries, found = [], []
    for first in range(0, n_queries, query_block):
        queries.append(_padded(queries_ND[first : first + query_block], query_block))
        found.append(no_neighbours(queries[-1], k))
    for first in range(0, len(datastore), key_block):
        block = datastore.keys[first : first + key_block]
        entries = np.full(key_block, -1, np.int32)
        entries[: len(block)] = np.arange(first, first + len(block))
        keys, entries = _padded(block, key_block), jnp.asarray(entries)
        found = [
            step(so_far, some, keys, entries)
            for so_far, some in zip(found, queries, strict=True)
        ]
        before, after = (10 * at // len(datastore) for at in (first, first + key_block))
        if after > before and len(datastore) >= 10 * key_block:
            jax.block_until_ready(found)
            report(f"searched {10 * min(after, 10)} % of the entries")
    return _rows(jax.device_get(found), n_queries, k)


def faiss_search(
    datastore: Datastore, queries_ND: np.ndarray, k: int, *, probe: int = 8
) -> Neighbours:
    """The k nearest entries of the `probe` nearest lists of an inverted file.

    The datastore is divided into one list for every 64 entries, at most 4096; a query
    looks into the nearest ones. So up to 64 * probe entries the search is complete.
    Distances of what is found are computed anew in full precision, and ordered by it.

    Args:
        datastore, queries_ND, k: as in `exact_search`.
        probe: lists looked into, >= 1.

    Raises:
        ConfigError: probe < 1. MissingExtraError: faiss is not installed.

    Source: the release of arXiv:1911.00172 (urvashik/knnlm build_dstore.py: 4096 lists,
        probe 8). Differs: keys are not quantised.

    Cost: the keys in memory as float32; the index is made anew by each call.
    """
    if probe < 1:
        raise ConfigError("knn.probe", probe, "probe >= 1")
    try:
        faiss: Any = importlib.import_module("faiss")
    except ImportError:
        raise MissingExtraError("faiss-cpu", "knn") from None
    keys, n_entries = datastore.keys, len(datastore)
    width = keys.shape[1]
    n_lists = max(1, min(_MOST_LISTS, n_entries // _PER_LIST))
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(width), width, n_lists)
    sample = np.linspace(0, n_entries - 1, min(n_entries, n_lists * _PER_LIST))
    index.train(_float32(keys[sample.astype(np.int64)]))
    for first in range(0, n_entries, _ADDED):
        index.add(_float32(keys[first : first + _ADDED]))
    index.nprobe = min(probe, n_lists)
    measure = jax.jit(lambda x, y: squared_distances(x[:, None], y))
    rows = []
    size = min(QUERY_BLOCK, max(len(queries_ND), 1))
    for first in range(0, len(queries_ND), size):
        queries = _padded(queries_ND[first : first + size], size)
        _, entries = index.search(np.asarray(queries), k)
        nearby = _float32(keys[np.maximum(entries, 0)])
        distances = np.array(measure(queries, nearby))
        distances[entries < 0] = np.inf
        # Of a spoilt query faiss finds nothing.
        distances[np.isnan(queries).any(axis=-1)] = np.nan
        order = np.lexsort((entries, distances), axis=-1)
        rows.append(
            Neighbours(
                np.take_along_axis(distances, order, axis=-1),
                np.take_along_axis(entries, order, axis=-1).astype(np.int32),
            )
        )
    return _rows(rows, len(queries_ND), k)


def _padded(rows: np.ndarray, n_rows: int) -> jax.Array:
    """The rows and rows of 0 after them, on the device."""
    filled = np.zeros((n_rows, rows.shape[1]), rows.dtype)
    filled[: len(rows)] = rows
    return jnp.asarray(filled)


def _rows(blocks: list[Neighbours], n_queries: int, k: int) -> Neighbours:
    if not blocks:
        return Neighbours(np.zeros((0, k), np.float32), np.zeros((0, k), np.int32))
    distances, entries = (
        np.concatenate(x)[:n_queries] for x in zip(*blocks, strict=True)
    )
    return Neighbours(distances, entries)


def _float32(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows, np.float32)
