"""`memjax show`: an experiment on paper.

What: the resolved config, shapes, parameters dense and table, FLOPs, table bytes; with
    a chip, what a step costs there.
Why: a wrong size is cheaper to find here than on a device.
When not: running; nothing of the model is allocated.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from memjax.cli.arguments import (
    File,
    Flag,
    OptionalText,
    Overrides,
    Scale,
    UsageError,
    parse_with_overrides,
)
from memjax.cli.target import resolve
from memjax.errors import ConfigError
from memjax.experiment import Experiment, config_hash, diff, flatten, to_dict
from memjax.report.device_plan import device_plan_text
from memjax.report.plan import plan_text
from memjax.report.text_table import text_table


@dataclass(frozen=True, kw_only=True)
class Show:
    """Print an experiment: config, shapes, sizes, costs. Nothing of it is allocated.

    Fields that differ from the file are marked with a star. With --chip, print a plan
    for that machine in place of config and shapes: memory, exchange and the least a
    step can take.
    """

    file: File
    """Experiment file (.py), saved config (.json) or run folder."""
    debug: Flag = False
    """Shrink the experiment to seconds."""
    scale: Scale = "laptop"
    """Size, for files that offer several."""
    mesh: OptionalText = None
    """Mesh of the plan, such as data=-1,table=8; other fields as in the file."""
    chip: OptionalText = None
    """Plan for this chip: h100, h200, v5p or v6e."""
    chips: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """How many; the product of the mesh by default."""
    json: Flag = False
    """Config and description, and the plan if there is one, as JSON."""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    command, overrides = parse_with_overrides(Show, argv, "show")
    for name in ("mesh", "chips"):
        if command.chip is None and getattr(command, name) is not None:
            raise UsageError(f"--{name} needs --chip, such as --chip h200")
    target = resolve(
        command.file,
        scale=command.scale,
        debug=command.debug,
        overrides=[*overrides, *_mesh_overrides(command.mesh)],
    )
    from memjax.build.sizes import describe

    description = describe(target.experiment)
    plan = None
    if command.chip is not None:
        from memjax.build.planner import plan as make_plan

        n_chips = _n_chips(command.chips, target.experiment)
        plan = make_plan(target.experiment, command.chip, n_chips)
    if command.json:
        plain = {"config": to_dict(target.experiment), "description": description}
        if plan is not None:
            plain["plan"] = plan
        print(json.dumps(plain, indent=2))
        return 0
    if plan is not None:
        print(f"{plan_text(description)}\n\n{device_plan_text(plan)}")
        return 0
    changed = {
        change.path for change in diff(target.loaded.experiment, target.experiment)
    }
    rows = [
        ["*" if path in changed else "", path, str(value)]
        for path, value in flatten(target.experiment).items()
    ]
    print(_columns(rows))
    print(f"\nhash {config_hash(target.experiment)}, run folder {target.run_dir}\n")
    print(shapes_text(description["shapes"]))
    print(f"\n{plan_text(description)}")
    return 0


def _mesh_overrides(text: str | None) -> Overrides:
    """data=16,table=8 as overrides of the fields of the mesh."""
    found = []
    for part in [] if text is None else text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not name.strip() or not value.strip():
            raise ConfigError("mesh", text, "fields such as data=16,table=8")
        found.append((f"mesh.{name.strip()}", value.strip()))
    return found


def _n_chips(given: int | None, experiment: Experiment) -> int:
    """The chips of a plan; checked to be as many as the mesh says by whoever plans."""
    if given is not None:
        if given < 1:
            raise ConfigError("chips", given, "at least 1")
        return given
    sizes = [getattr(experiment.mesh, name) for name in ("data", "fsdp", "tensor")]
    sizes.append(experiment.mesh.table)
    if -1 in sizes:
        raise ConfigError("chips", None, "given where an axis of the mesh is -1")
    return math.prod(sizes)


def _columns(rows: Sequence[Sequence[str]]) -> str:
    width = max(len(path) for _, path, _ in rows)
    return "\n".join(f"{mark:1} {path:{width}}  {value}" for mark, path, value in rows)


def shapes_text(shapes: dict[str, Any]) -> str:
    """A table of parameters: path, shape, dtype, label, count."""
    rows = []
    for path, leaf in shapes.items():
        text = " x ".join(map(str, leaf["shape"])) or "scalar"
        count = str(math.prod(leaf["shape"]))
        rows.append([path, text, leaf["dtype"], leaf["label"], count])
    return text_table(["parameter", "shape", "dtype", "label", "count"], rows)
