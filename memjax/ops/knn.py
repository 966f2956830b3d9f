"""Next tokens from nearest neighbours, and the mixture with a language model.

What: distances -> weights and probabilities of the neighbours' tokens; `interpolate`,
    which mixes them with a model's; `nearest`, the exact search that finds them.
Why: kNN-LM (arXiv:1911.00172) is the memory that needs no training, so the baseline of
    all others.
When not: keys on disk, and searches that are approximate; see evaluate.datastore.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from memjax.errors import ConfigError, ShapeError

BLOCK = 1024


def knn_weights(distances_NK: ArrayLike, temperature: float = 1.0) -> Array:
    """softmax(-distance / temperature) over the neighbours.

    Args:
        distances_NK: [..., K] squared distances, any float dtype; +inf where a
            neighbour is missing.
        temperature: > 0; 1 is the paper's.

    Returns:
        [..., K] in float32 or wider. A missing neighbour has weight exactly 0 and no
        gradient; so have all when all are missing, or K = 0. NaN stays NaN.

    Raises:
        ConfigError: a temperature that is not finite and positive.

    Source: arXiv:1911.00172 eq. 2, with squared distances as in its release
    (urvashik/knnlm fairseq/knnlm.py). The temperature is ours; neither has one.
    """
    return jnp.exp(_log_weights(distances_NK, temperature))


def knn_log_probs(
    distances_NK: ArrayLike,
    values_NK: ArrayLike,
    vocab_size: int,
    temperature: float = 1.0,
) -> Array:
    """log p of every token: the summed weights of the neighbours that hold it.

    Args:
        distances_NK, temperature: as in `knn_weights`.
        values_NK: integers [..., K], the neighbours' tokens; anything where a
            neighbour is missing.
        vocab_size: V.

    Returns:
        [..., V] in float32 or wider, -inf (gradient 0) for tokens that no neighbour
        holds: everywhere when all are missing. Sums are taken in log space, so a
        token's probability does not underflow. A value outside [0, V) makes its row
        NaN.

    Raises:
        ConfigError: as `knn_weights`. ShapeError: values unlike distances.

    Source: arXiv:1911.00172 eq. 2. Differs from its release: the whole vector, not the
    target's entry; and -inf where that has about -10000.
    """
    _check_values(distances_NK, values_NK)
    log_weights_NK = _log_weights(distances_NK, temperature)
    values_NK = jnp.asarray(values_NK)
    known_NK = (values_NK >= 0) & (values_NK < vocab_size)
    place_NK = jnp.where(known_NK, values_NK, 0)
    lost_NK = ~known_NK & (log_weights_NK != -jnp.inf)
    bottom_V = jnp.full((vocab_size,), -jnp.inf, log_weights_NK.dtype)

    def one(log_weights_K: Array, place_K: Array, lost_K: Array) -> Array:
        largest_V = bottom_V.at[place_K].max(jax.lax.stop_gradient(log_weights_K))
        largest_V = jnp.where(largest_V == -jnp.inf, 0, largest_V)
        terms_K = jnp.exp(log_weights_K - largest_V[place_K])
        sums_V = jnp.zeros_like(bottom_V).at[place_K].add(terms_K)
        return jnp.where(jnp.any(lost_K), jnp.nan, _safe_log(sums_V) + largest_V)

    for _ in range(log_weights_NK.ndim - 1):
        one = jax.vmap(one)
    return one(log_weights_NK, place_NK, lost_NK)


def knn_probs(
    distances_NK: ArrayLike,
    values_NK: ArrayLike,
    vocab_size: int,
    temperature: float = 1.0,
) -> Array:
    """exp of `knn_log_probs`: [..., V] of mass 1, or 0 where all are missing."""
    return jnp.exp(knn_log_probs(distances_NK, values_NK, vocab_size, temperature))


def target_log_probs(
    distances_NK: ArrayLike,
    values_NK: ArrayLike,
    targets_N: ArrayLike,
    temperature: float = 1.0,
) -> Array:
    """[...], the entries of `knn_log_probs` at targets_N [...], without forming V.

    Values may be any integers here. A target no neighbour holds has -inf. Raises as
    `knn_log_probs`, and ShapeError for targets unlike the rows of values.
    """
    _check_values(distances_NK, values_NK)
    if jnp.shape(targets_N) != jnp.shape(values_NK)[:-1]:
        raise ShapeError("targets", jnp.shape(targets_N), jnp.shape(values_NK)[:-1])
    log_weights_NK = _log_weights(distances_NK, temperature)
    is_target_NK = jnp.asarray(values_NK) == jnp.asarray(targets_N)[..., None]
    # A NaN row stays one, whatever its values are.
    of_target_NK = is_target_NK | jnp.isnan(log_weights_NK)
    return _log_sum(jnp.where(of_target_NK, log_weights_NK, -jnp.inf))


def interpolate(
    lm_log_probs: ArrayLike, knn_log_probs: ArrayLike, lam: float | Array
) -> Array:
    """log(lam * p_knn + (1 - lam) * p_lm), entry by entry.

    Args:
        lm_log_probs: any shape, log-probabilities of the model (-inf allowed).
        knn_log_probs: the same shape: whole vectors, or the targets' entries.
        lam: share of the neighbours in [0, 1]; an array broadcasts, and one inside jit
            is not checked. It carries no gradient.

    Returns:
        The promoted dtype, float32 or wider. lam = 0 gives lm_log_probs and lam = 1
        knn_log_probs, exactly; where both are -inf so is the mixture, with gradient 0.
        NaN of either stays. Where no neighbour exists at all the mixture has mass
        1 - lam: give lam = 0 there.

    Raises:
        ConfigError: a number lam outside [0, 1].

    Source: arXiv:1911.00172 eq. 3; the release does the same by logsumexp
    (fairseq/sequence_scorer.py).
    """
    if isinstance(lam, int | float) and not 0 <= lam <= 1:
        raise ConfigError("lam", lam, "0 <= lam <= 1")
    dtype = jnp.result_type(lm_log_probs, knn_log_probs, jnp.float32)
    share = jax.lax.stop_gradient(jnp.asarray(lam, dtype))
    # Not jnp.logaddexp, whose gradient at two -inf is NaN.
    terms = (
        jnp.asarray(lm_log_probs, dtype) + jnp.log1p(-share),
        jnp.asarray(knn_log_probs, dtype) + jnp.log(share),
    )
    return _log_sum(jnp.stack(jnp.broadcast_arrays(*terms), axis=-1))


class Neighbours(NamedTuple):
    """The nearest entries of each query.

    Attributes:
        distances: [N, K] squared distances, ascending; +inf where entries ran out.
        entries: int32 [N, K], indices of the keys; -1 there.
    """

    distances: Any
    entries: Any


def squared_distances(x: ArrayLike, y: ArrayLike) -> Array:
    """|x - y|^2 over the last axis of two arrays that broadcast, float32 or wider.

    From differences, not from |x|^2 + |y|^2 - 2xy, which cancels where it matters: for
    close neighbours. Equal keys therefore have equal distances, bit for bit.
    """
    dtype = jnp.result_type(x, y, jnp.float32)
    difference = jnp.asarray(x, dtype) - jnp.asarray(y, dtype)
    return jnp.sum(difference * difference, axis=-1)


def no_neighbours(queries_ND: Array, k: int) -> Neighbours:
    """What a search begins with: K missing neighbours for each query.

    Raises ConfigError for k < 1.
    """
    if k < 1:
        raise ConfigError("k", k, "k >= 1")
    shape = (queries_ND.shape[0], k)
    dtype = jnp.promote_types(queries_ND.dtype, jnp.float32)
    return Neighbours(jnp.full(shape, jnp.inf, dtype), jnp.full(shape, -1, jnp.int32))


def nearer(
    found: Neighbours,
    queries_ND: Array,
    keys_SD: Array,
    entries_S: Array,
) -> Neighbours:
    """The nearest of those found so far and one more block of keys.

    Args:
        found: of the blocks before, or `no_neighbours`.
        queries_ND: any float dtype.
        keys_SD: any float dtype; S may be 0.
        entries_S: int32 numbers of the keys, above those of the blocks before and
            ascending; a negative one leaves its key out.

    Returns:
        Ascending distances, equal ones by the lowest entry. A NaN distance counts as
        nearest and stays NaN, so a spoilt query, or key, gives NaN weights and never a
        believable neighbour; other queries do not notice.

    Cost: 3 * N * S * D operations and N * S distances in memory. No gradient.
    """
    if queries_ND.shape[-1] != keys_SD.shape[-1]:
        raise ShapeError("keys", keys_SD.shape, f"[S, {queries_ND.shape[-1]}]")
    k = found.distances.shape[-1]
    queries_ND, keys_SD = jax.lax.stop_gradient((queries_ND, keys_SD))
    distances_NS = squared_distances(queries_ND[:, None], keys_SD)
    distances_NS = jnp.where(entries_S >= 0, distances_NS, jnp.inf)
    distances = jnp.concatenate(
        [found.distances, distances_NS.astype(found.distances.dtype)], axis=-1
    )
    entries = jnp.concatenate(
        [found.entries, jnp.broadcast_to(entries_S, distances_NS.shape)], axis=-1
    )
    # Of equal scores the first is taken, and entries ascend.
    scores = jnp.where(jnp.isnan(distances), jnp.inf, -distances)
    _, places_NK = jax.lax.top_k(scores, k)
    distances_NK = jnp.take_along_axis(distances, places_NK, axis=-1)
    entries_NK = jnp.take_along_axis(entries, places_NK, axis=-1)
    return Neighbours(distances_NK, jnp.where(distances_NK == jnp.inf, -1, entries_NK))


def nearest(
    queries_ND: Array, keys_SD: Array, k: int, *, block: int = BLOCK
) -> Neighbours:
    """The k nearest keys of each query, exactly, `block` keys at a time.

    Args:
        queries_ND, keys_SD: any float dtypes; distances are taken in float32 or wider.
        k: >= 1; above S, neighbours are missing.
        block: keys compared at once; it does not change the result.

    Returns:
        See `nearer`.

    Raises:
        ConfigError: k or block < 1. ShapeError: the widths differ.

    Cost: 3 * N * S * D operations; memory N * (block + k), never N * S.
    """
    if block < 1:
        raise ConfigError("block", block, "block >= 1")
    n_keys = keys_SD.shape[0]
    found = no_neighbours(queries_ND, k)
    block = min(block, n_keys)
    if n_keys == 0:
        return found

    def add(number: Array, found: Neighbours) -> Neighbours:
        # The last block reaches back over keys it leaves out.
        first = jnp.minimum(number * block, n_keys - block)
        entries_S = first + jnp.arange(block, dtype=jnp.int32)
        keys = jax.lax.dynamic_slice_in_dim(keys_SD, first, block)
        entries_S = jnp.where(entries_S >= number * block, entries_S, -1)
        return nearer(found, queries_ND, keys, entries_S)

    return jax.lax.fori_loop(0, -(-n_keys // block), add, found)


def _check_values(distances_NK: ArrayLike, values_NK: ArrayLike) -> None:
    if jnp.shape(values_NK) != jnp.shape(distances_NK):
        raise ShapeError("values", jnp.shape(values_NK), jnp.shape(distances_NK))


def _log_weights(distances_NK: ArrayLike, temperature: float) -> Array:
    """log of `knn_weights`; -inf, with gradient 0, where a neighbour is missing."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ConfigError("temperature", temperature, "a finite number > 0")
    distances_NK = jnp.asarray(distances_NK)
    wide = jnp.promote_types(distances_NK.dtype, jnp.float32)
    distances_NK = distances_NK.astype(wide)
    missing_NK = distances_NK == jnp.inf
    distances_NK = jnp.where(missing_NK, 0, distances_NK)
    # The smallest distance is taken off before the division, which may overflow.
    least_N1 = jnp.min(
        jnp.where(missing_NK, jnp.inf, distances_NK),
        axis=-1,
        keepdims=True,
        initial=jnp.inf,
    )
    least_N1 = jax.lax.stop_gradient(jnp.where(least_N1 == jnp.inf, 0, least_N1))
    scores_NK = (least_N1 - distances_NK) / temperature
    total_N1 = _log_sum(jnp.where(missing_NK, -jnp.inf, scores_NK))[..., None]
    total_N1 = jnp.where(total_N1 == -jnp.inf, 0, total_N1)
    return jnp.where(missing_NK, -jnp.inf, scores_NK - total_N1)


def _log_sum(terms: Array) -> Array:
    """logsumexp over the last axis; of nothing, or of -inf alone, -inf, gradient 0."""
    largest = jnp.max(terms, axis=-1, keepdims=True, initial=-jnp.inf)
    largest = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
    total = jnp.sum(jnp.exp(terms - largest), axis=-1)
    return _safe_log(total) + largest[..., 0]


def _safe_log(x: Array) -> Array:
    """log x for x >= 0, with -inf and gradient 0 at 0."""
    return jnp.where(x == 0, -jnp.inf, jnp.log(jnp.where(x == 0, 1, x)))
