"""What the quickstart's memory is worth: with and without it, at three rates.

    memjax sweep experiments/quickstart_ablation.py
    memjax table experiments/quickstart_ablation.py

The same backbone, data, steps and seeds; both arms get the same grid of learning rates
for the dense weights, the best one per arm is chosen on the valid part. 18 cells of 3
to 5 minutes on 2 CPU cores.
"""

import dataclasses
from pathlib import Path

from memjax.experiment import Experiment, Sweep, axis, load_experiment, product

MEMORIES = "model.memories"
RATE = "optim.learning_rate"


def config(scale: str = "laptop") -> Experiment:
    """The quickstart under a name of its own."""
    quickstart = Path(__file__).with_name("quickstart.py")
    base = load_experiment(quickstart, scale).experiment
    return dataclasses.replace(base, name="quickstart_ablation")


def sweep() -> Sweep:
    """Memory on and off, three learning rates, three seeds."""
    memories = config().model.memories
    return product(
        axis(MEMORIES, off=(), on=memories),
        axis(RATE, 1.5e-3, 3e-3, 6e-3),
        axis("seed", 0, 1, 2),
        baseline={MEMORIES: "off"},
        select=(RATE,),
    )
