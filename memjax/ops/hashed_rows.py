"""From tokens to table rows, whatever the layout.

What: `hashed_rows` inside jit and `host_hashed_rows`, for every kind of layout.
Why: model, measurements and health ask for rows; which hash it is does not matter to
    them.
When not: with one hash at hand; call it.
"""

from typing import Any, TypeAlias

import jax
import numpy as np

from memjax.ops.column_layout import ColumnLayout
from memjax.ops.hot_tier import HotLayout
from memjax.ops.ngram_hash import host_ngram_rows, ngram_rows
from memjax.ops.ngram_layout import NgramLayout
from memjax.ops.ngram_window import WindowLayout

HashLayout: TypeAlias = NgramLayout | ColumnLayout
Layout: TypeAlias = HashLayout | HotLayout | WindowLayout


def hashed_rows(
    layout: Layout, ids_BT: Any, *, segments_BT: Any = None, history_BN: Any = None
) -> jax.Array:
    """int32 rows [..., T, C] inside jit, as `ngram_hash.ngram_rows` says."""
    options = {"segments_BT": segments_BT, "history_BN": history_BN}
    if isinstance(layout, NgramLayout):
        return ngram_rows(ids_BT, layout, **options)
    return layout.rows(ids_BT, **options)


def host_hashed_rows(
    layout: Layout, ids_BT: Any, *, segments_BT: Any = None, history_BN: Any = None
) -> np.ndarray:
    """`hashed_rows` on the host, bit-equal; DataError for an id outside."""
    options = {"segments_BT": segments_BT, "history_BN": history_BN}
    if isinstance(layout, NgramLayout):
        return host_ngram_rows(ids_BT, layout, **options)
    return layout.host_rows(ids_BT, **options)
