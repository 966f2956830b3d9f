"""`memjax train`: from an experiment file to a finished run and its results table.

What: says what will be trained, trains or resumes, then sample, table, folder.
Why: one command is the whole path from a file to a number.
When not: training itself; `memjax.run` and `memjax.train` do that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memjax.cli.arguments import File, Flag, OptionalDir, Scale, parse_with_overrides
from memjax.cli.sample import readable
from memjax.cli.target import resolve
from memjax.experiment import diff
from memjax.experiment.cells import RESULT_FILE, read_result
from memjax.experiment.definition import write_json
from memjax.report.plan import plan_text
from memjax.report.results import results_table


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train an experiment. The same command again goes on where it stopped.

    Any field of the experiment is an option: --train.n-steps 200,
    --model.memories.0.n-heads 4. `memjax train FILE --help` lists them all.
    """

    file: File
    """Experiment file (.py), saved config (.json) or run folder."""
    run_dir: OptionalDir = None
    """Folder of the run; default runs/NAME-HASH in the current directory."""
    debug: Flag = False
    """Shrink the experiment to seconds; overrides apply afterwards."""
    scale: Scale = "laptop"
    """Size, for files that offer several."""
    no_sample: Flag = False
    """Do not print a sample of text at the end."""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    command, overrides = parse_with_overrides(Train, argv, "train")
    target = resolve(
        command.file,
        run_dir=command.run_dir,
        scale=command.scale,
        debug=command.debug,
        overrides=overrides,
    )
    from memjax.build.sizes import describe
    from memjax.run import sample, train
    from memjax.train.noise import quiet_libraries

    quiet_libraries()
    changes = [
        str(change) for change in diff(target.loaded.experiment, target.experiment)
    ]
    print(f"{target.experiment.name}: {target.run_dir}")
    for change in changes:
        print(f"  {change}")
    print(plan_text(describe(target.experiment)), flush=True)
    earlier = read_result(target.run_dir)
    result = train(target.experiment, target.run_dir, changes=changes)
    if result["stopped_by"] is not None or not _is_first_process():
        return 0  # a stopped run is saved; the loop has said how to go on
    keep_test_scores(target.run_dir, earlier)
    if not command.no_sample:
        text = sample(target.run_dir, n_tokens=300)
        print(f"\na sample:\n{readable(text)}")
    print(f"\n{results_table(result)}\n")
    print(f"run folder: {target.run_dir}")
    return 0


def keep_test_scores(run_dir: Path, earlier: Mapping[str, Any] | None) -> None:
    """Put what an earlier result file recorded about test into the new one.

    Only for the same parameters: not when the run went on to another step.
    """
    result = read_result(run_dir)
    if earlier is None or result is None or earlier.get("steps") != result["steps"]:
        return
    marks = {name: earlier[name] for name in earlier if name.startswith("test")}
    if marks:
        write_json(run_dir / RESULT_FILE, result | marks)


def _is_first_process() -> bool:
    import jax

    return jax.process_index() == 0
