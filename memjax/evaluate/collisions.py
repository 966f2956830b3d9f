"""How often different n-grams share a row of a hashed table.

What: `CollisionCounter` over any number of batches, and `collision_frac` of one batch.
Why: a row that means two n-grams can serve neither well; the number of rows is chosen
    by these figures.
When not: product-key memories, whose slots have no fixed meaning; see usage.
"""

import math
from typing import Any

import numpy as np

from memjax.evaluate.ngram_counts import KeyCounts
from memjax.ops.column_layout import ColumnLayout
from memjax.ops.hashed_rows import HashLayout, host_hashed_rows
from memjax.ops.look_back import look_backs
from memjax.ops.ngram_key import keys_are_exact, ngram_keys


def expected_shared_frac(n_ngrams: int, n_rows: int) -> float:
    """Part of n distinct n-grams that share a row when each row is as likely.

    1 - (1 - 1/n_rows)^(n - 1): none of the others falls on the row of a given one.
    """
    if n_ngrams < 2 or n_rows < 2:
        return float(n_ngrams >= 2)
    return -math.expm1((n_ngrams - 1) * math.log1p(-1 / n_rows))


class CollisionCounter:
    """Distinct n-grams and their rows, by hash column.

    Windows that reach before a document's start count as n-grams with the pad id, as
    the table reads them. Padding does not count.

    Attributes:
        layout: of the table.
        exact: False when the longest n-grams are told apart by a 64-bit mix; see
            `ngram_counts.ngram_keys`.

    Cost: host; per order a sort of the n-grams and (16 + 4 H) bytes for each distinct
        one. A million byte tokens with 2 orders of 8 heads take one or two seconds.
    """

    def __init__(self, layout: HashLayout) -> None:
        self.layout = layout
        self._n_ids = max(layout.vocab_size, layout.pad_id + 1)
        self.exact = keys_are_exact(layout.max_order, self._n_ids)
        self._ngrams = [KeyCounts(layout.n_heads) for _ in layout.orders]

    def add(self, tokens_BT: Any, segments_BT: Any) -> None:
        """Count the n-grams of some rows; what they hold is documents, not batches."""
        layout = self.layout
        tokens_BT, real_BT = np.asarray(tokens_BT), np.asarray(segments_BT) > 0
        rows_BTC = host_hashed_rows(layout, tokens_BT, segments_BT=segments_BT)
        rows_PC = rows_BTC[real_BT]
        if isinstance(layout, ColumnLayout):
            tokens_BT = layout.seen_ids(tokens_BT)
        looks = look_backs(tokens_BT, layout.max_order, segments_BT=segments_BT)
        seen = [
            np.where(blocked, layout.pad_id, token)[real_BT] for token, blocked in looks
        ]
        for i, order in enumerate(layout.orders):
            mine = slice(i * layout.n_heads, (i + 1) * layout.n_heads)
            keys_P = ngram_keys(seen[:order], self._n_ids)
            self._ngrams[i].add(keys_P, rows_PC[:, mine])

    def columns(self) -> list[dict[str, float]]:
        """One entry per hash column, order by order and head by head.

        Returns:
            order, head, n_rows (of the column); n_tokens; distinct_ngrams;
            distinct_rows; shared_frac, part of the distinct n-grams whose row is also
            another one's; shared_tokens_frac, part of the tokens that read such a
            row; expected_shared_frac, what hashing at random would give. Without
            tokens the parts are 0.
        """
        found = []
        for order, sizes, ngrams in zip(
            self.layout.orders, self.layout.column_rows, self._ngrams, strict=True
        ):
            _, counts_U, rows_UH = ngrams.result()
            n_ngrams, n_tokens = len(counts_U), int(counts_U.sum())
            for head, n_rows in enumerate(sizes):
                distinct, inverse, n_each = np.unique(
                    rows_UH[:, head], return_inverse=True, return_counts=True
                )
                shared_U = n_each[inverse] > 1
                shared_tokens = int(counts_U[shared_U].sum())
                found.append(
                    {
                        "order": order,
                        "head": head,
                        "n_rows": n_rows,
                        "n_tokens": n_tokens,
                        "distinct_ngrams": n_ngrams,
                        "distinct_rows": len(distinct),
                        "shared_frac": int(shared_U.sum()) / max(n_ngrams, 1),
                        "shared_tokens_frac": shared_tokens / max(n_tokens, 1),
                        "expected_shared_frac": expected_shared_frac(n_ngrams, n_rows),
                    }
                )
        return found


def collision_frac(
    tokens_BT: np.ndarray, segments_BT: np.ndarray, layout: HashLayout
) -> float:
    """Part of the distinct n-grams that share their row with another distinct one.

    Averaged over hash columns, among the n-grams of this batch alone, so it is a lower
    bound of the rate on the corpus. Windows that reach before a document's start count
    as n-grams with the pad id. Padding tokens do not count; without tokens it is 0.
    """
    counter = CollisionCounter(layout)
    counter.add(tokens_BT, segments_BT)
    return float(np.mean([column["shared_frac"] for column in counter.columns()]))


def collision_excess(
    tokens_BT: np.ndarray, segments_BT: np.ndarray, layout: HashLayout
) -> float:
    """How many times more n-grams share a row than if rows were drawn at random.

    The mean over hash columns of shared_frac over expected_shared_frac, of the n-grams
    of these tokens; 1 for a good hash, and 1 where nothing is expected to be shared and
    nothing is. To be looked at for every size of table that is considered: a hash that
    is linear in the ids has sizes that it does not stand (arXiv:2601.21204 reports
    those near multiples of the vocabulary).
    """
    counter = CollisionCounter(layout)
    counter.add(tokens_BT, segments_BT)
    ratios = []
    for column in counter.columns():
        shared, expected = column["shared_frac"], column["expected_shared_frac"]
        ratios.append(shared / expected if expected else 1.0 + shared)
    return float(np.mean(ratios))
