"""From tokens to table rows, whatever the layout.

What: `hashed_rows` inside jit and `host_hashed_rows`, for every kind of layout;
    `host_rows`, those of all layers of a model.
Why: model, measurements and health ask for rows; which hash it is does not matter to
    them.
When not: with one hash at hand; call it.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from memjax.ops.column_layout import ColumnLayout
from memjax.ops.hot_tier import HotLayout
from memjax.ops.ngram_hash import host_ngram_rows, ngram_rows
from memjax.ops.ngram_layout import NgramLayout
from memjax.ops.ngram_window import WindowLayout
from memjax.ops.token_classes import token_classes

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


def host_rows(
    layouts: Mapping[int, Layout],
    tokens_BT: Any,
    segments_BT: Any = None,
    *,
    classes_V: Any = None,
) -> dict[int, np.ndarray]:
    """{layer: int32 rows [B, T, C]} on the host, equal bit for bit to those in jit.

    Args:
        layouts: {layer: layout}, as `models.layouts.layouts`.
        tokens_BT: integer ids of the tokenizer.
        segments_BT: document numbers, 0 for padding; None: one document a row.
        classes_V: the class of each id, for layouts of fewer ids than V (see
            `ops.token_classes`); None: every layout is of the ids themselves.

    Returns:
        The rows of each layer; layers of equal layouts have one array.

    Raises:
        DataError: an id outside the vocabulary.

    Cost: about 1 ms for 4096 tokens x 24 columns, once a distinct layout.
    """
    found: dict[Layout, np.ndarray] = {}
    for layout in layouts.values():
        if layout in found:
            continue
        ids_BT = tokens_BT
        if classes_V is not None and layout.vocab_size != len(classes_V):
            ids_BT = token_classes(classes_V, np.asarray(tokens_BT))
        found[layout] = host_hashed_rows(layout, ids_BT, segments_BT=segments_BT)
    return {layer: found[layout] for layer, layout in layouts.items()}
