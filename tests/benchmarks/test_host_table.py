"""The benchmark of tables on the host: what is timed can be trained."""

import itertools

import pytest

from memjax.benchmarks.catalog import measure_entries
from memjax.benchmarks.host_table import OPTIMIZERS, PLACES, entries, experiment
from memjax.build.host_plan import host_plans
from memjax.cli.bench_text import figures_text
from tests.benchmarks.test_duel import Scripted


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


class _Timed(Scripted):
    """A worker whose steps take as long as its place says."""

    def __init__(self, program, huge_pages):
        super().__init__(program, huge_pages)
        places = {"device": 10, "memory": 11, "file": 20}
        self.script = {"ms": places.get(program.arguments.get("place"), 1)}


def test_its_figures_can_be_printed():
    found = measure_entries(
        entries(True), short=True, huge_pages=False, open_worker=_Timed
    )
    figure = found["host_table/adagrad"]
    assert figure["slower"] == pytest.approx(1.1)
    assert figure["file_slower"] == pytest.approx(2)
    (line,) = [x for x in figures_text(found).splitlines() if "/adagrad  " in x]
    assert line.split()[0] == "host_table/adagrad"
