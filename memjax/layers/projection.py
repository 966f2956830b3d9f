"""The linear map that every layer uses.

What: `projection`, a Linen Dense in the dtypes of the policy.
Why: one place says how a weight matrix is drawn, stored and multiplied.
When not: embeddings and heads; the model owns those.
"""

import math
from typing import Any

import flax.linen as nn
import jax
from jax import Array

from memjax.layers.precision import Dtypes


def projection(
    name: str,
    features: int,
    dtypes: Dtypes,
    *,
    use_bias: bool = False,
    scale: float = 1.0,
) -> nn.Dense:
    """A submodule [..., in] -> [..., features] of the module that calls this.

    Args:
        name: of the submodule; parameters `kernel` [in, features] and `bias`.
        features: output width.
        dtypes: stored as `params`, multiplied in `compute`.
        use_bias: with a bias, zero at the start.
        scale: factor on the standard deviation 1 / sqrt(in) of the initial weights.
    """
    return nn.Dense(
        features,
        use_bias=use_bias,
        name=name,
        dtype=dtypes.compute,
        param_dtype=dtypes.params,
        dot_general=_product,
        kernel_init=nn.initializers.variance_scaling(
            scale**2, "fan_in", "truncated_normal"
        ),
    )


def _product(x: Array, kernel: Array, axes: Any, **options: Any) -> Array:
    """[..., in] by [in, features], as the product of two matrices: with more axes, the
    gradient of the kernel would make a transposed copy of the output's, on a CPU."""
    del axes
    *lead, n_in = x.shape
    flat = x.reshape(math.prod(lead), n_in)
    out = jax.lax.dot_general(flat, kernel, (((1,), (0,)), ((), ())), **options)
    return out.reshape(*lead, kernel.shape[1])
