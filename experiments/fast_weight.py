"""Fast-weight product keys, a memory that learns the text it reads, on the Bible.

    memjax train experiments/fast_weight.py

The quickstart's backbone, data and steps. Before block 1's attention every document
reads, and every 32 tokens writes, a memory of its own of 32 x 32 slots of width 64
(arXiv:2601.00671), from an initial state that is trained through the inner updates. The
write rule is the contractive one (docs/fast_weights.md says why). While training, the
attention of half the sequences sees 32 tokens only, so that the memory is needed. Cost:
about 6 minutes on 2 CPU cores.
"""

from dataclasses import replace
from pathlib import Path

from memjax.experiment import Experiment, load_experiment
from memjax.layers.fast_weight_config import FastWeightConfig

QUICKSTART = Path(__file__).with_name("quickstart.py")


def config() -> Experiment:
    """The quickstart with another memory and its optimizer."""
    base = load_experiment(QUICKSTART).experiment
    memory = FastWeightConfig(
        layers=(1,),
        n_sub_keys=32,
        key_width=64,
        value_width=64,
        k=8,
        chunk=32,
        rule="contractive",
    )
    model = replace(base.model, memories=(memory,), starve_prob=0.5, starve_window=32)
    optim = replace(base.optim, table_optimizer="adam", table_learning_rate=1e-3)
    return replace(base, name="fast_weight", model=model, optim=optim)
