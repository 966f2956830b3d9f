"""A mixture of experts instead of dense feed-forwards, without a memory, on the Bible.

    memjax train experiments/experts.py

The baseline of memory layers: parameters that most tokens do not use. The quickstart's
backbone, data and steps; blocks 1 and 2 have 8 experts of width 352, of which a token
passes one, by a learned router with a balance loss (arXiv:2101.03961). So the
arithmetic of a token is that of the dense backbone and the router. With
`--model.experts.routing random` the token alone decides (arXiv:2106.04426).
"""

from dataclasses import replace
from pathlib import Path

from memjax.experiment import Experiment, load_experiment
from memjax.layers.experts import ExpertsConfig

QUICKSTART = Path(__file__).with_name("quickstart.py")


def config() -> Experiment:
    """The quickstart's backbone with experts."""
    base = load_experiment(QUICKSTART).experiment
    experts = ExpertsConfig(n_experts=8, top_k=1, d_ff=352, normalize=False)
    model = replace(base.model, memories=(), experts=experts, expert_layers=(1, 2))
    train = replace(base.train, health_every=None)
    return replace(base, name="experts", model=model, train=train)
