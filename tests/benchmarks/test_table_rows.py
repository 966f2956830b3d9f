"""The benchmark's plan and figures, on workers whose times are made up."""

from functools import partial

import pytest

from memjax.benchmarks import table_rows
from memjax.benchmarks.process import BenchmarkError
from memjax.benchmarks.table_rows import TARGETS, Plan, measure, plan
from memjax.errors import ConfigError
from tests.benchmarks.scripted import Scripted, no_corpus

__all__ = ["no_corpus"]


SMALL = Plan(rows=(2000, 8000), dense_rows=2000, warm_steps=5, n_turns=3, turn_steps=4)


def test_figures_of_a_plan(no_corpus):
    log = []
    figures = measure(SMALL, open_worker=partial(Scripted, log=log))
    assert figures["ratio"] == figures["ratio_sinkhorn"] == figures["ratio_adam"] == 2
    # Warm-up is call 1; turns take 4, 8 and 16 ms at the least rows.
    adam = figures["rows"]["adam"]
    assert list(adam) == ["2000", "8000"] and list(figures["rows"]["sinkhorn"]) == [
        "2000",
        "8000",
    ]
    assert adam["2000"]["ms"] == 8 and adam["2000"]["ms_min"] == 4
    assert adam["8000"]["ms"] == 16 and adam["8000"]["steps"] == 12
    assert adam["2000"]["ns_per_active_row"] == pytest.approx(8e6 / 10)
    sinkhorn = figures["rows"]["sinkhorn"]["2000"]
    assert sinkhorn["ns_per_active_row"] == pytest.approx(8e6 / 100)
    assert (sinkhorn["lookup_ms"], sinkhorn["update_ms"]) == (1, 3)
    # The dense form's only call takes 30 * 2 ms a step.
    assert figures["dense_over_sparse"] == pytest.approx(60 / 8)
    assert set(figures["dense"]) == {"sinkhorn", "sinkhorn_dense"}
    assert figures["targets"] == TARGETS and figures["machine"]["device"] == "chip"
    assert figures["huge_pages"] is True and figures["short"] is False
    workers = [entry for entry in log if isinstance(entry, Scripted)]
    assert [worker.case.dtype for worker in workers] == ["bfloat16"] * 4 + [
        "float32"
    ] * 2
    assert not any(worker.open for worker in workers)
    assert workers[0].n_batches == SMALL.n_batches == 5 + 3 * 6 + 22


def test_sizes_take_turns(no_corpus):
    log = []
    measure(SMALL, open_worker=partial(Scripted, log=log))
    adam = [entry[1:] for entry in log if isinstance(entry, tuple)][:10]
    assert adam == [
        *((n_rows, "start", 0) for n_rows in SMALL.rows),
        *((n_rows, "steps", 5) for n_rows in SMALL.rows),
        *((n_rows, "steps", 6) for _ in range(3) for n_rows in SMALL.rows),
    ]


def test_one_size_has_no_ratio(no_corpus):
    one = Plan(rows=(2000,), dense_rows=2000, warm_steps=3, n_turns=1, part_steps=0)
    log = []
    figures = measure(one, open_worker=partial(Scripted, log=log))
    assert figures["ratio"] is None and figures["ratio_adam"] is None
    assert "lookup_ms" not in figures["rows"]["adam"]["2000"]
    assert not any("parts" in entry for entry in log if isinstance(entry, tuple))


def test_too_little_memory_names_the_sizes_and_closes_everything(
    no_corpus, monkeypatch
):
    monkeypatch.setattr(table_rows, "free_bytes", lambda: int(9e9))
    log = []
    worker = partial(Scripted, log=log, need_bytes=int(5e9))
    with pytest.raises(BenchmarkError) as caught:
        measure(SMALL, open_worker=worker)
    for words in ("adam", "2,000 + 8,000 rows", "10.0 GB", "9.0 GB", "fewer rows"):
        assert words in str(caught.value)
    assert [entry.open for entry in log] == [False, False]


def test_the_form_that_is_published():
    full = plan()
    assert full.rows == (1_000_000, 4_000_000, 16_000_000, 64_000_000)
    assert full.dense_rows == 16_000_000 and full.warm_steps >= 300
    assert full.n_turns * full.turn_steps >= 50
    assert full.data.batch_size * full.data.context == 2048
    assert full.data.corpora[0].name == "kjv" and full.dtype == "bfloat16"


def test_the_short_form_is_small():
    """Its steps times the rows that each moves at most, and its dense steps."""
    short = plan(short=True)
    assert short.short and short.huge_pages
    assert max(short.rows) <= 4_000_000 and len(short.rows) == 2
    assert short.data.batch_size * short.data.context <= 256
    assert short.n_batches <= 300 and short.part_steps == 0
    assert short.dense_rows * (1 + short.dense_steps) <= 4_000_000
    assert short.warm_steps >= 200  # or the active set is not at its size


def test_rows_of_ones_own():
    assert plan(rows=[4_000_000, 64_000_000]).dense_rows == 4_000_000
    assert plan(rows=[64_000_000]).dense_rows == 16_000_000
    assert plan(rows=[2000], short=True).rows == (2000,)
    for rows in ([], [8000, 2000], [2000, 2000], [10], [2**31]):
        with pytest.raises(ConfigError, match="rows"):
            plan(rows=rows)
