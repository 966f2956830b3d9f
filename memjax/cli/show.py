"""`memjax show`: an experiment on paper.

What: the resolved config, shapes, parameters dense and table, FLOPs, table bytes.
Why: a wrong size is cheaper to find here than on a device.
When not: running; nothing is allocated and no device is touched.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memjax.cli.arguments import File, Flag, Scale, parse_with_overrides
from memjax.cli.target import resolve
from memjax.experiment import config_hash, diff, flatten, to_dict
from memjax.report.plan import plan_text
from memjax.report.text_table import text_table


@dataclass(frozen=True, kw_only=True)
class Show:
    """Print an experiment: config, shapes, sizes, costs. No device is touched.

    Fields that differ from the file are marked with a star.
    """

    file: File
    """Experiment file (.py), saved config (.json) or run folder."""
    debug: Flag = False
    """Shrink the experiment to seconds."""
    scale: Scale = "laptop"
    """Size, for files that offer several."""
    json: Flag = False
    """Config and description as JSON."""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    command, overrides = parse_with_overrides(Show, argv, "show")
    target = resolve(
        command.file, scale=command.scale, debug=command.debug, overrides=overrides
    )
    from memjax.build.sizes import describe

    description = describe(target.experiment)
    if command.json:
        plain = {"config": to_dict(target.experiment), "description": description}
        print(json.dumps(plain, indent=2))
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
