"""Means, spreads and paired differences against a table worked out by hand."""

import math

import pytest

from memjax.report.summary import Run, paired_difference, summarise
from memjax.report.table import table_data, table_text


def runs_of(values, axes=("memory", "rate", "seed")):
    return [
        Run(
            dict(zip(axes, key, strict=True)),
            None if value is None else {"valid_bpb": value, "test_bpb": value + 10},
        )
        for key, value in values.items()
    ]


GRID = {
    ("off", "0.1", "0"): 2.0,
    ("off", "0.1", "1"): 2.2,
    ("off", "0.1", "2"): 2.4,
    ("off", "0.2", "0"): 1.9,
    ("off", "0.2", "1"): 2.0,
    ("off", "0.2", "2"): 2.1,
    ("on", "0.1", "0"): 1.5,
    ("on", "0.1", "1"): 1.7,
    ("on", "0.1", "2"): 1.6,
    ("on", "0.2", "0"): 1.8,
    ("on", "0.2", "1"): 1.8,
    ("on", "0.2", "2"): None,
}


def test_by_hand():
    rows = summarise(runs_of(GRID), baseline={"memory": "off"}, select=("rate",))
    off_1, off_2, on_1, on_2 = rows
    assert [row.is_selected for row in rows] == [False, True, True, False]
    assert off_2.is_baseline and off_2.difference is None
    # off 0.2: 1.9 2.0 2.1 -> mean 2.0, std 0.1
    assert off_2.mean == pytest.approx(2.0)
    assert off_2.std == pytest.approx(0.1)
    # on 0.1 minus off 0.2: -0.4 -0.3 -0.5 -> mean -0.4, s 0.1, t(0.975, 2) = 4.30265
    assert on_1.difference == pytest.approx(-0.4)
    assert on_1.interval == pytest.approx(4.3026527 * 0.1 / math.sqrt(3))
    # off 0.1 minus off 0.2: 0.1 0.2 0.3
    assert off_1.difference == pytest.approx(0.2)
    # on 0.2 has two of three seeds: -0.1 and -0.2, t(0.975, 1) = 12.7062
    assert (len(on_2.by_seed), on_2.n_planned) == (2, 3)
    assert on_2.difference == pytest.approx(-0.15)
    spread = math.sqrt(0.05**2 * 2)
    assert on_2.interval == pytest.approx(12.7062047 * spread / math.sqrt(2))


def test_pairing_is_by_seed_and_not_by_position():
    ours = {"0": 1.0, "1": 2.0}
    theirs = {"1": 1.0, "0": 0.5, "7": 9.0}
    mean, half = paired_difference(ours, theirs)
    assert mean == pytest.approx(0.75)
    assert half == pytest.approx(12.7062047 * math.sqrt(0.125) / math.sqrt(2))
    assert paired_difference({"0": 1.0}, {"0": 3.0}) == (-2.0, None)
    assert paired_difference({"0": 1.0}, {"1": 3.0}) == (None, None)


def test_valid_chooses_also_when_test_is_shown():
    values = {("off", "a", "0"): 2.0, ("off", "b", "0"): 1.0}
    runs = runs_of(values)
    swapped = [
        Run(run.labels, {**run.metrics, "test_bpb": -run.metrics["valid_bpb"]})
        for run in runs
    ]
    rows = summarise(swapped, metric="test_bpb", select=("rate",))
    assert [row.is_selected for row in rows] == [False, True]
    assert [row.mean for row in rows] == [-2.0, -1.0]


def test_diverged_and_missing_runs_are_never_selected():
    values = {
        ("off", "a", "0"): math.nan,
        ("off", "b", "0"): None,
        ("off", "c", "0"): 3.0,
    }
    rows = summarise(runs_of(values), select=("rate",))
    assert [row.is_selected for row in rows] == [False, False, True]
    assert math.isnan(rows[0].mean)
    assert rows[1].mean is None


def test_baseline_keeps_the_other_axes_of_the_row():
    axes = ("memory", "width")
    values = {("off", "1"): 3.0, ("off", "2"): 2.0, ("on", "1"): 2.5, ("on", "2"): 1.0}
    rows = summarise(runs_of(values, axes), baseline={"memory": "off"})
    assert [row.is_baseline for row in rows] == [True, True, False, False]
    assert [row.difference for row in rows] == [None, None, -0.5, -1.0]
    assert all(row.interval is None for row in rows)


def test_text_shows_grid_then_arms_and_warns_at_the_edge():
    rows = summarise(runs_of(GRID), baseline={"memory": "off"}, select=("rate",))
    text = table_text(rows, metric="valid_bpb", select=("rate",))
    grid, arms = text.split("best rate of each arm, chosen on valid")
    assert grid.count("off") == 2 and grid.count("on ") == 2
    assert len(arms.strip().splitlines()) == 6  # header, rule, two arms, two notes
    assert "2/3" in grid and "2/3" not in arms
    assert "-0.4000" in arms and "+-0.2484" in arms
    assert "note: memory=on: the best rate = 0.1 is at the end of its grid" in text
    markdown = table_text(rows, metric="valid_bpb", markdown=True)
    assert markdown.splitlines()[1].startswith("|---")
    data = table_data(rows)
    assert data[1]["n"] == 3 and data[1]["is_baseline"]
    assert data[2]["by_seed"] == {"0": 1.5, "1": 1.7, "2": 1.6}
