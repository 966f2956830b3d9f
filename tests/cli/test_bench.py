"""`memjax bench`: words in, a table and JSON out; the timing itself is made up."""

import json
from functools import partial

import pytest

from memjax.benchmarks import table_rows
from tests.benchmarks.scripted import Scripted, no_corpus

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


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "table_rows"),
        (["table_cols"], 2, "invalid choice 'table_cols'"),
        (["table_rows", "--rows", "1e6,many"], 1, "rows = '1e6,many'"),
        (["table_rows", "--rows", "4e6,1e6"], 1, "different numbers, ascending"),
        (["table_rows", "--json", "no/such/f.json"], 1, "json = 'no/such/f.json'"),
    ],
)
def test_mistakes_are_one_line(memjax, timed, words, code, message):
    done = memjax("bench", *words)
    assert done.code == code and done.err.count("\n") == 1, done.err
    assert message in done.err and timed == []
