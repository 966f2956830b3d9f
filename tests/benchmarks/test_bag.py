"""The bag's benchmark: its sizes, its floors, and that PyTorch computes the same."""

import json

import numpy as np
import pytest

from memjax.benchmarks import bag
from memjax.benchmarks.bag import PARTS, BagCase
from memjax.benchmarks.entry import Session
from memjax.benchmarks.machine import n_cores
from tests.benchmarks.sides import compare, needs_torch, outputs_of

SMALL = dict(n_tokens=128, n_reads=3, width=8, n_rows=50)


@pytest.mark.torch
@needs_torch
@pytest.mark.parametrize("part", PARTS)
def test_both_sides_compute_the_same(part, tmp_path):
    compare(bag.duel(BagCase(part=part, **SMALL)), tmp_path)


def test_ours_is_the_sum_it_says(tmp_path):
    case = BagCase(part="forward", **SMALL)
    (ours, _) = bag.duel(case).forms["bag"]
    given = bag.arrays(case)
    rows_NKW = given["table"].astype(float)[given["ids"]]
    want = np.einsum("nkw,nk->nw", rows_NKW, given["weights"])
    np.testing.assert_allclose(
        outputs_of(ours, tmp_path)["out"], want, rtol=1e-5, atol=1e-7
    )


def test_the_published_sizes_and_their_floor():
    names = [entry.name for entry in bag.entries(short=False)]
    assert names[:2] == ["bag/forward/4096x32x512", "bag/forward/4096x128x512"]
    assert len(names) == 1 + len(PARTS) and len(bag.entries(short=True)) == len(names)
    case = BagCase(part="forward", n_reads=32)
    # 268 MB, read and written, at 26.8 GB/s.
    rates = {"copy_gb_s": 26.8435456, "matmul_gflops": 1.0}
    assert case.work().floor_ms(rates) == pytest.approx(20)
    assert bag.duel(case).target == bag.FORWARD_TARGET
    assert bag.duel(BagCase(part="row_sums")).target is None
    # Of 2**19 uniform reads of 2**18 rows, 1 - e^-2 find a row of their own.
    assert BagCase(part="row_sums").n_unique == pytest.approx(226667, abs=5)


@pytest.mark.torch
@needs_torch
def test_in_processes_of_their_own():
    """What the command does, with real workers and the smallest sizes."""
    rates = {"copy_gb_s": 10.0, "matmul_gflops": 100.0}
    session = Session(rates=rates, n_turns=2, turn_seconds=0.001)
    figure = bag.duel(BagCase(part="forward", **SMALL)).measure(session)
    assert figure.difference < 1e-6 and figure.ours_ms > 0 and figure.theirs_ms > 0
    forms = json.loads(json.dumps(figure.json()))["forms"]["bag"]
    assert forms["theirs"]["framework"] == "torch"
    assert forms["ours"]["threads"] == forms["theirs"]["threads"] == n_cores()
    assert forms["ours"]["peak_bytes"] > 2**26
    assert set(forms["theirs"]["variants_warm_up_ms"]) == {
        "embedding_bag",
        "gather_einsum",
    }
