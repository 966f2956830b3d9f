"""PEER, experts of one neuron behind product keys, beside a feed-forward, on the Bible.

    memjax train experiments/peer.py

The quickstart's backbone, data and steps. Block 1 has, beside its feed-forward, 64 x
64 experts (arXiv:2407.04153): 2 heads read 8 each, weighed by a softmax over the head.
Both tables are trained by rows with Adam at a rate of their own. Cost: about 5 minutes
on 2 CPU cores.
"""

from dataclasses import replace
from pathlib import Path

from memjax.experiment import Experiment, load_experiment
from memjax.layers.peer import PeerConfig

QUICKSTART = Path(__file__).with_name("quickstart.py")


def config() -> Experiment:
    """The quickstart with another memory and its optimizer."""
    base = load_experiment(QUICKSTART).experiment
    memory = PeerConfig(
        layers=(1,),
        place="beside_feed_forward",
        n_sub_keys=64,
        key_width=64,
        n_heads=2,
        k=8,
        table_mode="rows",
    )
    optim = replace(base.optim, table_optimizer="lazy_adam", table_learning_rate=1e-2)
    return replace(
        base,
        name="peer",
        model=replace(base.model, memories=(memory,)),
        optim=optim,
    )
