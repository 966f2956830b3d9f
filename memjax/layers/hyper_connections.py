"""The learned mixing of M residual streams at one sub-block.

What: parameters of `ops.hyper_connections` and their initial values.
Why: every sub-block (attention, feed-forward, a memory) mixes by weights of its own.
When not: what the streams do with the weights, and in which of the two forms, is
    `ops.hyper_connections.hyper_residual`.
"""

import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from memjax.layers.precision import Dtypes
from memjax.ops.hyper_connections import (
    MIXING_EPS,
    MIXING_ITERATIONS,
    Mixing,
    check_streams,
    mixing,
    n_mixes,
    stream_mixes,
)

FIRST_SCALE = 0.01
KERNEL_STD = 0.02
IDENTITY_LOGIT = 4.0
SURE_LOGIT = 20.0  # for M = 1, where logit(1 / M) is infinite


class HyperConnection(nn.Module):
    """Streams [..., M, D] -> `Mixing` (pre [..., M], post [..., M], comb [..., M, M]).

    Parameters: `kernel` [M * D, (2 + M) * M], normal(0.02); `scale` [3], 0.01; `base`
    [(2 + M) * M], with logit(1 / M) for pre, 0 for post (weight 1) and 4 on the
    diagonal of comb, so that a model starts near M separate streams of which each
    sub-block reads the mean. The published code says nothing of initial values; these
    are ours. Weights are computed in the accumulation dtype, at least float32.

    Attributes:
        n_streams: M >= 1.
        n_iterations: of the Sinkhorn loop, >= 1.
        eps: of the Sinkhorn loop and of pre.
        norm_eps: of the normalisation of the streams.

    With M = 1 the weights are 1 up to `eps` and what the kernel adds to post; a plain
    residual is then the better choice.

    Raises:
        ConfigError: a number above is out of range.
    """

    n_streams: int
    dtypes: Dtypes
    n_iterations: int = MIXING_ITERATIONS
    eps: float = MIXING_EPS
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_streams(self.n_streams, self.n_iterations, self.eps, self.norm_eps)
        super().__post_init__()

    @nn.compact
    def __call__(self, stream: Array) -> Mixing:
        n_streams, params = self.n_streams, self.dtypes.params
        n, acc = n_mixes(n_streams), self.dtypes.accumulation
        kernel = self.param(
            "kernel",
            nn.initializers.normal(KERNEL_STD),
            (n_streams * stream.shape[-1], n),
            params,
        )
        scale = self.param("scale", nn.initializers.constant(FIRST_SCALE), (3,), params)
        base = self.param("base", _first_base, (n,), params)
        wide = jnp.promote_types(stream.dtype, acc)
        return mixing(
            stream_mixes(stream.astype(wide), kernel, self.norm_eps),
            scale,
            base,
            n_streams=n_streams,
            n_iterations=self.n_iterations,
            eps=self.eps,
        )


def _first_base(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    del key
    n_streams = math.isqrt(shape[0] + 1) - 1  # (2 + M) * M = (M + 1) ** 2 - 1
    share = -math.log(n_streams - 1) if n_streams > 1 else SURE_LOGIT
    comb = IDENTITY_LOGIT * np.eye(n_streams)
    base = np.concatenate(
        [np.full(n_streams, share), np.zeros(n_streams), comb.ravel()]
    )
    return jnp.asarray(base, dtype)
