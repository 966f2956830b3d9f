"""Memory layers for language models in JAX: study, train and measure them.

What: the public names, each imported from its module when it is first used.
Why: `import memjax` costs nothing, and a notebook needs one import.
When not: everything else; import modules directly, `from memjax.ops import gates`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memjax.data.config import CorpusConfig, DataConfig
    from memjax.errors import ConfigError, MemjaxError
    from memjax.experiment import Experiment, load_experiment
    from memjax.layers.engram import Engram, EngramConfig
    from memjax.layers.precision import PrecisionConfig
    from memjax.models.config import ModelConfig
    from memjax.models.language_model import LanguageModel
    from memjax.ops.gates import combine, signed_sqrt_gate
    from memjax.ops.look_back import next_history
    from memjax.ops.ngram_hash import host_ngram_rows, ngram_rows
    from memjax.ops.ngram_layout import NgramLayout, ngram_layouts
    from memjax.ops.short_conv import short_conv
    from memjax.ops.sinkhorn import sinkhorn_balance
    from memjax.optim.build import build_optimizer
    from memjax.optim.config import OptimConfig
    from memjax.optim.sinkhorn_momentum import (
        scale_by_sinkhorn_momentum,
        sinkhorn_momentum,
    )
    from memjax.parallel.mesh import MeshConfig
    from memjax.train.config import TrainConfig

_HOMES = {
    "ConfigError": "errors",
    "CorpusConfig": "data.config",
    "DataConfig": "data.config",
    "Engram": "layers.engram",
    "EngramConfig": "layers.engram",
    "Experiment": "experiment",
    "LanguageModel": "models.language_model",
    "MemjaxError": "errors",
    "MeshConfig": "parallel.mesh",
    "ModelConfig": "models.config",
    "NgramLayout": "ops.ngram_layout",
    "OptimConfig": "optim.config",
    "PrecisionConfig": "layers.precision",
    "TrainConfig": "train.config",
    "build_optimizer": "optim.build",
    "combine": "ops.gates",
    "host_ngram_rows": "ops.ngram_hash",
    "load_experiment": "experiment",
    "next_history": "ops.look_back",
    "ngram_layouts": "ops.ngram_layout",
    "ngram_rows": "ops.ngram_hash",
    "scale_by_sinkhorn_momentum": "optim.sinkhorn_momentum",
    "short_conv": "ops.short_conv",
    "signed_sqrt_gate": "ops.gates",
    "sinkhorn_balance": "ops.sinkhorn",
    "sinkhorn_momentum": "optim.sinkhorn_momentum",
}

__all__ = [
    "ConfigError",
    "CorpusConfig",
    "DataConfig",
    "Engram",
    "EngramConfig",
    "Experiment",
    "LanguageModel",
    "MemjaxError",
    "MeshConfig",
    "ModelConfig",
    "NgramLayout",
    "OptimConfig",
    "PrecisionConfig",
    "TrainConfig",
    "build_optimizer",
    "combine",
    "host_ngram_rows",
    "load_experiment",
    "next_history",
    "ngram_layouts",
    "ngram_rows",
    "scale_by_sinkhorn_momentum",
    "short_conv",
    "signed_sqrt_gate",
    "sinkhorn_balance",
    "sinkhorn_momentum",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module (PEP 562), and keep it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'memjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"memjax.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
