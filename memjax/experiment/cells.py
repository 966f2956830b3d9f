"""The runs of a sweep on disk: which exist, which are missing, and running those.

What: `plan_cells` names a folder per cell, `run_cells` launches the unfinished ones.
Why: a sweep may be stopped at any time; the same command does what is left.
When not: what a run does; the launcher that is handed in decides that.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memjax.errors import ConfigError, DataError
from memjax.experiment.definition import Experiment, config_hash
from memjax.experiment.sweep import Cell, Sweep, apply_cell, cell_name

RESULT_FILE = "result.json"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One cell: its settings, its experiment, its run folder."""

    cell: Cell
    name: str
    experiment: Experiment
    run_dir: Path

    def result(self) -> dict[str, Any] | None:
        """The result of the finished run, None while there is none.

        A result that another config left in the folder does not count.
        """
        result = read_result(self.run_dir)
        if result is None or result.get("config_hash") != config_hash(self.experiment):
            return None
        return result

    def state(self) -> str:
        """ "finished", "started" (a folder without result) or "new"."""
        if self.result() is not None:
            return "finished"
        return "started" if self.run_dir.is_dir() else "new"


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """The result file of a run folder; None when the run has not finished.

    Raises DataError for a file that is no JSON object.
    """
    path = Path(run_dir) / RESULT_FILE
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(result, dict):
            raise ValueError("not a JSON object")
        return result
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}; delete it, and `memjax train` of the run "
            "writes it anew"
        ) from error


def plan_cells(
    experiment: Experiment,
    sweep: Sweep,
    root: Path,
    *,
    finish: Callable[[Experiment], Experiment] = lambda experiment: experiment,
) -> list[Planned]:
    """Every cell of `sweep` around `experiment`, in order, all checked first.

    Args:
      experiment: what the settings of a cell are applied to.
      sweep: the cells.
      root: folder of the run folders.
      finish: last change of each cell's experiment, such as shrinking it.
    """
    planned = []
    for cell in sweep.cells:
        whole = finish(apply_cell(experiment, cell)).validate()
        name = cell_name(cell, whole)
        planned.append(
            Planned(cell=cell, name=name, experiment=whole, run_dir=root / name)
        )
    return planned


def only_matching(cells: Sequence[Planned], text: str | None) -> list[Planned]:
    """The cells whose folder name contains `text`; ConfigError when none does."""
    matching = [cell for cell in cells if text is None or text in cell.name]
    if not matching:
        names = ", ".join(cell.name for cell in cells[:3])
        raise ConfigError("only", text, f"part of a cell's name, such as {names}")
    return matching


def run_cells(
    cells: Iterable[Planned],
    launch: Callable[[Planned], int],
    *,
    jobs: int = 1,
    report: Callable[[str], None] = print,
) -> dict[str, list[str]]:
    """Launch every cell that has no result; a failing cell does not stop the others.

    Args:
      cells: finished ones are skipped.
      launch: runs one cell to its end and returns its exit code.
      jobs: cells at the same time.
      report: called with a line when a cell starts and when it ends.

    Returns:
      Names by outcome: "finished before", "finished", "stopped" (exit code 0 without a
      result: it was told to stop and will go on next time) and "failed".
    """
    if jobs < 1:
        raise ConfigError("jobs", jobs, "at least 1")
    outcome: dict[str, list[str]] = {
        "finished before": [],
        "finished": [],
        "stopped": [],
        "failed": [],
    }
    todo = []
    for cell in cells:
        if cell.result() is None:
            todo.append(cell)
        else:
            outcome["finished before"].append(cell.name)

    def run(numbered: tuple[int, Planned]) -> tuple[Planned, int | Exception]:
        number, cell = numbered
        word = "resume" if cell.state() == "started" else "start"
        report(f"[{number}/{len(todo)}] {word} {cell.name}")
        try:
            return cell, launch(cell)
        except Exception as error:
            return cell, error

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for cell, code in pool.map(run, enumerate(todo, start=1)):
            if code == 0:
                ending = "stopped" if cell.result() is None else "finished"
            else:
                ending = "failed"
            outcome[ending].append(cell.name)
            detail = f" ({code})" if ending == "failed" else ""
            report(f"{ending} {cell.name}{detail}")
    return outcome
