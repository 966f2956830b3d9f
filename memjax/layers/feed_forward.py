"""SwiGLU feed-forward block.

What: W_out (silu(W_gate x) * W_up x), no biases.
Why: the dense baseline that every memory is compared with.
When not: mixtures of experts are modules of their own.
"""

import flax.linen as nn
from jax import Array

from memjax.layers.precision import Dtypes


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202 section 2): [..., D] -> [..., D].

    Attributes:
        d_ff: inner width F.
        out_scale: factor on the standard deviation of the output projection's
            initialiser (a residual branch wants 1 / sqrt(branches)).
    """

    d_ff: int
    dtypes: Dtypes
    out_scale: float = 1.0

    @nn.compact
    def __call__(self, h: Array) -> Array:
        def dense(name: str, width: int, scale: float = 1.0) -> nn.Dense:
            return nn.Dense(
                width,
                use_bias=False,
                name=name,
                dtype=self.dtypes.compute,
                param_dtype=self.dtypes.params,
                kernel_init=nn.initializers.variance_scaling(
                    scale**2, "fan_in", "truncated_normal"
                ),
            )

        inner = nn.silu(dense("gate", self.d_ff)(h)) * dense("up", self.d_ff)(h)
        return dense("out", h.shape[-1], self.out_scale)(inner)
