"""The one precision policy of a model.

What: four dtype names: parameters, compute, tables, accumulation.
Why: a single place decides what is stored, multiplied and summed in which dtype.
When not: optimizer state has its own setting, beside the optimizer.
"""

from dataclasses import dataclass, fields
from typing import Any

from memjax.arrays import dtype_of


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtype names, each "float32" or "bfloat16".

    Attributes:
        params: stored dense weights.
        compute: matrix products and activations.
        tables: stored value tables.
        accumulation: norms' statistics, gates and logits.
    """

    params: str = "float32"
    compute: str = "float32"
    tables: str = "float32"
    accumulation: str = "float32"

    def __post_init__(self) -> None:
        for field in fields(self):
            dtype_of(getattr(self, field.name), f"precision.{field.name}")


@dataclass(frozen=True)
class Dtypes:
    """The policy as jax dtypes, handed to every module."""

    params: Any
    compute: Any
    tables: Any
    accumulation: Any

    @classmethod
    def of(cls, config: PrecisionConfig) -> "Dtypes":
        """Look the four names up."""
        return cls(*(dtype_of(getattr(config, field.name)) for field in fields(config)))
