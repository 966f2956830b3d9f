"""How evenly the slots of a memory are used, counted exactly over any number of reads.

What: `UsageCounter` adds up reads and weights by head and slot; `usage_metrics` turns
    them into the figures of the literature.
Why: a memory with a million slots that reads a thousand of them is a small memory.
When not: rows of a hashed table, whose reads have no weights; see collisions.
"""

from typing import Any

import numpy as np

from memjax.errors import DataError, ShapeError

TOP_PERCENT = (50, 90, 99)


def usage_metrics(
    reads_S: np.ndarray, mass_S: np.ndarray, used_S: np.ndarray
) -> dict[str, float]:
    """Figures of the usage of S slots.

    Args:
        reads_S: int64, how often each slot was selected.
        mass_S: float64 >= 0, summed weights of those reads.
        used_S: bool, some read of the slot had a weight other than 0.

    Returns:
        used_pct: percent of the slots that are used.
        kl_w, kl_u: Kullback-Leibler divergence in nats from the uniform distribution,
            of the mass (w, weighted) and of the reads (u, unweighted); at most log S.
        gini_w, gini_u: Gini coefficient, 1 - 2 * mean of the cumulated sorted shares;
            1 when one slot takes all, about 0 (-1/S) when all are equal.
        top50_w .. top99_u: how many of the heaviest slots hold that percentage.
        coverage: part of the slots that were selected, whatever the weight.
        collision_ratio: part of the reads that fall on a slot selected more than once.
        n_reads: reads counted.
        What is undefined for want of reads, or of mass, is NaN.

    Source: arXiv 1907.05242 and the measurements of its release (used_pct, kl, gini,
    top; there KL is the paper's); the FwPKM release (coverage, collision_ratio; its
    kld is kl_u). Differs: integers and float64, where counts in float32 stop growing
    at 2^24; a slot whose weights cancel counts as used.

    Cost: a sort of the slots, twice.
    """
    n_slots, n_reads = len(reads_S), int(reads_S.sum())
    found = {
        "used_pct": 100.0 * float(np.mean(used_S)),
        "coverage": float(np.mean(reads_S > 0)),
        "collision_ratio": float("nan"),
        "n_reads": n_reads,
    }
    if n_reads:
        found["collision_ratio"] = int(reads_S[reads_S > 1].sum()) / n_reads
    for name, amount_S in (("w", mass_S), ("u", reads_S)):
        cumulated_S = np.cumsum(np.sort(amount_S))
        total = cumulated_S[-1]
        if not total > 0:
            undefined = ("kl", "gini", *(f"top{percent}" for percent in TOP_PERCENT))
            found |= {f"{figure}_{name}": float("nan") for figure in undefined}
            continue
        share = amount_S[amount_S > 0] / total
        found[f"kl_{name}"] = float(np.log(n_slots) + np.sum(share * np.log(share)))
        found[f"gini_{name}"] = float(1 - 2 * np.mean(cumulated_S / total))
        for percent in TOP_PERCENT:
            # Multiplied out, so that counts are compared as integers.
            light = np.searchsorted(100 * cumulated_S, (100 - percent) * total)
            found[f"top{percent}_{name}"] = int(n_slots - light)
    return found


class UsageCounter:
    """Counts the reads of one memory, batch by batch.

    Counts are int64 and weights are added in float64, on the host, so an evaluation of
    any length is exact. Weights count by their size: where re-scoring makes negative
    ones, it is how much of a slot was used.

    Attributes:
        n_slots, n_heads: S and H.
        separate_heads: False: heads share the S slots, so all heads together are S
            slots; True: slot s of one head is another slot than that of the next, so
            they are H * S.
        n_non_finite: reads left out because their weight is NaN or infinite.

    Cost: 17 bytes per head and slot; about 10 ns per read.
    """

    def __init__(
        self, n_slots: int, n_heads: int = 1, *, separate_heads: bool = False
    ) -> None:
        self.n_slots, self.n_heads = n_slots, n_heads
        self.separate_heads = separate_heads
        self.n_non_finite = 0
        self._reads_HS = np.zeros((n_heads, n_slots), np.int64)
        self._mass_HS = np.zeros((n_heads, n_slots), np.float64)
        self._used_HS = np.zeros((n_heads, n_slots), bool)

    def add(self, slots: Any, weights: Any, mask: Any = None) -> None:
        """Count reads.

        Args:
            slots: integers [..., H, K] in [0, S).
            weights: float [..., H, K], after all re-scoring.
            mask: bool [...]; False leaves a token out. None: all tokens count.

        Raises:
            ShapeError: the shapes do not fit each other, or H.
            DataError: a slot of a token that counts is outside the memory.
        """
        slots, weights = np.asarray(slots), np.asarray(weights)
        if slots.ndim < 2 or slots.shape[-2] != self.n_heads:
            raise ShapeError("slots", slots.shape, f"[..., {self.n_heads}, K]")
        if weights.shape != slots.shape:
            raise ShapeError("weights", weights.shape, slots.shape)
        if mask is not None:
            mask = np.asarray(mask, bool)
            if mask.shape != slots.shape[:-2]:
                raise ShapeError("mask", mask.shape, slots.shape[:-2])
            slots, weights = slots[mask], weights[mask]
        outside = (slots < 0) | (slots >= self.n_slots)
        if outside.any():
            raise DataError(
                f"slot {slots[outside][0]} is not allowed: 0 <= slot < {self.n_slots}"
            )
        first = np.arange(self.n_heads, dtype=np.int64)[:, None] * self.n_slots
        places = (slots + first).ravel()
        size = np.abs(weights.astype(np.float64)).ravel()
        finite = np.isfinite(size)
        self.n_non_finite += int(np.sum(~finite))
        places, size = places[finite], size[finite]
        np.add.at(self._reads_HS.reshape(-1), places, 1)
        np.add.at(self._mass_HS.reshape(-1), places, size)
        self._used_HS.reshape(-1)[places[size > 0]] = True

    def summary(self) -> dict[str, float]:
        """`usage_metrics` of all heads together."""
        if self.separate_heads:
            each = (self._reads_HS, self._mass_HS, self._used_HS)
            return usage_metrics(*(x.reshape(-1) for x in each))
        return usage_metrics(
            np.sum(self._reads_HS, axis=0),
            np.sum(self._mass_HS, axis=0),
            np.asarray(np.any(self._used_HS, axis=0)),
        )

    def by_head(self) -> list[dict[str, float]]:
        """`usage_metrics` of each head alone."""
        by_head = zip(self._reads_HS, self._mass_HS, self._used_HS, strict=True)
        return [usage_metrics(*one) for one in by_head]
