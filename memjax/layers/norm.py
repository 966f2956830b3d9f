"""RMS normalisation with a learned gain.

What: x * rsqrt(mean(x^2) + eps) * scale over the last axis; `RMSNorm` of one stream,
    `BranchNorm` of several, `BranchGains` its gains.
Why: the backbone and the memory gates use the same one.
When not: normalising without a gain is `ops.gates.rms_normalize`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array


class RMSNorm(nn.Module):
    """RMSNorm over the last axis (arXiv:1910.07467), one gain per entry of `axes`.

    Attributes:
        eps: added to the mean square.
        n_gain_axes: trailing axes that own a gain each: 1 gives scale [D], 2 gives
            scale [M, D] (one per branch). Statistics are always over the last axis.
        accumulation: dtype of the statistics.

    Output has the input's dtype.
    """

    eps: float = 1e-6
    n_gain_axes: int = 1
    param_dtype: Any = jnp.float32
    accumulation: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = x.shape[-self.n_gain_axes :]
        scale = self.param("scale", nn.initializers.ones, shape, self.param_dtype)
        return _normalized(x, scale, self.eps, self.accumulation)


class BranchNorm(nn.Module):
    """RMSNorm of one of M branches [..., D], each with its own gain: scale [M, D].

    Attributes: n_branches, M; the others as in `RMSNorm`. Call it for each branch: on
    a CPU, XLA takes several times as long over reductions of an array with an axis M.
    """

    n_branches: int
    eps: float = 1e-6
    param_dtype: Any = jnp.float32
    accumulation: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, branch: int) -> Array:
        shape = (self.n_branches, x.shape[-1])
        scale_MD = self.param("scale", nn.initializers.ones, shape, self.param_dtype)
        return _normalized(x, scale_MD[branch], self.eps, self.accumulation)


class BranchGains(nn.Module):
    """The gains of a `BranchNorm` alone, scale [M, D], for a norm that is part of
    something else; see `ops.gates.normalized_dot`."""

    n_branches: int
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, width: int) -> Array:
        shape = (self.n_branches, width)
        return self.param("scale", nn.initializers.ones, shape, self.param_dtype)


def _normalized(x: Array, scale: Array, eps: float, accumulation: Any) -> Array:
    wide = x.astype(accumulation)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale.astype(accumulation)).astype(x.dtype)
