"""Slow usage entropy of sub-keys: one token, head and half at a time, in float64."""

import math

import numpy as np


def look(scores: np.ndarray, k: int) -> np.ndarray:
    """Softmax over the k best of one row of scores and what ties with the last."""
    least = sorted(scores)[-min(k, len(scores))]
    sizes = [
        math.exp(s - max(scores)) if s >= least and s > -math.inf else 0.0
        for s in scores
    ]
    return np.array(sizes) / sum(sizes)


def address_entropy(scores_THXN: np.ndarray, k: int, real_T: np.ndarray) -> float:
    """Mean over heads of the entropies of both halves' mean looks."""
    n_heads, n_halves = scores_THXN.shape[1:3]
    tokens = np.flatnonzero(real_T)
    total = 0.0
    for h in range(n_heads):
        for x in range(n_halves):
            looks = [look(scores_THXN[t, h, x], k) for t in tokens]
            mean = sum(looks) / len(tokens)
            total -= sum(p * math.log(p + 1e-8) for p in mean)
    return total / n_heads
