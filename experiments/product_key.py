"""Product keys instead of a feed-forward, on the Bible.

    memjax train experiments/product_key.py

The quickstart's backbone, data and steps. Block 1 has, instead of its feed-forward, a
table of 128 x 128 rows behind product keys (arXiv:1907.05242): 4 heads, 8 rows a head,
softmax over the rows of a head. The queries go through a batch norm as the paper's best
models' do (which looks across the batch while training, see docs/memories.md). The
table is trained by rows with Adam at a rate of its own. Cost: about 5 minutes on 2 CPU
cores.
"""

from dataclasses import replace
from pathlib import Path

from memjax.experiment import Experiment, load_experiment
from memjax.layers.product_key_config import ProductKeyConfig

QUICKSTART = Path(__file__).with_name("quickstart.py")


def config() -> Experiment:
    """The quickstart with another memory and its optimizer."""
    base = load_experiment(QUICKSTART).experiment
    memory = ProductKeyConfig(
        layers=(1,),
        place="instead_of_feed_forward",
        n_sub_keys=128,
        key_width=64,
        n_heads=4,
        k=8,
        query_norm="batch",
        table_mode="rows",
    )
    optim = replace(base.optim, table_optimizer="lazy_adam", table_learning_rate=1e-2)
    return replace(
        base,
        name="product_key",
        model=replace(base.model, memories=(memory,)),
        optim=optim,
    )
