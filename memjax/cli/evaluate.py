"""`memjax eval`: bits per byte of a run on a held-out part, and what its memories do.

What: scores valid at any time; scores test once, on purpose, and records it; on request
    measures the usage and trust of the memories, scores the run with its tables in 8
    bits, or mixes in nearest neighbours.
Why: valid steers choices; a test figure looked at often is one more valid figure.
When not: while training; the loop evaluates valid by itself.
"""

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from memjax.cli.arguments import (
    File,
    Flag,
    OptionalDir,
    Scale,
    UsageError,
    parse_with_overrides,
)
from memjax.cli.knn import KnnOptions, knn_config, knn_text
from memjax.cli.process_options import ProcessOptions, joined, wanted_processes
from memjax.cli.table import rows_of
from memjax.cli.target import SweepTarget, resolve, resolve_sweep
from memjax.errors import CheckpointError
from memjax.experiment import config_hash, load_experiment
from memjax.experiment.cells import RESULT_FILE, read_result
from memjax.experiment.definition import CONFIG_FILE, write_json
from memjax.report.memory import memory_text
from memjax.report.results import results_table
from memjax.report.text_table import text_table


@dataclass(frozen=True, kw_only=True)
class Eval(KnnOptions, ProcessOptions):
    """Bits per byte of a run, every byte of the part scored once.

    Test is scored by an explicit --split test, only of finished runs, and recorded in
    the run's result.json; asked again, the recorded figure is printed. With --memory,
    also tables of how its memories are used and trusted. With --fp8, also the score
    with the memory tables in 8-bit floats. With --knn, also kNN-LM: the
    model mixed with what followed the nearest states of the training text.

    A run of several processes is scored by several, in the same words as in `memjax
    train`; the three measurements beside the score are of one process.
    """

    file: File
    """Run folder, or the experiment file (with its overrides) of a run."""
    split: Literal["valid", "test"] = "valid"
    """Held-out part."""
    sweep: Flag = False
    """FILE is a sweep: score the runs its table stands on (of each arm the best on
    valid); all its cells must be finished."""
    again: Flag = False
    """Score test again although it was scored."""
    memory: Flag = False
    """Measure the memories as well: usage of slots, gates, loss with and without them
    by gate and by n-gram frequency, collisions, the gradient's division."""
    order: int = 3
    """With --memory: length of the n-grams whose frequency in train is looked up."""
    fp8: Flag = False
    """Score the run with its memory tables in 8-bit floats (e4m3, a power of two for
    every 32 entries) as well."""
    json: Annotated[str | None, tyro.conf.arg(metavar="OUT")] = None
    """Also write the figures to this JSON file."""
    run_dir: OptionalDir = None
    """Folder of the run, or of the sweep's runs."""
    debug: Flag = False
    """The run was trained with --debug."""
    scale: Scale = "laptop"
    """Size the run was trained at."""


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    command, overrides = parse_with_overrides(Eval, argv, "eval")
    given: dict[str, Any] = {
        "run_dir": command.run_dir,
        "scale": command.scale,
        "debug": command.debug,
        "overrides": overrides,
    }
    from memjax.train.noise import quiet_libraries

    quiet_libraries()
    if command.order != 3 and not command.memory:
        raise UsageError("--order belongs to --memory")
    knn = knn_config(command)
    if knn is not None and command.split == "test" and len(knn.lambdas) > 1:
        raise UsageError("lambda is chosen on valid; test takes one --knn-lambda")
    measures = command.memory or command.knn or command.fp8
    if measures and wanted_processes(command) is not None:
        raise UsageError("--memory, --fp8 and --knn are for one process")
    with joined(command) as speaks:
        return _evaluate(command, given, knn, speaks)


def _evaluate(command: Eval, given: dict[str, Any], knn: Any, speaks: bool) -> int:
    """`speaks`: this is the process that prints and writes, of one or several."""
    if command.sweep:
        if command.memory or command.knn or command.fp8 or command.json is not None:
            raise UsageError(
                "--memory, --fp8, --knn and --json are for one run, not for a --sweep"
            )
        sweep = resolve_sweep(command.file, **given)
        for run_dir in selected_runs(sweep):
            scores = score(run_dir, command.split, again=command.again, speaks=speaks)
            if speaks:
                found = scores[f"{command.split}_bpb"]
                print(f"{run_dir.name}: {found:.4f}", flush=True)
        return 0
    target = resolve(command.file, **given)
    if not (target.run_dir / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{target.run_dir} holds no run; allowed: a folder that `memjax train` made"
        )
    if given["overrides"] and Path(command.file).is_dir():
        raise UsageError(
            "overrides name the run of an experiment file, not of a folder"
        )
    scores = score(target.run_dir, command.split, again=command.again, speaks=speaks)
    if not speaks:
        return 0
    print(results_table(scores, split=command.split))
    if command.memory:
        from memjax.run import measure_memory

        measured = measure_memory(target.run_dir, command.split, order=command.order)
        print("\n" + memory_text(measured))
        scores = {**scores, "memory": measured}
    if command.fp8:
        quantized = score_fp8(target.run_dir, command.split)
        print("\n" + fp8_text(scores, quantized, command.split))
        scores = {**scores, "fp8": quantized}
    if knn is not None:
        mixed = score_mixed(
            target.run_dir, command.split, knn, rebuild=command.knn_rebuild
        )
        print("\n" + knn_text(mixed))
        scores = {**scores, "knn": mixed}
    if command.json is not None:
        write_json(command.json, _without_nan(scores))
    return 0


