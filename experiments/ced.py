"""A causal encoder-decoder without a memory, on the Bible.

    memjax train experiments/ced.py

The quickstart's backbone with a fourth block, data and steps. Blocks 2 and 3 attend to
what block 1 left, through one pair of projections that they share, and to 32 tokens of
their own stream (arXiv:2405.05254, arXiv:2609.19969 section 2.2).
"""

from dataclasses import replace
from pathlib import Path

from memjax.experiment import Experiment, load_experiment
from memjax.layers.cross_attention import CedConfig

QUICKSTART = Path(__file__).with_name("quickstart.py")


def config() -> Experiment:
    """The quickstart's backbone, half encoder and half decoder."""
    base = load_experiment(QUICKSTART).experiment
    ced = CedConfig(first_decoder=2, share_kv=True, local_window=32)
    model = replace(base.model, n_layers=4, memories=(), ced=ced)
    train = replace(base.train, health_every=None)
    return replace(base, name="ced", model=model, train=train)
