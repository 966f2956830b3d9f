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
from memjax.cli.process_options import ProcessOptions, joined
from memjax.cli.sample import readable
from memjax.cli.target import Target, resolve
from memjax.experiment import diff, to_dict
from memjax.experiment.cells import RESULT_FILE, read_result
from memjax.experiment.definition import write_json
from memjax.report.plan import plan_text
from memjax.report.results import results_table


@dataclass(frozen=True, kw_only=True)
class Train(ProcessOptions):
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
    stopped_code: int = 0
    """Exit code of a run that was told to stop, and saved. A cluster that starts failed
    jobs again needs one that is not 0."""


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
    from memjax.train.noise import quiet_libraries

    quiet_libraries()
    with joined(command) as speaks:
        return _train(command, target, speaks)


def _train(command: Train, target: Target, speaks: bool) -> int:
    """`speaks`: this is the process that prints and writes, of one or several."""
    import jax

    from memjax.build.sizes import describe
    from memjax.parallel.processes import agree
    from memjax.run import sample, train

    experiment, run_dir = target.experiment, target.run_dir
    agree("experiment", {**to_dict(experiment), "run_dir": str(run_dir)})
    changes = [str(change) for change in diff(target.loaded.experiment, experiment)]
    if speaks:
        print(f"{experiment.name}: {run_dir}")
        for change in changes:
            print(f"  {change}")
        print(plan_text(describe(experiment)), flush=True)
    earlier = read_result(run_dir)
    result = train(experiment, run_dir, changes=changes)
    if result["stopped_by"] is not None:
        return command.stopped_code  # it is saved; the loop has said how to go on
    if not speaks:
        return 0
    keep_test_scores(run_dir, earlier)
    if not command.no_sample and jax.process_count() > 1:
        print(f"\nfor a sample, in one process: memjax sample {run_dir}")
    elif not command.no_sample:
        text = sample(run_dir, n_tokens=300)
        print(f"\na sample:\n{readable(text)}")
    print(f"\n{results_table(result)}\n")
    print(f"run folder: {run_dir}")
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
