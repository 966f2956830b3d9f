"""Every transform of ours, and optimizers built from settings, keep the contract."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.optim.build import build_optimizer
from memjax.optim.clip import clip_by_norm
from memjax.optim.config import OptimConfig, SinkhornConfig
from memjax.optim.precision import in_float32
from memjax.optim.rate import rate_schedule, scale_by_rate
from memjax.optim.sinkhorn_momentum import (
    scale_by_sinkhorn_momentum,
    sinkhorn_momentum,
)
from tests.optim import contract

SCHEDULE = rate_schedule("cosine", 0.1, 100, warmup_steps=3)
STATIC = ("n_iterations", "norm", "accumulator_dtype")


@dataclass(frozen=True)
class Case:
    """A factory with its arguments, and a rate at which it descends."""

    factory: Any
    arguments: dict[str, Any]
    static: tuple[str, ...] = ()
    descend: dict[str, Any] | None = field(default=None)

    def make(self, **changes: Any) -> optax.GradientTransformation:
        return self.factory(**{**self.arguments, **changes})


CASES = {
    "scale_by_sinkhorn_momentum": Case(
        scale_by_sinkhorn_momentum, {"n_iterations": 3}, STATIC
    ),
    "scale_by_sinkhorn_momentum, float32 momentum": Case(
        scale_by_sinkhorn_momentum,
        {"n_iterations": 3, "accumulator_dtype": "float32"},
        STATIC,
    ),
    "sinkhorn_momentum": Case(
        sinkhorn_momentum,
        {"learning_rate": 0.1, "n_iterations": 3},
        STATIC,
        {"learning_rate": 0.1},
    ),
    "sinkhorn_momentum, l1": Case(
        sinkhorn_momentum,
        {"learning_rate": 0.1, "n_iterations": 3, "norm": "l1"},
        STATIC,
        {"learning_rate": 0.1},
    ),
    "scale_by_rate": Case(
        scale_by_rate, {"learning_rate": 0.1}, (), {"learning_rate": 1.0}
    ),
    "clip_by_norm": Case(clip_by_norm, {"max_norm": 1.0}),
    "in_float32 of adam": Case(
        lambda learning_rate: in_float32(optax.adam(learning_rate)),
        {"learning_rate": 0.1},
        (),
        {"learning_rate": 0.1},
    ),
    "build_optimizer, table": Case(
        lambda table_learning_rate: build_optimizer(
            OptimConfig(
                table_learning_rate=table_learning_rate,
                table_clip_norm=1.0,
                sinkhorn=SinkhornConfig(n_iterations=3),
            ),
            {"rows": "table"},
            100,
        ),
        {"table_learning_rate": 0.1},
        ("table_learning_rate",),
        {"table_learning_rate": 0.2},
    ),
    "build_optimizer, muon": Case(
        lambda learning_rate: build_optimizer(
            OptimConfig(optimizer="muon", learning_rate=learning_rate),
            {"rows": "matrix"},
            100,
        ),
        {"learning_rate": 0.1},
        ("learning_rate",),
        {"learning_rate": 0.2},
    ),
}
every_case = pytest.mark.parametrize("name", CASES)


@every_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_are_kept_and_nothing_compiles_twice(name, dtype):
    contract.check_dtypes_and_compiles(CASES[name].make(), dtype)


@every_case
def test_jit_and_state(name):
    contract.check_jit(CASES[name].make())
    contract.check_state_is_arrays(CASES[name].make())


@every_case
def test_chain_and_accumulation(name):
    contract.check_in_chain_and_accumulation(CASES[name].make())


# An optimizer built from labels is the outermost one: its labels are the whole tree's.
@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith("build")])
def test_partition(name):
    contract.check_in_partition(CASES[name].make())


@every_case
def test_inject_hyperparams(name):
    case = CASES[name]
    contract.check_inject_hyperparams(case.factory, case.arguments, case.static)


@every_case
@pytest.mark.multidevice
def test_sharding_of_state_is_kept(name):
    contract.check_sharding_is_kept(CASES[name].make())


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].descend])
def test_descends(name):
    contract.check_descends(CASES[name].make(**CASES[name].descend), 60, 0.05)


@pytest.mark.parametrize(
    "rate",
    [0.1, np.float32(0.1), np.float64(0.1), jnp.float32(0.1), SCHEDULE],
    ids=["python", "numpy32", "numpy64", "jax", "schedule"],
)
@pytest.mark.parametrize(
    "factory",
    [scale_by_rate, lambda rate: sinkhorn_momentum(rate, n_iterations=1)],
    ids=["scale_by_rate", "sinkhorn_momentum"],
)
def test_rates_of_any_kind_keep_types(factory, rate):
    """bfloat16 parameters stay so, and nothing compiles again, for every rate."""
    contract.check_dtypes_and_compiles(factory(rate), jnp.bfloat16)


def test_static_arguments_under_a_trace_are_refused_with_the_way_out():
    transform = optax.inject_hyperparams(scale_by_sinkhorn_momentum)(n_iterations=3)
    with pytest.raises(ValueError, match="static argument"):
        transform.init(contract.toy_params())
