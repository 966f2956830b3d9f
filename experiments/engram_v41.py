"""Engram's V4.1 form on four residual streams, on the Bible.

    memjax train experiments/engram_v41.py

The quickstart's data and steps, and its table, in the form of DeepSeek-V4.1-Flash
(arXiv:2609.19969): one projection to keys and value without biases, a gate for each of
4 residual streams, no convolution. The streams are mixed by single-pass
hyper-connections (arXiv:2512.24880). The table is trained by rows, by Sinkhorn
momentum.
"""

from dataclasses import replace
from pathlib import Path

from memjax.experiment import Experiment, load_experiment
from memjax.layers.block import HyperConfig

QUICKSTART = Path(__file__).with_name("quickstart.py")


def config() -> Experiment:
    """The quickstart with the other form and four streams."""
    base = load_experiment(QUICKSTART).experiment
    (memory,) = base.model.memories
    memory = replace(
        memory,
        form="v41",
        gate="signed_sqrt_copysign",
        norm_eps=1e-6,
        mode="sum",
        n_branches=4,
    )
    hyper = HyperConfig(n_streams=4, form="single_pass")
    model = replace(base.model, memories=(memory,), hyper=hyper)
    return replace(base, name="engram_v41", model=model)
