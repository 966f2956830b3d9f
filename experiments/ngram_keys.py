"""Product keys that are addressed by n-grams, on the Bible.

    memjax train experiments/ngram_keys.py

The quickstart's backbone, data and steps. Before block 1's attention a table of 128 x
128 rows is read by the last 4 bytes: their learned codes make the queries, 4 heads of 8
rows each, and a loss on the entropy of the reads keeps the sub-keys in use. No paper
has this; it is ours (docs/ngram_memories.md). Cost: about that of product_key.py.
"""

from dataclasses import replace
from pathlib import Path

from memjax.experiment import Experiment, load_experiment
from memjax.layers.ngram_keys import NgramKeysConfig

QUICKSTART = Path(__file__).with_name("quickstart.py")


def config() -> Experiment:
    """The quickstart with another memory and its optimizer."""
    base = load_experiment(QUICKSTART).experiment
    memory = NgramKeysConfig(
        layers=(1,),
        order=4,
        n_heads=4,
        n_sub_keys=128,
        key_width=64,
        k=8,
        table_mode="rows",
    )
    optim = replace(base.optim, table_optimizer="lazy_adam", table_learning_rate=1e-2)
    model = replace(base.model, memories=(memory,))
    return replace(base, name="ngram_keys", model=model, optim=optim)
