"""Sums of row gradients in float64, one (read, row) pair at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def table_gradient(
    gradients: Sequence[tuple[Any, Any, Any]], n_rows: int, width: int
) -> tuple[np.ndarray, list[int]]:
    """(gradient [R, W], the rows that were read) of (ids, weights, cotangent)s."""
    out, read = np.zeros((n_rows, width)), set()
    for ids, weights, cotangent in gradients:
        ids = np.asarray(ids)
        for index in np.ndindex(ids.shape):
            row = int(ids[index])
            if not 0 <= row < n_rows:
                continue
            weight = 1.0 if weights is None else float(weights[index])
            out[row] += weight * np.asarray(cotangent[index[:-1]], np.float64)
            read.add(row)
    return out, sorted(read)
