"""Which tables are read by hash column, and how many rows each column has.

What: `hash_columns` of a model.
Why: a table that is divided by whole hash columns is exchanged in equal parts.
When not: how it is divided is `parallel.division`.
"""

from memjax.models.config import ModelConfig
from memjax.models.layouts import layouts, table_reads
from memjax.ops.column_layout import ColumnLayout
from memjax.ops.hot_tier import HotLayout
from memjax.ops.ngram_layout import NgramLayout


def hash_columns(config: ModelConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(path, rows of each column, in their order) of the tables in mode "rows" of which
    a token reads one row of every column."""
    found = []
    for path, reads in table_reads(config).items():
        if reads.weighed or reads.mode != "rows":
            continue
        layout = layouts(config)[reads.layers[0]]
        if isinstance(layout, HotLayout):
            layout = layout.cold
        if isinstance(layout, NgramLayout | ColumnLayout):
            rows = tuple(n for order in layout.column_rows for n in order)
            if sum(rows) == reads.spec.n_rows:  # else it is the table of hot n-grams
                found.append((path, rows))
    return tuple(found)
