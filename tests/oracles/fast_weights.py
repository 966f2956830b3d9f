"""Fast weights token by token in float64, with gradients written out by hand."""

from typing import Any, NamedTuple

import numpy as np


class Read(NamedTuple):
    """What one token read: scores, slots, weights [H, K], out [W]."""

    scores: np.ndarray
    slots: np.ndarray
    weights: np.ndarray
    out: np.ndarray


def half_scores(keys: np.ndarray, q: np.ndarray, o: Any) -> np.ndarray:
    """Scores [H, 2, N] of one query [H, 2, C]."""
    if o.score == "dot":
        return np.einsum("hxc,hxnc->hxn", q, keys)
    return -np.log(1e-3 + np.sum((q[:, :, None] - keys) ** 2, axis=-1))


def keys_gradient(keys: np.ndarray, q: np.ndarray, bar: np.ndarray, o: Any) -> Any:
    """Gradient of the keys from that of the half scores [H, 2, N] of one query."""
    if o.score == "dot":
        return bar[..., None] * q[:, :, None]
    apart = q[:, :, None] - keys
    near = 1e-3 + np.sum(apart**2, axis=-1)
    return (2 * bar / near)[..., None] * apart


def read(keys: np.ndarray, values: np.ndarray, q: np.ndarray, o: Any) -> Read:
    scores, slots = [], []
    for first, second in half_scores(keys, q, o):
        sums = (first[:, None] + second[None, :]).ravel()
        best = np.argsort(-sums, kind="stable")[: o.k]
        scores.append(sums[best])
        slots.append(best)
    scores, slots = np.array(scores), np.array(slots)
    s = scores / o.temperature
    if o.activation == "softmax":
        weights = np.exp(s - s.max())
        weights /= weights.sum()
    elif o.activation == "relu":
        weights = np.maximum(s, 0)
    else:
        weights = s / (1 + np.exp(-s))
    return Read(scores, slots, weights, np.einsum("hk,hkw->w", weights, values[slots]))


def weights_gradient(r: Read, bar: np.ndarray, o: Any) -> np.ndarray:
    """Gradient of the selected scores from that of the weights."""
    s = r.scores / o.temperature
    if o.activation == "softmax":
        bar = r.weights * (bar - np.sum(r.weights * bar))
    elif o.activation == "relu":
        bar = bar * (s > 0)
    else:
        sigmoid = 1 / (1 + np.exp(-s))
        bar = bar * (sigmoid + s * sigmoid * (1 - sigmoid))
    return bar / o.temperature


def write(keys, values, tokens: list, pairs: list, o: Any, masked: bool) -> Any:
    """The memory after a chunk.

    Args:
        tokens: (q, Read) of every token of the chunk.
        pairs: (index of the token, weight of its loss, target).
        masked: whether a mask was given.

    Returns:
        keys, values, losses, address loss.
    """
    n_heads, _, n, _ = keys.shape
    count = np.zeros(len(values))
    for _, r in tokens:
        for slot in r.slots.ravel():
            count[slot] += 1
    alive = sum(weigh > 0 for _, weigh, _ in pairs) if masked else len(tokens)
    losses, value_bar, key_bar = [], np.zeros_like(values), np.zeros_like(keys)
    for index, weigh, target in pairs:
        q, r = tokens[index]
        error = r.out - target
        losses.append(weigh * np.mean(error**2))
        if o.rule == "reference":
            scale = alive / len(pairs) * n_heads * o.k
        else:
            square = np.sum(r.weights**2)
            scale = 1 / square if square else 0.0
        for slot, w in zip(r.slots.ravel(), r.weights.ravel(), strict=True):
            value_bar[slot] += scale / count[slot] * w * weigh * error
        if not o.values_only:
            out_bar = weigh * error / len(error) / len(pairs)
            bar = weights_gradient(r, values[r.slots] @ out_bar, o)
            half_bar = np.zeros((n_heads, 2, n))
            for h in range(n_heads):
                for k, slot in enumerate(r.slots[h]):
                    half_bar[h, 0, slot // n] += bar[h, k]
                    half_bar[h, 1, slot % n] += bar[h, k]
            key_bar += keys_gradient(keys, q, half_bar, o)
    address, address_bar = _address(keys, [q for q, _ in tokens], o)
    key_bar += address_bar
    if o.grad_clip:
        value_bar, key_bar = np.clip(value_bar, -1, 1), np.clip(key_bar, -1, 1)
    lr, wd = o.learning_rate, o.weight_decay
    keys = keys - lr * (key_bar + wd * keys)
    values = values - lr * (value_bar + wd * values)
    return keys, values, np.array(losses), address


def _address(keys: np.ndarray, queries: list, o: Any) -> tuple[float, np.ndarray]:
    n_heads, _, n, _ = keys.shape
    kept, total = min(o.k, n), len(queries) * n_heads
    weight = o.address_weight or 0.0
    looks = []
    for q in queries:
        scores = half_scores(keys, q, o)
        least = np.sort(scores, axis=-1)[..., -kept][..., None]
        grown = np.where(scores >= least, np.exp(scores - scores.max(-1)[..., None]), 0)
        looks.append(grown / grown.sum(-1)[..., None])
    mean = sum(look.sum(axis=0) for look in looks) / total
    loss = weight * np.sum(mean * np.log(mean + 1e-8))
    mean_bar = weight * (np.log(mean + 1e-8) + mean / (mean + 1e-8)) / total
    gradient = np.zeros_like(keys)
    for q, look in zip(queries, looks, strict=True):
        inner = np.sum(look * mean_bar, axis=-1, keepdims=True)
        gradient += keys_gradient(keys, q, look * (mean_bar - inner), o)
    return float(loss), gradient


def text(keys, values, q, v, gate, mask, o: Any, *, short_last: bool) -> dict[str, Any]:
    """Read and write sequences that share one memory, chunk by chunk.

    Args:
        q, v, gate, mask: [B, T, ...]; mask may be None.
        short_last: whether a last chunk of fewer than c tokens is written.
    """
    keys, values, q, v, gate = (
        np.array(np.asarray(x), np.float64) for x in (keys, values, q, v, gate)
    )
    q = q.reshape(*q.shape[:2], keys.shape[0], 2, -1)
    n_batch, n_tokens = q.shape[:2]
    out = np.zeros((n_batch, n_tokens, values.shape[1]))
    slots = np.zeros((n_batch, n_tokens, keys.shape[0], o.k), int)
    seen = {"losses": [], "address": [], "states": []}
    for start in range(0, n_tokens, o.chunk):
        stop = min(start + o.chunk, n_tokens)
        tokens, pairs = [], []
        for b in range(n_batch):
            for t in range(start, stop):
                r = read(keys, values, q[b, t], o)
                out[b, t], slots[b, t] = r.out, r.slots
                if t + o.lookahead < stop:
                    weigh = gate[b, t] * (1 if mask is None else mask[b, t])
                    pairs.append((len(tokens), weigh, v[b, t + o.lookahead]))
                tokens.append((q[b, t], r))
        if stop - start < o.chunk and not short_last:
            break
        keys, values, losses, address = write(
            keys, values, tokens, pairs, o, mask is not None
        )
        seen["losses"].append(losses.reshape(n_batch, -1))
        seen["address"].append(address)
        seen["states"].append((keys, values))
    return {"out": out, "slots": slots, "keys": keys, "values": values, **seen}
