"""LongCat's n-gram embedding at the input, on the Bible.

    memjax train experiments/longcat.py

The quickstart's backbone, data and steps. Rows of 2- to 4-grams of bytes (4 tables
each, 9 890 rows and a few more, half-way between two multiples of the 257 ids) are
projected and averaged with the byte embedding (arXiv:2601.21204). The table is trained
by rows. Cost: about that of the quickstart.
"""

from dataclasses import replace
from pathlib import Path

from memjax.experiment import Experiment, load_experiment
from memjax.layers.ngram_embedding import NgramEmbeddingConfig

QUICKSTART = Path(__file__).with_name("quickstart.py")


def config() -> Experiment:
    """The quickstart with another memory."""
    base = load_experiment(QUICKSTART).experiment
    memory = NgramEmbeddingConfig(
        orders=(2, 3, 4),
        n_heads=4,
        rows_per_head=9_890,
        row_width=11,
        table_mode="rows",
    )
    return replace(base, name="longcat", model=replace(base.model, memories=(memory,)))
