"""Exponential moving average of the dense weights, for evaluation.

What: `init_ema`, `update_ema` and `ema_params`, pure functions on trees.
Why: averaged dense weights evaluate better at a constant rate.
When not: tables; a second copy of the largest arrays would double the memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from memjax.optim.labels import masked_by

AVERAGED = ("matrix", "vector", "embedding")


def init_ema(params: Any, labels: Any) -> Any:
    """float32 copies of the dense weights; `optax.MaskedNode()` elsewhere.

    Tables are not averaged and frozen weights need no average.
    """
    dense = masked_by(labels, params, AVERAGED)
    return jax.tree.map(
        lambda p: jnp.array(p, dtype=jnp.promote_types(p.dtype, jnp.float32)), dense
    )


def update_ema(ema: Any, params: Any, decay: float, step: Any = None) -> Any:
    """decay * ema + (1 - decay) * params on the dense weights.

    Args:
        ema: from `init_ema`.
        params: the parameters after the step.
        decay: 0 <= decay < 1.
        step: number of steps done so far; when given, decay is at most
            (1 + step) / (10 + step), so that the initial weights fade early.
    """
    rate = jnp.asarray(decay, jnp.float32)
    if step is not None:
        t = jnp.asarray(step, jnp.float32)
        rate = jnp.minimum(rate, (1 + t) / (10 + t))

    def blend(mean: Any, param: Any) -> Any:
        if isinstance(mean, optax.MaskedNode):
            return mean
        new = param.astype(mean.dtype)
        return new + rate.astype(mean.dtype) * (mean - new)

    return jax.tree.map(blend, ema, params, is_leaf=_is_masked)


def ema_params(ema: Any, params: Any) -> Any:
    """Parameters for evaluation: averages where there are any, else `params`.

    Dtypes are those of `params`.
    """
    return jax.tree.map(
        lambda mean, param: param if _is_masked(mean) else mean.astype(param.dtype),
        ema,
        params,
        is_leaf=_is_masked,
    )


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)
