"""The quickstart's n-gram memory with a collision-free hot tier, on the Bible.

    memjax train experiments/hot_engram.py

Of each order from 3 to 6 the 5000 most frequent n-grams of the training text have a row
of their own (arXiv:2601.16531); all others share the hashed table, which is as large as
the quickstart's. The n-grams are counted when the file is first loaded, which takes
seconds, and kept in the cache. Cost: about that of the quickstart.
"""

from dataclasses import replace
from pathlib import Path

from memjax.evaluate.hot_ngrams import cached_hot_file
from memjax.experiment import Experiment, load_experiment
from memjax.layers.hot_engram import HotEngramConfig

QUICKSTART = Path(__file__).with_name("quickstart.py")
N_HOT = 5000


def config() -> Experiment:
    """The quickstart with a hot tier."""
    base = load_experiment(QUICKSTART).experiment
    orders = (3, 4, 5, 6)
    memory = HotEngramConfig(
        layers=(1,),
        orders=orders,
        n_heads=1,
        rows_per_head=(20_000, 50_000, 100_000, 200_000),
        row_width=32,
        hot_rows=N_HOT,
        hot_file=cached_hot_file(base.data, orders, N_HOT),
        mode="interpolate",
        cap=0.5,
        kernel_size=0,
        table_mode="rows",
    )
    return replace(
        base, name="hot_engram", model=replace(base.model, memories=(memory,))
    )
