"""Sinkhorn's benchmark: PyTorch's dense step is ours, dense and by active rows."""

import pytest

from memjax.benchmarks import sinkhorn
from memjax.benchmarks.sinkhorn import FORMS, SinkhornCase
from tests.benchmarks.sides import compare, needs_torch, started

SMALL = dict(n_rows=300, width=8, n_read=20, n_sets=4)


@pytest.mark.torch
@needs_torch
@pytest.mark.parametrize("form", FORMS)
def test_both_sides_compute_the_same(form, tmp_path):
    compare(sinkhorn.duel(SinkhornCase(form=form, **SMALL)), tmp_path, tolerance=1e-4)


def test_the_rows_that_take_turns_need_no_dense_step():
    case = SinkhornCase(form="rows", **SMALL)
    (ours, _) = sinkhorn.duel(case).forms["rows against dense"]
    contender = started(ours)
    run = contender._ready.variants["step"]
    assert [int(run()) for _ in range(6)] == [0] * 6


def test_the_sizes():
    names = [entry.name for entry in sinkhorn.entries(short=False)]
    assert names[0] == "sinkhorn/dense/1048576x32"
    assert names[-1] == "sinkhorn/rows/16777216x32"
    assert SinkhornCase(form="rows", n_rows=2**24).n_active == 131072