def _without_nan(plain: Any) -> Any:
    """Undefined numbers as null: JSON has no other word for them."""
    if isinstance(plain, dict):
        return {key: _without_nan(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [_without_nan(value) for value in plain]
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def score(
    run_dir: Path, split: str, *, again: bool = False, speaks: bool = True
) -> dict[str, Any]:
    """Score one run; a test score is taken from, or added to, its result file.

    Of several processes only one `speaks`, that is, prints and writes.

    Raises CheckpointError for a test score of a run that has not finished.
    """
    from memjax.run import evaluate

    result = read_result(run_dir)
    if split == "test":
        if result is None or "config_hash" not in result:
            raise CheckpointError(
                f"{run_dir} has no {RESULT_FILE}: only finished runs are scored on test"
            )
        config = load_experiment(run_dir).experiment
        if result["config_hash"] != config_hash(config):
            raise CheckpointError(
                f"{run_dir} went on after its {RESULT_FILE} and has not reached step "
                f"{config.train.n_steps}: only finished runs are scored on test"
            )
        if "test_bpb" in result and not again:
            if speaks:
                print(f"{run_dir}: test was scored {result['test_scored'][-1]}")
            return result
    scores = evaluate(run_dir, split)
    if split == "test" and result is not None and speaks:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        result |= {name: scores[name] for name in ("test", "test_bpb")}
        result["test_scored"] = [*result.get("test_scored", []), now]
        write_json(run_dir / RESULT_FILE, result)
    return scores


def score_fp8(run_dir: Path, split: str) -> dict[str, Any]:
    """Score one run with its tables in FP8; of test, the figures join its result file.

    The run itself has been scored on the split before.
    """
    from memjax.run import evaluate

    found = evaluate(run_dir, split, fp8=True)
    result = read_result(run_dir)
    if split == "test" and result is not None:
        result["test_fp8"] = [*result.get("test_fp8", []), found]
        write_json(run_dir / RESULT_FILE, result)
    return found


def fp8_text(scores: Mapping[str, Any], fp8: Mapping[str, Any], split: str) -> str:
    """A table of bits per byte, by corpus: as trained, and with tables in FP8."""
    corpora = list(scores[split])
    together = ["all"] if len(corpora) > 1 else []
    body = []
    for name, found in (("tables as trained", scores), ("tables in FP8", fp8)):
        figures = [found[split][corpus] for corpus in corpora]
        figures += [found[f"{split}_bpb"] for _ in together]
        body.append([name, *(f"{figure:.4f}" for figure in figures)])
    return text_table(["bits per byte", *corpora, *together], body)


def score_mixed(
    run_dir: Path, split: str, config: Any, *, rebuild: bool
) -> dict[str, Any]:
    """Score one run mixed with neighbours; of test, the figures join its result file.

    The run itself has been scored on the split before.
    """
    from memjax.run import evaluate_knn

    report = functools.partial(print, flush=True)
    found = evaluate_knn(run_dir, split, config=config, rebuild=rebuild, report=report)
    result = read_result(run_dir)
    if split == "test" and result is not None:
        result["test_knn"] = [*result.get("test_knn", []), _without_nan(found)]
        write_json(run_dir / RESULT_FILE, result)
    return found


def selected_runs(target: SweepTarget) -> list[Path]:
    """The runs behind the selected rows of a finished sweep's table, all seeds."""
    missing = [cell.name for cell in target.cells if cell.result() is None]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(target.cells)} cells are not finished, such as "
            f"{missing[0]}; `memjax sweep` runs them"
        )
    chosen = [row.labels for row in rows_of(target) if row.is_selected]
    return [
        cell.run_dir
        for cell in target.cells
        if {one.path: one.label for one in cell.cell if one.path != "seed"} in chosen
    ]
