"""The linear map that every layer uses.

What: `projection`, a Linen Dense in the dtypes of the policy.
Why: one place says how a weight matrix is drawn, stored and multiplied.
When not: embeddings and heads; the model owns those.
"""

import flax.linen as nn

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
        kernel_init=nn.initializers.variance_scaling(
            scale**2, "fan_in", "truncated_normal"
        ),
    )
