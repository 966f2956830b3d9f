"""A slow product-key memory in numpy float64: one token, one head, one slot at a time.

Linear or identity queries; everything that follows them, outside training.
"""

import numpy as np

from tests.oracles.product_keys import best_slots, half_scores, read_weights


def product_key_memory(params, config, x_D, order_HS=None) -> np.ndarray:
    """The read [E] of one token from our parameters as float64 arrays.

    order_HS: the rows of the slots of each head, where the config permutes them.
    """
    heads = config.n_heads
    x = _layer_norm(x_D, params["input_norm"]) if config.input_norm else x_D
    if config.query == "identity":
        q = np.stack([x] * heads)
    else:
        net = params["query"]
        q = (x @ net["kernel_0"] + net.get("bias_0", 0.0)).reshape(heads, -1)
    q_HXC = q.reshape(heads, 1 if config.flat else 2, -1)
    if config.normalize_query:
        q_HXC = q_HXC / np.linalg.norm(q_HXC, axis=-1, keepdims=True)
    keys = params["keys"]
    if config.flat:
        keys = (keys if keys.ndim == 3 else np.stack([keys] * heads))[:, None]
    elif keys.ndim == 2:
        keys = np.stack([np.stack([keys] * 2)] * heads)
    halves_HXN = half_scores(q_HXC, keys)
    options = {
        name: getattr(config, name)
        for name in ("activation", "over", "temperature", "subtract", "normalize")
    }
    if config.k is None:
        read = _all_slots(halves_HXN, params["table"], options)
    else:
        read = _best_slots(halves_HXN, params["table"], config, options, order_HS)
    return _layer_norm(read, params["output_norm"]) if config.output_norm else read


def _best_slots(halves_HXN, table, config, options, order_HS):
    found = []
    for halves in halves_HXN:
        if config.flat:  # a grid of one column
            halves = [halves[0], [0.0]]
        found.append(best_slots(halves, config.k))
    weights = read_weights(np.array([scores for scores, _ in found]), **options)
    reads = np.zeros((config.n_heads, table.shape[1]))
    for head, (_, slots) in enumerate(found):
        for slot, weight in zip(slots, weights[head], strict=True):
            row = slot if order_HS is None else order_HS[head][slot]
            reads[head] += weight * table[row % len(table)]
    return reads.reshape(-1) if config.slice_values else reads.sum(axis=0)


def _all_slots(halves_HXN, table, options):
    scores = np.zeros(len(table))
    for halves in halves_HXN:
        for slot in range(len(table)):
            if len(halves) == 1:
                scores[slot] += halves[0][slot]
            else:
                i, j = divmod(slot, halves.shape[1])
                scores[slot] += halves[0][i] + halves[1][j]
    (weights,) = read_weights(scores[None], **options)
    return sum(w * row for w, row in zip(weights, table, strict=True))


def _layer_norm(x, params):
    centred = x - x.mean()
    normed = centred / np.sqrt((centred**2).mean() + 1e-5)
    return normed * params["scale"] + params["bias"]
