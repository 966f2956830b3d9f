"""Memory+ instead of two feed-forwards, one value table for both, on the Bible.

    memjax train experiments/memory_plus.py

The quickstart's backbone, data and steps. Blocks 1 and 2 read the same table of 128 x
128 rows by product keys of their own (arXiv:2412.09764): 2 heads, 16 rows a head, the
read gated by SiLU of a projection of the stream. The table is trained by rows with Adam
at a rate of its own, as published. Cost: about 5 minutes on 2
CPU cores.
"""

from dataclasses import replace
from pathlib import Path

from memjax.experiment import Experiment, load_experiment
from memjax.layers.memory_plus import MemoryPlusConfig

QUICKSTART = Path(__file__).with_name("quickstart.py")


def config() -> Experiment:
    """The quickstart with another memory and its optimizer."""
    base = load_experiment(QUICKSTART).experiment
    memory = MemoryPlusConfig(
        layers=(1, 2),
        place="instead_of_feed_forward",
        n_sub_keys=128,
        key_width=64,
        n_heads=2,
        k=16,
        query_norm="query",
        shared_table="pool",
        table_mode="rows",
    )
    optim = replace(base.optim, table_optimizer="lazy_adam", table_learning_rate=1e-2)
    return replace(
        base,
        name="memory_plus",
        model=replace(base.model, memories=(memory,)),
        optim=optim,
    )
