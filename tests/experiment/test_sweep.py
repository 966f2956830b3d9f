"""Sweeps: combinators, labels, and the cells that are still missing on disk."""

import threading

import pytest

from memjax.errors import ConfigError, DataError
from memjax.experiment import Experiment, axis, config_hash, product, zip_
from memjax.experiment.cells import only_matching, plan_cells, run_cells
from memjax.experiment.definition import write_json
from memjax.experiment.sweep import Sweep, labels_of
from memjax.layers.engram import EngramConfig
from memjax.train.config import TrainConfig

MEMORIES = axis("model.memories", off=(), on=(EngramConfig(),))
RATES = axis("optim.learning-rate", 1e-3, 2e-2)
SEEDS = axis("seed", 0, 1)
BASE = Experiment(name="base")


def test_product_and_zip():
    sweep = product(MEMORIES, RATES, SEEDS)
    assert sweep.axes == ("model.memories", "optim.learning_rate", "seed")
    assert len(sweep.cells) == 8
    assert labels_of(sweep.cells[1]) == {
        "model.memories": "off",
        "optim.learning_rate": "0.001",
        "seed": "1",
    }
    paired = product(zip_(MEMORIES, RATES), SEEDS)
    assert [tuple(labels_of(cell).values()) for cell in paired.cells] == [
        ("off", "0.001", "0"),
        ("off", "0.001", "1"),
        ("on", "0.02", "0"),
        ("on", "0.02", "1"),
    ]


def test_default_labels():
    sweep = axis("model.memories", (), (EngramConfig(), EngramConfig(layers=(2,))))
    assert [cell[0].label for cell in sweep.cells] == ["none", "engram+engram"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: zip_(SEEDS, axis("data.seed", 1)), r"sweep\.zip_ = \(2, 1\)"),
        (lambda: axis("seed"), r"sweep\.seed"),
        (lambda: product(SEEDS, SEEDS), "each path once"),
        (lambda: axis("seed", 1, 1), "each cell once"),
        (lambda: product(SEEDS, select=("seed",)), r"sweep\.select = 'seed'"),
        (lambda: product(SEEDS, RATES, select=("optim.rate",)), r"sweep\.select"),
        (
            lambda: product(MEMORIES, SEEDS, baseline={"model.memories": "of"}),
            r"sweep\.baseline\.model\.memories = 'of'.*'off', 'on'",
        ),
        (lambda: Sweep(cells=()), r"sweep\.cells"),
    ],
)
def test_impossible_sweeps(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_cells_get_their_settings_and_their_own_folder(tmp_path):
    cells = plan_cells(BASE, product(MEMORIES, RATES, SEEDS), tmp_path)
    assert len({cell.run_dir for cell in cells}) == 8
    last = cells[-1]
    assert last.experiment.model.memories == (EngramConfig(),)
    assert last.experiment.optim.learning_rate == 0.02
    assert last.experiment.seed == 1
    assert last.name.startswith("memories=on,learning_rate=0.02,seed=1-")
    assert not list(tmp_path.iterdir())


def test_a_bad_cell_is_found_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.d_modle = 64"):
        plan_cells(BASE, axis("model.d_modle", 64), tmp_path)


def test_another_length_is_another_run(tmp_path):
    first = plan_cells(BASE, SEEDS, tmp_path)
    longer = Experiment(name="base", train=TrainConfig(n_steps=2000))
    second = plan_cells(longer, SEEDS, tmp_path)
    assert not {cell.name for cell in first} & {cell.name for cell in second}


def finish(cell):
    write_json(
        cell.run_dir / "result.json",
        {"valid_bpb": 1.0, "config_hash": config_hash(cell.experiment)},
    )
    return 0


def test_only_missing_cells_run_and_a_failure_stops_nothing(tmp_path):
    cells = plan_cells(BASE, product(RATES, SEEDS), tmp_path)
    finish(cells[0])
    cells[1].run_dir.mkdir()
    assert [cell.state() for cell in cells] == ["finished", "started", "new", "new"]
    launched, lines = [], []

    def launch(cell):
        launched.append(cell.name)
        if cell is cells[1]:
            raise OSError("no such program")
        if cell is cells[2]:
            return 0  # told to stop: no result
        return finish(cell)

    outcome = run_cells(cells, launch, report=lines.append)
    assert launched == [cell.name for cell in cells[1:]]
    assert outcome == {
        "finished before": [cells[0].name],
        "finished": [cells[3].name],
        "stopped": [cells[2].name],
        "failed": [cells[1].name],
    }
    assert lines[0] == f"[1/3] resume {cells[1].name}"
    assert any("no such program" in line for line in lines)
    launched.clear()
    run_cells(cells, lambda cell: launched.append(cell.name) or finish(cell))
    assert launched == [cells[1].name, cells[2].name]
    again = run_cells(cells, launch)
    assert len(again["finished before"]) == 4


def test_jobs_run_side_by_side(tmp_path):
    cells = plan_cells(BASE, SEEDS, tmp_path)
    both = threading.Barrier(2, timeout=20)

    def launch(cell):
        both.wait()
        return finish(cell)

    outcome = run_cells(cells, launch, jobs=2, report=lambda line: None)
    assert len(outcome["finished"]) == 2
    with pytest.raises(ConfigError, match="jobs = 0"):
        run_cells(cells, launch, jobs=0)


def test_a_result_of_another_config_does_not_count(tmp_path):
    (cell, _) = plan_cells(BASE, SEEDS, tmp_path)
    write_json(cell.run_dir / "result.json", {"valid_bpb": 1.0, "config_hash": "other"})
    assert cell.state() == "started"
    (cell.run_dir / "result.json").write_text("{")
    with pytest.raises(DataError, match="result.json"):
        cell.result()


def test_only_selects_by_name(tmp_path):
    cells = plan_cells(BASE, product(RATES, SEEDS), tmp_path)
    assert len(only_matching(cells, "learning_rate=0.02")) == 2
    assert len(only_matching(cells, None)) == 4
    with pytest.raises(ConfigError, match="only = 'seed=7'"):
        only_matching(cells, "seed=7")
