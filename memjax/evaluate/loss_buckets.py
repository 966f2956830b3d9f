"""Loss with and without the memory, for groups of tokens.

What: `gate_buckets` groups tokens by the gate, `frequency_buckets` by how often their
    n-gram occurs in the training text; `quantiles` of gates.
Why: a mean hides whether the gate is open where the memory helps, and whether the
    memory helps on the tail it is meant for.
When not: bits per byte of a split; see bits_per_byte.
"""

from collections.abc import Sequence

import numpy as np

from memjax.errors import ShapeError

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
N_BUCKETS = 10
# Lowest count of each bucket.
FREQUENCY_EDGES = (0, 1, 2, 4, 16)

Bucket = dict[str, float | str]


def quantiles(values: np.ndarray) -> dict[str, float]:
    """ "q01" .. "q99" and "mean" of all values; NaN of none, or of a NaN among them."""
    if values.size == 0:
        return {**{_name(q): float("nan") for q in QUANTILES}, "mean": float("nan")}
    found = np.quantile(values.astype(np.float64), QUANTILES)
    names = map(_name, QUANTILES)
    mean = float(np.mean(values, dtype=np.float64))
    return dict(zip(names, map(float, found), strict=True)) | {"mean": mean}


def mean_losses(
    chosen: np.ndarray, nats_P: np.ndarray, nats_without_P: np.ndarray
) -> Bucket:
    """Loss of some tokens.

    Args:
        chosen: indices of the tokens.
        nats_P, nats_without_P: loss of each token, with the memory and without it.

    Returns:
        n_tokens; share of all tokens; mean nats and nats_without, added in float64; and
        gain, the second less the first, so that a positive gain is the memory's. Of no
        tokens the means are NaN.
    """
    n = len(chosen)
    nats, without = (
        float(np.mean(x[chosen], dtype=np.float64)) if n else float("nan")
        for x in (nats_P, nats_without_P)
    )
    return {
        "n_tokens": n,
        "share": n / max(len(nats_P), 1),
        "nats": nats,
        "nats_without": without,
        "gain": without - nats,
    }


def gate_buckets(
    gates_P: np.ndarray,
    nats_P: np.ndarray,
    nats_without_P: np.ndarray,
    n_buckets: int = N_BUCKETS,
) -> list[Bucket]:
    """Loss by gate value, in groups of equal size.

    Of equal size and not of equal width, since gates crowd at one end: fixed edges
    would leave most groups empty. Tokens of one gate value stay together, so groups are
    fewer and unequal where many gates are equal; a constant gate is one group.

    Args:
        gates_P: gate of each token; one with a NaN is in no group.
        nats_P, nats_without_P: loss of each token, with the memory and without it.
        n_buckets: groups wanted.

    Returns:
        Groups that hold tokens, from closed to open: bucket ("low to high" of the gates
        in it), low, high, and `mean_losses`. A gate that can be trusted has gains that
        rise from group to group.

    Raises:
        ShapeError: the arrays are not of one length.
    """
    _check_lengths(gates_P, nats_P, nats_without_P)
    known = np.flatnonzero(~np.isnan(gates_P))
    gates = gates_P[known]
    if not len(gates):
        return []
    first = len(gates) * np.arange(1, n_buckets) // n_buckets
    edges = np.unique(np.sort(gates)[first])
    group = np.searchsorted(edges, gates, side="right")
    found = []
    for number in np.unique(group):
        chosen = known[group == number]
        low, high = float(gates_P[chosen].min()), float(gates_P[chosen].max())
        losses = mean_losses(chosen, nats_P, nats_without_P)
        name = f"{low:.3g} to {high:.3g}"
        found.append({"bucket": name, "low": low, "high": high, **losses})
    return found


def frequency_buckets(
    counts_P: np.ndarray,
    nats_P: np.ndarray,
    nats_without_P: np.ndarray,
    edges: Sequence[int] = FREQUENCY_EDGES,
) -> list[Bucket]:
    """Loss by how often a token's n-gram was counted.

    Args:
        counts_P: int64; -1 where there is no whole n-gram, see `NgramCounts.of`.
        nats_P, nats_without_P: loss of each token, with the memory and without it.
        edges: lowest count of each group, ascending; the last one is open above.

    Returns:
        All groups, "cut" (no whole n-gram) and then "0", "1", "2-3", .. : bucket
        and `mean_losses`.

    Raises:
        ShapeError: the arrays are not of one length.
    """
    _check_lengths(counts_P, nats_P, nats_without_P)
    group = np.searchsorted(np.asarray(edges), counts_P, side="right")
    names = ["cut"]
    for low, after in zip(edges, [*edges[1:], None], strict=True):
        if after is None:
            names.append(f"{low}+")
        else:
            names.append(str(low) if after == low + 1 else f"{low}-{after - 1}")
    return [
        {"bucket": name}
        | mean_losses(np.flatnonzero(group == i), nats_P, nats_without_P)
        for i, name in enumerate(names)
    ]


def _check_lengths(*arrays: np.ndarray) -> None:
    for array in arrays:
        if array.shape != (len(arrays[-1]),):
            raise ShapeError("tokens", array.shape, f"[{len(arrays[-1])}]")


def _name(q: float) -> str:
    return f"q{round(100 * q):02d}"
