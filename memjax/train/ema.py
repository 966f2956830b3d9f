"""A running average of chosen parameters.

What: init, update and merge functions for an exponential moving average in float32.
Why: averaged dense weights evaluate better than the last ones at no cost in gradients.
When not: huge tables stay out of it (`select` false): an average doubles their memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memjax.errors import ConfigError


class Ema(NamedTuple):
    """Three functions: `init(params)`, `update(ema, params)`, `merge(params, ema)`."""

    init: Callable[[Any], Any]
    update: Callable[[Any, Any], Any]
    merge: Callable[[Any, Any], Any]


def make_ema(decay: float, select: Any) -> Ema:
    """Average of the selected leaves: ema <- decay * ema + (1 - decay) * params.

    Args:
        decay: between 0 and 1, both excluded.
        select: a tree of bools like the parameters; unselected leaves are None in the
            average and come from the parameters when merged.

    Returns:
        `init` copies the selected leaves to float32 (so no bias correction is needed),
        `update` moves the average, `merge` gives the parameters to evaluate with, each
        in the parameter's dtype.

    Raises:
        ConfigError: decay out of range.
    """
    if not 0.0 < decay < 1.0:
        raise ConfigError("train.ema_decay", decay, "between 0 and 1")

    def init(params: Any) -> Any:
        def start(chosen: bool, leaf: jax.Array) -> jax.Array | None:
            return jnp.array(leaf, jnp.float32) if chosen else None

        return jax.tree.map(start, select, params)

    def update(ema: Any, params: Any) -> Any:
        def move(average: jax.Array | None, leaf: jax.Array) -> jax.Array | None:
            if average is None:
                return None
            return average + (1.0 - decay) * (leaf.astype(jnp.float32) - average)

        return jax.tree.map(move, ema, params, is_leaf=lambda x: x is None)

    def merge(params: Any, ema: Any) -> Any:
        def choose(average: jax.Array | None, leaf: jax.Array) -> jax.Array:
            return leaf if average is None else average.astype(leaf.dtype)

        return jax.tree.map(choose, ema, params, is_leaf=lambda x: x is None)

    return Ema(init, update, merge)
