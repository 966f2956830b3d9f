"""kNN-LM in slow numpy float64.

What: weights, probabilities and the mixture, one neighbour and one token at a time; the
    search by sorting all pairs.
Why: loops that nobody could misread.
When not: infinities, where the tests state literal results.
"""

import numpy as np


def weights(distances, temperature=1.0):
    """[N, K] weights of the neighbours."""
    out = np.zeros(np.shape(distances), np.float64)
    for n, row in enumerate(np.asarray(distances, np.float64)):
        scores = np.exp(-(row - row.min()) / temperature)
        out[n] = scores / scores.sum()
    return out


def probs(distances, values, vocab_size, temperature=1.0):
    """[N, V] probabilities of the neighbours' tokens."""
    found = weights(distances, temperature)
    out = np.zeros((len(found), vocab_size), np.float64)
    for n, (row, tokens) in enumerate(zip(found, values, strict=True)):
        for weight, token in zip(row, tokens, strict=True):
            out[n, token] += weight
    return out


def mixture(lm_log_probs, knn_probs, lam):
    """[...] probabilities of the mixture."""
    return lam * knn_probs + (1 - lam) * np.exp(np.asarray(lm_log_probs, np.float64))


def nearest(queries, keys, k):
    """(distances [N, K], entries [N, K]): by distance, then by entry."""
    rows = []
    for query in np.asarray(queries, np.float64):
        pairs = [
            (float(np.sum((query - key) ** 2)), entry)
            for entry, key in enumerate(np.asarray(keys, np.float64))
        ]
        pairs = sorted(pairs)[:k]
        rows.append(pairs + [(np.inf, -1)] * (k - len(pairs)))
    found = np.array(rows)
    return found[..., 0], found[..., 1].astype(int)
