"""Every file in experiments/ loads, validates and trains at `--debug` size.

What: two steps of each file's config on real text, and every cell of its sweep checked.
Why: an experiment that does not start is found here and not on a rented machine.
When not: what a run writes and how it resumes; see test_run.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memjax.errors import MissingExtraError
from memjax.experiment import load_experiment, shrink
from memjax.experiment.cells import plan_cells
from memjax.experiment.loading import Loaded
from memjax.run import train


def load(path: Path) -> Loaded:
    """The file; skipped where it needs packages that are not there."""
    try:
        return load_experiment(path)
    except MissingExtraError as error:
        pytest.skip(str(error))


# Compiles for a minute; `tests/build/test_planner` does what the file is for.
SLOW = ("v41_pod",)
FILES = sorted((Path(__file__).parent.parent / "experiments").glob("*.py"))


def test_there_are_experiments() -> None:
    assert "quickstart" in [path.stem for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_loads_and_says_its_command(path: Path, tmp_path: Path) -> None:
    loaded = load(path)
    assert loaded.experiment.name == path.stem
    assert f"memjax train experiments/{path.name}" in path.read_text(
        encoding="utf-8"
    ) or f"memjax sweep experiments/{path.name}" in path.read_text(encoding="utf-8")
    if loaded.sweep is not None:  # as it is, and as `--debug` shrinks it
        for finish in (lambda experiment: experiment, shrink):
            cells = plan_cells(loaded.experiment, loaded.sweep, tmp_path, finish=finish)
            assert len({cell.run_dir for cell in cells}) == len(cells) > 1


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow if path.stem in SLOW else ())
        for path in FILES
    ],
    ids=lambda path: path.stem,
)
def test_it_trains(path: Path, tmp_path: Path) -> None:
    small = shrink(load(path).experiment)
    periods = replace(small.train, n_steps=2, eval_every=None, save_every=None)
    result = train(replace(small, train=periods), tmp_path / "run")
    assert result["steps"] == 2
    assert 0 < result["valid_bpb"] < 10
    assert np.isfinite(result["valid_bpb"])
