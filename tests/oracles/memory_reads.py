"""Slow memory layers in numpy float64: one token, one head, one slot at a time."""

import math

import numpy as np

from tests.oracles.product_keys import best_slots, half_scores, read_weights


def gelu(value: float) -> float:
    return value * 0.5 * (1 + math.erf(value / math.sqrt(2)))


def silu(values: np.ndarray) -> np.ndarray:
    return values / (1 + np.exp(-values))


def expert_sum(down, up, ids, weights, x) -> np.ndarray:
    """sum of weights_k * gelu(x . down[ids_k]) * up[ids_k] of one token."""
    out = np.zeros(up.shape[1])
    for row, weight in zip(ids, weights, strict=True):
        out += weight * gelu(float(down[row] @ x)) * up[row]
    return out


def reads(q_HXC, keys_HXNC, k: int, activation: str = "softmax", half_k=None):
    """Slots and weights [H, K] of one token."""
    scores, slots = [], []
    for halves in half_scores(q_HXC, keys_HXNC):
        if half_k is not None:
            lowest = np.sort(halves, axis=-1)[:, -half_k, None]
            halves = np.where(halves >= lowest, halves, -np.inf)
        best = best_slots(halves, k)
        scores.append(best[0])
        slots.append(best[1])
    return np.array(slots), read_weights(np.array(scores), activation)


def memory_plus(params, config, x_D) -> np.ndarray:
    """Output of a Memory+ for one token, from our parameters as float64 arrays."""
    halves = (config.n_heads, 2, config.key_width // 2)
    q, keys = x_D @ params["query"]["kernel"], params["keys"]
    if config.query_bias:
        q = q + params["query"]["bias"]
    gain = params.get("query_norm", {}).get("scale")
    if config.query_norm == "query":
        q = q / np.sqrt(np.mean(q * q) + 1e-6) * gain
    q_HXC = q.reshape(halves)
    if config.query_norm == "query_key":
        mean = np.mean(q_HXC * q_HXC, axis=-1, keepdims=True)
        q_HXC = q_HXC / np.sqrt(mean + 1e-6) * gain
        keys = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    slots, weights = (a.ravel() for a in reads(q_HXC, keys, config.k))
    if config.form == "experts":
        out = expert_sum(params["down_table"], params["up_table"], slots, weights, x_D)
    else:
        out = np.zeros(params["table"].shape[1])
        for slot, weight in zip(slots, weights, strict=True):
            out += weight * params["table"][slot]
    if config.form == "swilu":
        out = out * silu(x_D @ params["swilu"]["kernel"] + params["swilu"]["bias"])
    if "value" in params:
        out = out @ params["value"]["kernel"] + params["value"]["bias"]
    if config.gate == "sigmoid":
        score = x_D @ params["token_gate"]["kernel"] + params["token_gate"]["bias"]
        out = out / (1 + np.exp(-score))
    return out


def peer(params, config, x_D) -> np.ndarray:
    """Output of a PEER for one token, from our parameters as float64 arrays."""
    n_slots = config.n_sub_keys**2
    if config.input_norm:
        length = np.linalg.norm(x_D)
        x_D = x_D / length * math.sqrt(len(x_D)) * (1 + params["input_gain"])
    halves = (config.n_heads, 2, -1)
    q_HXC = (x_D @ params["query"]["kernel"]).reshape(halves)
    slots, weights = reads(
        q_HXC, params["keys"], config.k, config.activation, config.half_k
    )
    out = np.zeros(len(x_D))
    for head in range(config.n_heads):
        ids = slots[head] + (head * n_slots if config.separate_tables else 0)
        out += expert_sum(
            params["down_table"], params["up_table"], ids, weights[head], x_D
        )
    return out
