"""Batch normalisation that does not look at padding.

What: `MaskedBatchNorm`: statistics over the real positions of a batch, and their
    running averages.
Why: queries of product keys are normalised so, and padding would shift both.
When not: the stream of the model; use `RMSNorm`, which looks at one position.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

BATCH_STATS = "batch_stats"


class MaskedBatchNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * scale + bias for every feature.

    Parameters `scale` and `bias` have the shape of the features (ones and zeros at the
    start), and so have `mean` and `var` (zeros and ones) of the collection
    "batch_stats", which are kept in float32 or wider.

    While training, statistics are those of the batch, over all its real positions.
    They mix sequences and look ahead in time, so the layer is not causal then; with
    the batch divided over devices they are still those of the whole batch. Otherwise
    the running averages are used and every position stands alone.

    Running averages move by `momentum` towards the batch when it trains and the
    collection is mutable. The batch is normalised by its biased variance, the average
    takes the unbiased one (times n / (n - 1), n real positions). One real position has
    no unbiased variance: the average of the variance stays. A batch of padding alone
    leaves both averages as they are.

    A value that is not finite at a real position spoils its feature for the batch.

    Attributes:
        eps, momentum: as in torch's BatchNorm1d, which this equals without padding.
        learned: False: no gradient reaches scale and bias.

    Source: arXiv:1502.03167; facebookresearch/XLM query.py uses it on queries and
    counts padding, which we do not.
    """

    eps: float = 1e-5
    momentum: float = 0.1
    param_dtype: Any = jnp.float32
    learned: bool = True

    @nn.compact
    def __call__(self, x: Array, mask: Array, *, train: bool) -> Array:
        """Normalise.

        Args:
            x: [..., features]; the features may have several axes.
            mask: bool [...], the leading axes of `x`; True at real positions.
            train: use and follow the statistics of the batch.

        Returns:
            Like `x`, in its dtype promoted to at least float32, padding included.
        """
        lead, shape = tuple(range(mask.ndim)), x.shape[mask.ndim :]
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        acc = wide.dtype
        mean_of = self.variable(BATCH_STATS, "mean", jnp.zeros, shape, acc)
        var_of = self.variable(BATCH_STATS, "var", jnp.ones, shape, acc)
        if train:
            real = mask.reshape(mask.shape + (1,) * len(shape))
            n = jnp.sum(mask).astype(acc)
            share = jnp.maximum(n, 1)
            mean = jnp.sum(jnp.where(real, wide, 0), axis=lead) / share
            centred = jnp.where(real, wide - mean, 0)
            var = jnp.sum(centred * centred, axis=lead) / share
            if self.is_mutable_collection(BATCH_STATS) and not self.is_initializing():
                unbiased = var * n / jnp.maximum(n - 1, 1)
                self._follow(mean_of, mean, n >= 1)
                self._follow(var_of, unbiased, n >= 2)
        else:
            mean, var = mean_of.value.astype(acc), var_of.value.astype(acc)
        scale = self.param("scale", nn.initializers.ones, shape, self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, shape, self.param_dtype)
        if not self.learned:
            scale, bias = jax.lax.stop_gradient((scale, bias))
        normed = (wide - mean) * jax.lax.rsqrt(var + self.eps)
        return normed * scale.astype(acc) + bias.astype(acc)

    def _follow(self, average: Any, value: Array, known: Array) -> None:
        old = average.value
        moved = (1 - self.momentum) * old + self.momentum * jax.lax.stop_gradient(value)
        average.value = jnp.where(known, moved, old)
