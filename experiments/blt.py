"""BLT's hashed byte n-grams, summed into the byte embedding, on the Bible.

    memjax train experiments/blt.py

The quickstart's backbone, data and steps. Rows of width 128 for the n-grams of 3 to 8
bytes, by the polynomial hash of arXiv:2412.09871, 20 000 rows by order, are added to
the byte embedding as they are. The table is trained by rows. Cost: about that of the
quickstart.
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
        hash="polynomial",
        orders=(3, 4, 5, 6, 7, 8),
        n_heads=1,
        rows_per_head=20_000,
        row_width=None,
        average=False,
        table_std=0.1,
        table_mode="rows",
    )
    return replace(base, name="blt", model=replace(base.model, memories=(memory,)))
