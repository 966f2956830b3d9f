"""Sweeps: the cells of a table, written as products and zips of axes.

What: `axis`, `product`, `zip_` build a `Sweep`: cells of (path, value) settings.
Why: a table is plain Python next to its config, with the same paths as overrides.
When not: one run; that is `memjax train` with overrides.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memjax.errors import ConfigError
from memjax.experiment import paths, values
from memjax.experiment.definition import Experiment, config_hash

SEED = "seed"


class Setting(NamedTuple):
    """One value of one axis; `label` is what folders and tables show."""

    path: str
    value: Any
    label: str


Cell = tuple[Setting, ...]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The cells of one table, and how to read it.

    Attributes:
      cells: one tuple of settings per run, all with the same paths.
      baseline: axis path -> label of the arm that others are compared with; axes not
        named keep the value of the row that is compared.
      select: axis paths, such as learning rates, whose best value per arm is chosen by
        the mean of the validation metric.
    """

    cells: tuple[Cell, ...]
    baseline: Mapping[str, str] | None = None
    select: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.cells:
            raise ConfigError("sweep.cells", (), "at least one cell")
        axes = self.axes
        for cell in self.cells:
            if tuple(setting.path for setting in cell) != axes:
                raise ConfigError("sweep.cells", labels_of(cell), f"axes {axes}")
        if len(set(axes)) != len(axes):
            raise ConfigError("sweep.axes", axes, "each path once")
        seen = [tuple(labels_of(cell).items()) for cell in self.cells]
        for labels in seen:
            if seen.count(labels) > 1:
                raise ConfigError("sweep.cells", dict(labels), "each cell once")
        for path in self.select:
            if path not in axes or path == SEED:
                raise ConfigError("sweep.select", path, f"one of {axes}, not the seed")
        for path, label in (self.baseline or {}).items():
            named = [labels_of(cell) for cell in self.cells]
            known = {one[path] for one in named if path in one}
            if path in self.select or path == SEED or label not in known:
                allowed = f"{path} among the axes {axes}, a label of {sorted(known)}"
                raise ConfigError(f"sweep.baseline.{path}", label, allowed)

    @property
    def axes(self) -> tuple[str, ...]:
        """The paths that the sweep varies, in the order given."""
        return tuple(setting.path for setting in self.cells[0])


def axis(path: str, *plain: Any, **named: Any) -> Sweep:
    """One axis: the values that one path takes.

    Args:
      path: dotted path of a field of the experiment; dashes count as underscores.
      *plain: values, labelled by how they print.
      **named: label=value, for values that print badly, such as configs:
        `axis("model.memories", off=(), on=(EngramConfig(...),))`.
    """
    path = path.replace("-", "_")
    settings = [Setting(path, value, label_of(value)) for value in plain]
    settings += [Setting(path, value, label) for label, value in named.items()]
    if not settings:
        raise ConfigError(f"sweep.{path}", (), "at least one value")
    return Sweep(cells=tuple((setting,) for setting in settings))


def product(
    *sweeps: Sweep,
    baseline: Mapping[str, Any] | None = None,
    select: Sequence[str] = (),
) -> Sweep:
    """Every combination of the given axes or sweeps; the last varies fastest."""
    cells = (
        tuple(itertools.chain.from_iterable(parts))
        for parts in itertools.product(*(sweep.cells for sweep in sweeps))
    )
    return _read_as(cells, baseline, select)


def zip_(
    *sweeps: Sweep,
    baseline: Mapping[str, Any] | None = None,
    select: Sequence[str] = (),
) -> Sweep:
    """The given axes or sweeps side by side: first with first, second with second.

    Raises ConfigError when their lengths differ.
    """
    lengths = [len(sweep.cells) for sweep in sweeps]
    if len(set(lengths)) > 1:
        raise ConfigError("sweep.zip_", tuple(lengths), "axes of one length")
    cells = (
        tuple(itertools.chain.from_iterable(parts))
        for parts in zip(*(sweep.cells for sweep in sweeps), strict=True)
    )
    return _read_as(cells, baseline, select)


def _read_as(
    cells: Iterable[Cell], baseline: Mapping[str, Any] | None, select: Sequence[str]
) -> Sweep:
    labels = None
    if baseline is not None:
        labels = {
            path.replace("-", "_"): label_of(value) for path, value in baseline.items()
        }
    return Sweep(
        cells=tuple(cells),
        baseline=labels,
        select=tuple(path.replace("-", "_") for path in select),
    )


def label_of(value: Any) -> str:
    """How a value prints in folders and tables: () is `none`, a config its kind."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return values.kind_of(type(value))
    if isinstance(value, tuple | list):
        return "+".join(label_of(part) for part in value) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def labels_of(cell: Cell) -> dict[str, str]:
    """Axis path -> label of one cell."""
    return {setting.path: setting.label for setting in cell}


def apply_cell(experiment: Experiment, cell: Cell) -> Experiment:
    """The experiment of one cell: every setting replaced at once."""
    return paths.override(experiment, [(one.path, one.value) for one in cell])


def cell_name(cell: Cell, experiment: Experiment) -> str:
    """The folder of one cell: its labels, then eight digits of its config's hash."""
    parts = [f"{one.path.rpartition('.')[2]}={one.label}" for one in cell]
    text = re.sub(r"[^A-Za-z0-9_.,=+-]", "_", ",".join(parts))[:120]
    return f"{text}-{config_hash(experiment)[:8]}"
