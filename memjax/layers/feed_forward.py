"""SwiGLU feed-forward block.

What: W_out (silu(W_gate x) * W_up x), no biases.
Why: the dense baseline that every memory is compared with.
When not: mixtures of experts are modules of their own.
"""

import flax.linen as nn
from jax import Array

from memjax.layers.precision import Dtypes
from memjax.layers.projection import projection
from memjax.parallel.logical_axes import ActivationSharding, constrain


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202 section 2): [..., D] -> [..., D].

    Attributes:
        d_ff: inner width F.
        out_scale: factor on the standard deviation of the output projection's
            initialiser (a residual branch wants 1 / sqrt(branches)).
        activations: how the inner activations are divided; None: not stated.
    """

    d_ff: int
    dtypes: Dtypes
    out_scale: float = 1.0
    activations: ActivationSharding | None = None

    @nn.compact
    def __call__(self, h: Array) -> Array:
        gate = projection("gate", self.d_ff, self.dtypes)(h)
        inner = nn.silu(gate) * projection("up", self.d_ff, self.dtypes)(h)
        names = ("batch", *(None,) * (h.ndim - 2), "mlp")
        inner = constrain(self.activations, inner, *names)
        out = projection("out", h.shape[-1], self.dtypes, scale=self.out_scale)
        return out(inner)
