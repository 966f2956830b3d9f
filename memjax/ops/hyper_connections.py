"""Hyper-connections: M residual streams, mixed by matrices that keep their mean size.

What: the three mixing weights of a token, the Sinkhorn loop that makes one of them
    nearly doubly stochastic, and how a sub-block reads and writes M streams with them.
Why: with one stream every layer must write where every other reads; M streams with a
    bounded mixing keep the residual path stable in deep models.
When not: with M = 1 a plain residual does the same and costs nothing.

Source: arXiv:2512.24880 (mHC), and Block.hc_* of deepseek-ai/DeepSeek-V4.1-Flash
inference/model.py, whose details (columns last, eps in both places) are followed where
the paper prints others. The learned gain on the streams that some ports add is left
out: the projection absorbs it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from memjax.arrays import check_shape
from memjax.errors import ConfigError, ShapeError

MIXING_ITERATIONS = 20
MIXING_EPS = 1e-6


class Mixing(NamedTuple):
    """The mixing weights of one sub-block, per token, in float32 or wider.

    Attributes:
        pre: [..., M], weight of each stream in the input of a sub-block, > 0.
        post: [..., M], weight of the sub-block's output in each stream, in (0, 2).
        comb: [..., M, M], comb[source, destination]; non-negative, columns sum to 1.
    """

    pre: Array
    post: Array
    comb: Array


def n_mixes(n_streams: int) -> int:
    """Numbers that decide the mixing of a token: (2 + M) * M."""
    return (2 + n_streams) * n_streams


def stream_mixes(stream: Array, kernel: Array, norm_eps: float) -> Array:
    """The raw mixing numbers of each token: its streams, projected and normalised.

    Args:
        stream: [..., M, D], float; flattened stream by stream.
        kernel: [M * D, (2 + M) * M]; columns are pre, post, then comb row by row.
        norm_eps: added to the mean square, which is one number per token, taken over
            all M * D entries. A token of zeros has mixes 0, and with a norm_eps near 0
            gradients of the size norm_eps ** -0.5.

    Returns:
        [..., (2 + M) * M] in float32 or wider.

    Raises:
        ShapeError: the kernel does not fit the streams.
    """
    n_streams, width = stream.shape[-2:]
    check_shape("kernel", kernel, (n_streams * width, n_mixes(n_streams)))
    flat = _wide(stream).reshape(*stream.shape[:-2], n_streams * width)
    mixes = jnp.matmul(
        flat, kernel.astype(flat.dtype), precision=jax.lax.Precision.HIGHEST
    )
    return mixes * jax.lax.rsqrt(jnp.mean(flat * flat, -1, keepdims=True) + norm_eps)


def mixing(
    mixes: Array,
    scale: Array,
    base: Array,
    *,
    n_streams: int,
    n_iterations: int = MIXING_ITERATIONS,
    eps: float = MIXING_EPS,
) -> Mixing:
    """Mixing weights from the raw numbers of `stream_mixes`.

    pre = sigmoid(scale[0] * raw + base) + eps, post = 2 * sigmoid(scale[1] * raw +
    base), comb = `sinkhorn_mixing` of scale[2] * raw + base.

    Args:
        mixes: [..., (2 + M) * M].
        scale: [3], one factor each for pre, post and comb.
        base: [(2 + M) * M], what is added.
        n_streams: M >= 1.
        n_iterations, eps: of the Sinkhorn loop.

    Returns:
        `Mixing` in the dtype of `mixes`.

    Raises:
        ShapeError: the arrays do not belong to M streams.
        ConfigError: n_streams or n_iterations below 1, eps below 0.
    """
    check_streams(n_streams, n_iterations, eps)
    n = n_mixes(n_streams)
    if mixes.shape[-1] != n:
        raise ShapeError("mixes", tuple(mixes.shape), f"[..., {n}]")
    check_shape("scale", scale, (3,))
    check_shape("base", base, (n,))
    mixes, scale, base = _wide(mixes), _wide(scale), _wide(base)
    cut = (n_streams, 2 * n_streams)
    raw_pre, raw_post, raw_comb = jnp.split(mixes, cut, axis=-1)
    base_pre, base_post, base_comb = jnp.split(base, cut)
    logits = scale[2] * raw_comb + base_comb
    return Mixing(
        pre=jax.nn.sigmoid(scale[0] * raw_pre + base_pre) + eps,
        post=2 * jax.nn.sigmoid(scale[1] * raw_post + base_post),
        comb=sinkhorn_mixing(
            logits.reshape(*logits.shape[:-1], n_streams, n_streams),
            n_iterations=n_iterations,
            eps=eps,
        ),
    )


def sinkhorn_mixing(
    logits: Array,
    *,
    n_iterations: int = MIXING_ITERATIONS,
    eps: float = MIXING_EPS,
) -> Array:
    """A matrix with columns that sum to 1, and rows too when the loop has converged.

    C = softmax of each row + eps; columns are divided by their sum + eps; then
    n_iterations - 1 times rows and again columns. The last step takes columns, so every
    destination gets a convex combination of the sources, up to eps / (its last sum).

    Args:
        logits: [..., M, M], first index source, second destination.
        n_iterations: >= 1, static.
        eps: added to the entries once and to every sum.

    Returns:
        [..., M, M], dtype of `logits`.

    Cost: n_iterations * 2 sums over M * M numbers per token; as many are kept for the
    backward pass.
    """

    def columns(comb: Array) -> Array:
        return comb / (jnp.sum(comb, axis=-2, keepdims=True) + eps)

    def rows_and_columns(comb: Array, _: None) -> tuple[Array, None]:
        return columns(comb / (jnp.sum(comb, axis=-1, keepdims=True) + eps)), None

    comb = columns(jax.nn.softmax(logits, axis=-1) + eps)
    return jax.lax.scan(rows_and_columns, comb, None, length=n_iterations - 1)[0]


def expand(x: Array, n_streams: int) -> Array:
    """M equal streams [..., M, D] of [..., D]: how a model begins."""
    return jnp.repeat(x[..., None, :], n_streams, axis=-2)


def first_pre(x: Array, n_streams: int) -> Array:
    """One-hot [..., M] on stream 0 for x [..., D]: how the single-pass form begins."""
    pre = jax.nn.one_hot(0, n_streams, dtype=jnp.promote_types(x.dtype, jnp.float32))
    return jnp.broadcast_to(pre, (*x.shape[:-1], n_streams))


def collapse(stream: Array, pre: Array) -> Array:
    """sum_k pre[k] * stream[k]: [..., M, D], [..., M] -> [..., D], dtype of `stream`.

    Ones for `pre` add the streams up, which ends a model of the paper's form.
    """
    return jnp.sum(_wide(stream) * pre[..., None], axis=-2).astype(stream.dtype)


def merge(stream: Array, out: Array, post: Array, comb: Array) -> Array:
    """Streams after a sub-block: post[m] * out + sum_k comb[k, m] * stream[k].

    Args:
        stream: [..., M, D]; out: [..., D]; post: [..., M]; comb: [..., M, M].

    Returns:
        [..., M, D] in the dtype of `stream`; sums in float32 or wider. With M = 1 and
        post = comb = 1 it is `stream + out`, bit for bit.
    """
    mixed = jnp.einsum(
        "...km,...kd->...md",
        comb,
        _wide(stream),
        precision=jax.lax.Precision.HIGHEST,
    )
    written = post[..., None] * _wide(out)[..., None, :]
    return (mixed + written).astype(stream.dtype)


def hyper_residual(
    stream: Array,
    mixing: Mixing,
    branch: Callable[[Array], Array],
    *,
    pre: Array | None = None,
) -> Array:
    """One sub-block around M streams: collapse, `branch`, merge.

    Args:
        stream: [..., M, D].
        mixing: of this stream and sub-block.
        branch: [..., D] -> [..., D], norm included, without the residual.
        pre: [..., M]. None: the sub-block's own `mixing.pre`, the paper's form. The
            single-pass form of DeepSeek-V4.1 hands in the `pre` of the sub-block before
            (at the start `first_pre`), and after the last sub-block collapses the
            streams with the one that is left over.

    Returns:
        Streams [..., M, D].
    """
    out = branch(collapse(stream, mixing.pre if pre is None else pre))
    return merge(stream, out, mixing.post, mixing.comb)


def check_streams(
    n_streams: int, n_iterations: int, eps: float, norm_eps: float = 0.0
) -> None:
    """ConfigError unless these numbers describe a mixing."""
    for field, value in (("n_streams", n_streams), ("n_iterations", n_iterations)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(field, value, "an integer >= 1")
    for field, value in (("eps", eps), ("norm_eps", norm_eps)):
        if not 0 <= value < float("inf"):
            raise ConfigError(field, value, "a finite number >= 0")


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
