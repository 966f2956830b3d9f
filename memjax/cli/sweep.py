"""`memjax sweep`: run the missing cells of a sweep, each in a process of its own.

What: one `memjax train` per cell; finished cells are skipped, stopped ones resumed.
Why: a crash, or a machine taken away, costs one cell's last steps and nothing else.
When not: clusters; submit `memjax sweep FILE --only PART` as separate jobs there.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from memjax.cli.arguments import (
    File,
    Flag,
    OptionalDir,
    OptionalText,
    Scale,
    parse_with_overrides,
)
from memjax.cli.target import resolve_sweep
from memjax.experiment import save
from memjax.experiment.cells import Planned, only_matching, run_cells

CELL_FILE = "cell.json"
LOG_FILE = "output.log"


@dataclass(frozen=True, kw_only=True)
class SweepCommand:
    """Run the cells of a sweep that have no result yet.

    Stop it at any time; the same command does what is left. Overrides apply to every
    cell: --train.n-steps 100.
    """

    file: File
    """File with config() and sweep()."""
    run_dir: OptionalDir = None
    """Folder of the run folders; default runs/NAME."""
    only: OptionalText = None
    """Only cells whose folder name contains this text, such as seed=0."""
    jobs: int = 1
    """Cells at the same time."""
    dry_run: Flag = False
    """List the cells and their state; run nothing."""
    debug: Flag = False
    """Shrink every cell to seconds."""
    scale: Scale = "laptop"
    """Size, for files that offer several."""


def run(argv: Sequence[str]) -> int:
    """The command; 1 when a cell failed."""
    command, overrides = parse_with_overrides(SweepCommand, argv, "sweep")
    target = resolve_sweep(
        command.file,
        run_dir=command.run_dir,
        scale=command.scale,
        debug=command.debug,
        overrides=overrides,
    )
    cells = only_matching(target.cells, command.only)
    if command.dry_run:
        for cell in cells:
            print(f"{cell.state():9} {cell.run_dir}")
        return 0
    print(f"{len(cells)} cells in {target.root}", flush=True)
    with _Children() as children:
        outcome = run_cells(
            cells,
            children.launch,
            jobs=command.jobs,
            report=lambda line: print(line, flush=True),
        )
    print(", ".join(f"{len(names)} {what}" for what, names in outcome.items()))
    for name in outcome["failed"]:
        print(f"failed: {target.root / name / LOG_FILE}", file=sys.stderr)
    return 1 if outcome["failed"] else 0


class _Children:
    """The training processes; told to save and stop when this process is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopping = False
        self._old: dict[int, object] = {}

    def __enter__(self) -> "_Children":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)  # type: ignore[arg-type]

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._stopping = True
        for process in list(self._running):
            process.terminate()

    def launch(self, cell: Planned) -> int:
        """Train one cell to its end; its output goes to a file in its folder."""
        if self._stopping:
            return 0
        save(cell.experiment, cell.run_dir / CELL_FILE)
        words = [sys.executable, "-m", "memjax.cli.main", "train"]
        words += [str(cell.run_dir / CELL_FILE), "--run-dir", str(cell.run_dir)]
        with (cell.run_dir / LOG_FILE).open("ab") as log:
            process = subprocess.Popen(
                [*words, "--no-sample"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with self._lock:
                self._running.add(process)
            if self._stopping:  # the signal came between the check and the start
                process.terminate()
            try:
                return process.wait()
            finally:
                with self._lock:
                    self._running.discard(process)
