"""Experiments: one frozen config, files that define it, overrides, sweeps.

What: the public names of this floor.
Why: experiment files import everything from one place.
When not: single parts are configured by the configs beside them.
"""

from memjax.experiment.definition import Experiment, config_hash, save
from memjax.experiment.loading import Loaded, load_experiment
from memjax.experiment.paths import (
    diff,
    flatten,
    from_dict,
    override,
    set_path,
    to_dict,
)
from memjax.experiment.shrink import shrink
from memjax.experiment.sweep import Sweep, axis, product, zip_

__all__ = [
    "Experiment",
    "Loaded",
    "Sweep",
    "axis",
    "config_hash",
    "diff",
    "flatten",
    "from_dict",
    "load_experiment",
    "override",
    "product",
    "save",
    "set_path",
    "shrink",
    "to_dict",
    "zip_",
]
