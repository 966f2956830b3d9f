"""Mixtures of experts in numpy float64, token by token."""

import numpy as np


def scores(logits_E, kind):
    if kind == "softmax":
        e = np.exp(logits_E - logits_E.max())
        return e / e.sum()
    return np.sqrt(np.log1p(np.exp(logits_E)))


def choose(scores_E, k, normalize, scale):
    """(experts, weights): the largest first, the lowest index of equal ones first."""
    order = sorted(range(len(scores_E)), key=lambda e: (-scores_E[e], e))[:k]
    return order, weights(scores_E, order, normalize, scale)


def weights(scores_E, experts, normalize, scale):
    chosen = np.array([scores_E[e] for e in experts])
    if normalize:
        chosen = chosen / chosen.sum()
    return chosen * scale


def swiglu(x_D, gate_DF, up_DF, out_FD):
    gate = x_D @ gate_DF
    return (gate / (1 + np.exp(-gate)) * (x_D @ up_DF)) @ out_FD


def mixture(x_ND, routes, kernels):
    """Sum of weight * expert(x) over the routes [(experts, weights)] of each token."""
    out = np.zeros_like(x_ND)
    for n, (experts, chosen) in enumerate(routes):
        for e, w in zip(experts, chosen, strict=True):
            parts = (kernels[name][e] for name in ("gate", "up", "out"))
            out[n] += w * swiglu(x_ND[n], *parts)
    return out


def load(experts_NK, n_experts):
    return np.array([np.sum(np.asarray(experts_NK) == e) for e in range(n_experts)])


def balance_loss(scores_NE, experts_NK):
    n_tokens, n_experts = scores_NE.shape
    total = 0.0
    for e in range(n_experts):
        share = load(experts_NK, n_experts)[e] / np.size(experts_NK)
        mean = sum(s[e] / s.sum() for s in scores_NE) / n_tokens
        total += share * mean
    return n_experts * total
