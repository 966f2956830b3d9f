"""How evenly a batch of queries uses the sub-keys.

What: the entropy of the mean look of all tokens at the sub-keys of each half.
Why: as an auxiliary loss (negated) it keeps a learned addressing from collapsing on a
    few sub-keys.
When not: fast weights, whose release pools heads; see fast_weight_chunk.
"""

import jax.numpy as jnp
from jax import Array, lax

from memjax.ops.read_weights import read_weights

EPS = 1e-8


def address_entropy(scores_HXN: Array, k: int, real: Array) -> Array:
    """Entropy in nats of where tokens look, both halves added, the mean over heads.

    In each half a token looks at its best min(k, N) sub-keys (and those that tie with
    the last) with the softmax of their scores, p is the mean of that over the tokens,
    and the entropy is -sum p log(p + 1e-8).

    Args:
        scores_HXN: [..., H, 2, N] scores of the sub-keys, any float dtype.
        k: slots read by a head, at least 1.
        real: bool [...]; only these tokens count.

    Returns:
        A scalar in float32 or wider, between 0 and 2 log N up to 2e-8 * N; 0 when no
        token counts. A NaN score of a real token makes it NaN.

    Cost: one top-k and one softmax of N by half, head and token.
    Source: arXiv:2601.00671 eqs. 16-18. Differs: each head has its own p, since sub-key
    i of one head and of another have nothing in common; padding does not count.
    """
    wide_HXN = scores_HXN.astype(jnp.promote_types(scores_HXN.dtype, jnp.float32))
    kept = min(k, scores_HXN.shape[-1])
    least = lax.stop_gradient(lax.top_k(wide_HXN, kept)[0][..., -1:])
    look_HXN = read_weights(jnp.where(wide_HXN < least, -jnp.inf, wide_HXN))
    look_HXN = jnp.where(real[..., None, None, None], look_HXN, 0)
    n_tokens = jnp.maximum(jnp.sum(real), 1).astype(look_HXN.dtype)
    mean_HXN = jnp.sum(look_HXN, axis=tuple(range(look_HXN.ndim - 3))) / n_tokens
    entropy_HX = -jnp.sum(mean_HXN * jnp.log(mean_HXN + EPS), axis=-1)
    return jnp.mean(jnp.sum(entropy_HX, axis=-1))
