"""Slow product keys in numpy float64: every slot scored, every row by itself."""

import itertools
import math

import numpy as np


def half_scores(q: np.ndarray, keys: np.ndarray, eps: float | None = None):
    """q [H, X, C], keys [H, X, N, C] -> [H, X, N]; dot products without an eps."""
    heads, halves, n, _ = keys.shape
    scores = np.zeros((heads, halves, n))
    for h, x, i in itertools.product(range(heads), range(halves), range(n)):
        query, key = q[h, x].astype(np.float64), keys[h, x, i].astype(np.float64)
        if eps is None:
            scores[h, x, i] = sum(query * key)
        else:
            scores[h, x, i] = -math.log(eps + sum((query - key) ** 2))
    return scores


def best_slots(halves: np.ndarray, k: int) -> tuple[list[float], list[int]]:
    """The k best of all slots of one head: halves [2, N] -> scores, slots."""
    first, second = ([float(s) for s in half] for half in halves)
    if any(math.isnan(s) or s == math.inf for s in first + second):
        return [math.nan] * k, list(range(k))
    ranked = sorted(
        (-(a + b), i * len(second) + j)
        for (i, a), (j, b) in itertools.product(enumerate(first), enumerate(second))
    )
    return [-score for score, _ in ranked[:k]], [slot for _, slot in ranked[:k]]


def read_weights(
    scores: np.ndarray,
    activation: str = "softmax",
    over: str = "head",
    temperature: float = 1.0,
    subtract: str = "none",
    normalize: bool = False,
) -> np.ndarray:
    """Scores [H, K] of one token -> weights [H, K]; -inf is an entry left out."""
    weights = np.zeros(scores.shape)
    alive = [[k for k, s in enumerate(row) if s != -math.inf] for row in scores]
    scaled = scores.astype(np.float64) / temperature
    everyone = [(h, k) for h, row in enumerate(alive) for k in row]
    for h, row in enumerate(alive):
        among = everyone if over == "joint" else [(h, k) for k in row]
        top = max((scaled[at] for at in among), default=0.0)
        total = sum(math.exp(scaled[at] - top) for at in among)
        for k in row:
            s = scaled[h, k]
            if activation == "softmax":
                weights[h, k] = math.exp(s - top) / total
            elif activation == "relu":
                weights[h, k] = max(s, 0.0)
            elif activation == "silu":
                weights[h, k] = s / (1 + math.exp(-s))
            else:
                weights[h, k] = s
        ascending = sorted(weights[h, k] for k in row)
        level = 0.0
        if row and subtract == "min":
            level = ascending[0]
        elif row and subtract == "mean":
            level = sum(ascending) / len(row)
        elif row and subtract == "median":
            level = ascending[(len(row) - 1) // 2]
        for k in row:
            weights[h, k] -= level
        norm = sum(abs(weights[h, k]) for k in row)
        for k in row:
            if normalize:
                weights[h, k] = weights[h, k] / norm if norm else 0.0
    return weights
