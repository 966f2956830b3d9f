"""Engram's benchmark: both sides compute the same, in every part and form."""

import dataclasses

import pytest

from memjax.benchmarks import engram
from memjax.benchmarks.engram import PARTS, EngramCase
from tests.benchmarks.sides import compare, needs_torch

SMALL = dict(
    n_branches=2, width=8, row_width=3, n_batch=2, n_tokens=14, n_columns=4, n_rows=60
)


@pytest.mark.torch
@needs_torch
@pytest.mark.parametrize(("part", "ours", "theirs"), PARTS)
def test_both_sides_compute_the_same(part, ours, theirs, tmp_path):
    case = EngramCase(part=part, form=ours, **SMALL)
    peer = dataclasses.replace(case, form=theirs)
    compare(engram.duel(case, peer), tmp_path, tolerance=1e-3)


def test_the_sizes_and_their_floor():
    names = [entry.name for entry in engram.entries(short=False)]
    assert len(names) == len(set(names)) == 2 * len(PARTS)
    assert names[0] == "engram/forward/1x512/rows"
    assert "engram/step/4x256/dense" in names
    case = EngramCase(part="forward")
    # Two products of 4096 x 256 with 256 x 512.
    assert case.work().flops == 2 * 2 * 4096 * 256 * 512
    assert EngramCase(part="step").work().flops == 3 * case.work().flops
    # 512 MB, four times and once more.
    assert EngramCase(part="step").need_bytes() > 5 * 512e6
