"""`memjax bench`: words in, a table and JSON out; the timing itself is made up."""

import json
from functools import partial

import pytest

from memjax.benchmarks import catalog, table_rows
from memjax.benchmarks.duel import Duel
from memjax.benchmarks.entry import Entry
from memjax.benchmarks.figure import Figure, Target, Work
from tests.benchmarks import test_duel
from tests.benchmarks.scripted import Scripted, no_corpus
from tests.benchmarks.test_duel import side

__all__ = ["no_corpus"]


@pytest.fixture
def timed(monkeypatch, no_corpus):
    """`measure` with scripted workers; returns the plans it was given."""
    plans = []
    real = table_rows.measure

    def measure(plan, *, say):
        plans.append(plan)
        return real(plan, say=say, open_worker=partial(Scripted, log=[]))

    monkeypatch.setattr(table_rows, "measure", measure)
    return plans


def test_table_and_json(memjax, timed, tmp_path):
    file = tmp_path / "figures.json"
    done = memjax("bench", "table_rows", "--rows", "2e3,8e3", "--json", file)
    assert done.code == 0, done.err
    figures = json.loads(file.read_text())["table_rows"]
    assert figures["ratio"] == 2 and figures["rows"]["sinkhorn"]["8000"]["ms"] > 0
    for words in (
        "2048 tokens, 8192 rows read a step; medians of 100 steps after 300.",
        "adam: most rows over least rows 2.00 (target: <= 1.3)",
        "sinkhorn: most rows over least rows 2.00 (target: <= 1.5)",
        "by rows",
        "(target at 16,000,000: >= 20)",
        "huge pages asked for",
    ):
        assert words in done.out
    (line,) = [x for x in done.out.splitlines() if x.startswith("sinkhorn   8,000")]
    # ms at turns 1..10 are 4 * 2**k; the median of ten is between k = 5 and k = 6.
    ms = (4 * 2**5 + 4 * 2**6) / 2
    wanted = [f"{ms:.2f}", "8.00", "100", f"{1e6 * ms / 100:.1f}", "1.00", "2.00"]
    assert line.split()[2:8] == wanted
    assert "Short form" not in done.out and "slowed" not in done.out
    assert "adam, bfloat16: 2,000, 8,000 rows" in done.err


def test_options_reach_the_plan(memjax, timed):
    done = memjax("bench", "table_rows", "--short", "--no-huge-pages")
    assert done.code == 0, done.err
    (plan,) = timed
    assert plan == table_rows.plan(short=True, huge_pages=False)
    assert "Short form" in done.out and "huge pages not asked for" in done.out


def test_dense_steps_are_said(memjax, timed, monkeypatch):
    answer = Scripted.answer

    def slow(worker):
        said = answer(worker)
        if isinstance(said, dict) and "dense_steps" in said:
            said["overflow_steps"] = 3
        return said

    monkeypatch.setattr(Scripted, "answer", slow)
    done = memjax("bench", "table_rows", "--rows", "2000")
    assert "slowed down by 3 overflow_steps with 2,000 rows" in done.out
    assert "most rows over" not in done.out


@pytest.fixture
def entries(monkeypatch):
    """Two entries of a benchmark `bag`, with scripted workers."""
    forms = {"f": (side("ours", ms=2), side("theirs", ms=5))}
    work = Work(words="rows", copied=5e6)
    made = [
        Duel(name="bag/a", forms=forms, work=work, target=Target(value=2)).entry(),
        Entry(name="bag/b", measure=lambda _: Figure(skipped="no memory")),
    ]
    real = catalog.measure_entries
    monkeypatch.setattr(catalog, "has_peer", lambda: True)
    monkeypatch.setattr(
        catalog, "chosen", lambda names, short: made if "bag" in names else []
    )
    monkeypatch.setattr(
        catalog,
        "measure_entries",
        partial(real, open_worker=test_duel.Scripted),
    )


def test_figures_as_a_table_and_as_json(memjax, entries, timed, tmp_path):
    file = tmp_path / "figures.json"
    done = memjax("bench", "bag", "table_rows", "--rows", "2000", "--json", file)
    assert done.code == 0, done.err
    figures = json.loads(file.read_text())
    assert list(figures) == ["table_rows", "machine", "bag/a", "bag/b"]
    figure = figures["bag/a"]
    assert (figure["ours_ms"], figure["theirs_ms"], figure["ratio"]) == (6, 15, 2.5)
    assert figure["floor_ms"] == 1 and figure["floor"] == "rows"
    assert figure["target"] == "ratio >= 2" and figure["target_met"] is True
    assert figures["bag/b"]["ours_ms"] is None
    (line,) = [x for x in done.out.splitlines() if x.startswith("bag/a ")]
    assert line.split() == ["bag/a", "6", "2", "quick", "15", "5", "quick"] + [
        *["2.50", "1", "17%", "ratio", ">=", "2", "yes"]
    ]
    assert "bag/b: skipped: no memory" in done.out
    assert "of the warm-up, ms:\nbag/a: quick 5, slow 1000\n" in done.out
    assert "Copies 10.0 GB/s (read and written)" in done.out
    assert "jax 1 on cpu with 2 threads." in done.out
    assert "adam" in done.out and "bag/a\n" in done.err


def test_without_a_name_the_list_is_printed(memjax):
    done = memjax("bench")
    assert done.code == 0 and all(name in done.out for name in catalog.BENCHMARKS)
    assert "memjax bench all" in done.out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["table_cols"], 1, "did you mean table_rows?"),
        (["bag", "--rows", "2000"], 1, "an option of table_rows alone"),
        (["bag", "--cache-dir", "x"], 1, "an option of those that read a corpus"),
        (["bag/middle"], 1, "the beginning of one of"),
        (["table_rows", "--rows", "1e6,many"], 1, "rows = '1e6,many'"),
        (["table_rows", "--rows", "4e6,1e6"], 1, "different numbers, ascending"),
        (["table_rows", "--json", "no/such/f.json"], 1, "json = 'no/such/f.json'"),
    ],
)
def test_mistakes_are_one_line(memjax, timed, words, code, message):
    done = memjax("bench", *words)
    assert done.code == code and done.err.count("\n") == 1, done.err
    assert message in done.err and timed == []
