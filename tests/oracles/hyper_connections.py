"""Hyper-connections in numpy float64, one token and one entry at a time."""

import numpy as np


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mixing(stream_MD, kernel, scale, base, n_iterations, eps, norm_eps):
    """(pre [M], post [M], comb [M, M]) of one token."""
    n_streams, width = stream_MD.shape
    flat = np.concatenate(list(stream_MD))
    rms = np.sqrt(np.sum(flat**2) / (n_streams * width) + norm_eps)
    raw = np.array([np.sum(flat / rms * column) for column in kernel.T])
    pre, post = np.zeros(n_streams), np.zeros(n_streams)
    comb = np.zeros((n_streams, n_streams))
    for m in range(n_streams):
        at_post = n_streams + m
        pre[m] = _sigmoid(scale[0] * raw[m] + base[m]) + eps
        post[m] = 2 * _sigmoid(scale[1] * raw[at_post] + base[at_post])
        for n in range(n_streams):
            at = 2 * n_streams + m * n_streams + n
            comb[m, n] = np.exp(scale[2] * raw[at] + base[at])
    for m in range(n_streams):
        comb[m] = comb[m] / np.sum(comb[m]) + eps
    for iteration in range(n_iterations):
        if iteration:
            for m in range(n_streams):
                comb[m] = comb[m] / (np.sum(comb[m]) + eps)
        for n in range(n_streams):
            comb[:, n] = comb[:, n] / (np.sum(comb[:, n]) + eps)
    return pre, post, comb


def collapse(stream_MD, pre):
    """Input of the sub-block, [D]."""
    return sum(pre[m] * stream_MD[m] for m in range(len(pre)))


def merge(stream_MD, out_D, post, comb):
    """Streams after the sub-block."""
    new = np.zeros_like(stream_MD)
    for destination in range(len(post)):
        new[destination] = post[destination] * out_D
        for source in range(len(post)):
            new[destination] += comb[source, destination] * stream_MD[source]
    return new
