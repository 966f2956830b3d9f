"""From the words of a command line to an experiment and its run folder.

What: `resolve` loads a file, shrinks it for --debug, applies overrides, names a folder.
Why: every command means the same run by the same words.
When not: files are read by `memjax.experiment.load_experiment`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memjax.errors import ConfigError
from memjax.experiment import (
    Experiment,
    Loaded,
    config_hash,
    load_experiment,
    override,
    shrink,
)
from memjax.experiment.cells import Planned, plan_cells
from memjax.experiment.definition import CONFIG_FILE

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a command works on.

    Attributes:
        loaded: the file as it is.
        experiment: the resolved experiment.
        run_dir: its run folder, which need not exist.
    """

    loaded: Loaded
    experiment: Experiment
    run_dir: Path


def resolve(
    file: str,
    *,
    run_dir: str | None = None,
    scale: str = "laptop",
    debug: bool = False,
    overrides: Sequence[tuple[str, str]] = (),
) -> Target:
    """Load `file`, shrink it when `debug`, then apply the overrides, which win.

    The default run folder is runs/NAME-HASH below the current directory; for a saved
    config inside a run folder it is that folder.
    """
    loaded = load_experiment(file, scale)
    experiment = shrink(loaded.experiment) if debug else loaded.experiment
    experiment = override(experiment, overrides).validate()
    if run_dir is not None:
        folder = _folder(run_dir)
    elif loaded.path.name == CONFIG_FILE and not debug:
        folder = loaded.path.parent
    else:
        mark = "-debug" if debug else ""
        folder = RUNS / f"{experiment.name}{mark}-{config_hash(experiment)[:8]}"
    return Target(loaded=loaded, experiment=experiment, run_dir=folder)


@dataclass(frozen=True, kw_only=True)
class SweepTarget:
    """A sweep file, the folder of its runs, and its cells."""

    loaded: Loaded
    root: Path
    cells: list[Planned]


def resolve_sweep(
    file: str,
    *,
    run_dir: str | None = None,
    scale: str = "laptop",
    debug: bool = False,
    overrides: Sequence[tuple[str, str]] = (),
) -> SweepTarget:
    """The cells of a sweep file, every one checked.

    Overrides apply to all cells; one that an axis varies is an error. The default
    folder is runs/NAME, runs/NAME-debug with `debug`.
    """
    loaded = load_experiment(file, scale)
    if loaded.sweep is None:
        raise ConfigError("FILE", file, "a file that defines sweep()")
    for path, text in overrides:
        field = path.replace("-", "_")
        for axis in loaded.sweep.axes:
            if f"{field}.".startswith(f"{axis}."):
                raise ConfigError(
                    field, text, f"not given: {axis} is an axis of {file}"
                )

    def finish(experiment: Experiment) -> Experiment:
        experiment = shrink(experiment) if debug else experiment
        return override(experiment, overrides)

    name = loaded.experiment.name + ("-debug" if debug else "")
    root = RUNS / name if run_dir is None else _folder(run_dir)
    cells = plan_cells(loaded.experiment, loaded.sweep, root, finish=finish)
    return SweepTarget(loaded=loaded, root=root, cells=cells)


def _folder(run_dir: str) -> Path:
    """An empty text is a shell variable that is not set, never the folder here."""
    if not run_dir.strip():
        raise ConfigError("run-dir", run_dir, "the name of a folder")
    return Path(run_dir)
