"""The benchmark of tables on the host: what is timed can be trained."""

import itertools

import pytest

from memjax.benchmarks.host_table import OPTIMIZERS, PLACES, entries, experiment
from memjax.build.host_plan import host_plans


@pytest.mark.parametrize("short", [True, False])
def test_every_place_has_an_experiment_that_can_be_trained(short):
    assert len(entries(short)) == len(OPTIMIZERS)
    for optimizer, place in itertools.product(OPTIMIZERS, PLACES):
        found = experiment(optimizer, place, short)
        found.validate(1)
        plans = host_plans(found).values()
        assert len(plans) == (place != "device")
        for plan in plans:
            assert plan.n_reads < plan.n_slots < plan.spec.n_rows
