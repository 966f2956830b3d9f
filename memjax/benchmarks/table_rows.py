"""What a step of a table costs at growing numbers of rows.

What: `Plan`, what is timed, and `measure`, the figures.
Why: the promise of row gradients is that a step costs what was read, not what exists.
When not: a whole model's speed; the training log has that.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memjax.benchmarks.machine import free_bytes, machine_facts
from memjax.benchmarks.process import BenchmarkError, Process, Program, Worker
from memjax.benchmarks.table_step import ORDERS, TableCase, save_batches
from memjax.data.config import DataConfig
from memjax.data.pipeline import train_batches
from memjax.errors import ConfigError

MIN_ROWS = 1024
TARGETS = {"ratio_adam": 1.3, "ratio_sinkhorn": 1.5, "dense_over_sparse": 20.0}
UNTIMED = 2  # first steps of a turn: another process had the caches

Figures = dict[str, Any]
Say = Callable[[str], None]
OpenWorker = Callable[[Program, bool], Worker]  # the bool: huge pages


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is timed, and how often.

    All sizes of one optimizer are held by processes of their own and take turns, so a
    machine that is slower for some seconds is slower for all of them.

    Attributes:
        rows: numbers of rows, ascending.
        dense_rows: rows at which dense and sparse Sinkhorn are compared, in float32.
        warm_steps: steps before the first timed one; Sinkhorn's active set has its
            steady size after about 200.
        n_turns: turns of each size.
        turn_steps: timed steps of a turn; two untimed ones stand before them.
        part_steps: steps timed by their parts, after the turns; 0 for none.
        dense_steps: timed steps of the dense form, after one untimed.
        short: whether this is the short form.
        huge_pages: whether glibc is told to ask for huge pages.
        width, dtype, capacity: as in `TableCase`.
        data: what is read; batches are not repeated within an epoch.
    """

    rows: tuple[int, ...] = (1_000_000, 4_000_000, 16_000_000, 64_000_000)
    dense_rows: int = 16_000_000
    warm_steps: int = 300
    n_turns: int = 10
    turn_steps: int = 10
    part_steps: int = 20
    dense_steps: int = 5
    short: bool = False
    huge_pages: bool = True
    width: int = 32
    dtype: str = "bfloat16"
    capacity: int = 2**18
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        if not self.rows or list(self.rows) != sorted(set(self.rows)):
            raise ConfigError("rows", self.rows, "different numbers, ascending")
        for n_rows in (*self.rows, self.dense_rows):
            if not MIN_ROWS <= n_rows < 2**31 - 2**20:
                raise ConfigError("rows", n_rows, f"{MIN_ROWS} to about 2^31")

    @property
    def n_batches(self) -> int:
        """Batches that one size takes."""
        turns = self.n_turns * (self.turn_steps + UNTIMED)
        parts = self.part_steps + UNTIMED if self.part_steps else 0
        return self.warm_steps + turns + parts


def plan(
    *,
    rows: Sequence[int] | None = None,
    short: bool = False,
    huge_pages: bool = True,
    cache_dir: str | None = None,
) -> Plan:
    """The plan of the command.

    Args:
        rows: numbers of rows instead of those of the form; the dense comparison is at
            the largest that is not above the form's own.
        short: small sizes, an eighth of the tokens, for a smaller active set,
            and few steps, for a look within a minute.
        huge_pages: as in `Plan`.
        cache_dir: where the corpus lies, as in `DataConfig`.
    """
    settings: dict[str, Any] = {}
    if short:
        settings = {
            "rows": (1_000_000, 4_000_000),
            "dense_rows": 1_000_000,
            "warm_steps": 200,
            "n_turns": 3,
            "part_steps": 0,
            "dense_steps": 3,
            "batch_size": 1,
            "capacity": 2**17,
        }
    if rows is not None:
        settings["rows"] = tuple(rows)
        most = settings.get("dense_rows", Plan.dense_rows)
        settings["dense_rows"] = max([n for n in rows if n <= most], default=most)
    return Plan(
        short=short,
        huge_pages=huge_pages,
        data=DataConfig(cache_dir=cache_dir, batch_size=settings.pop("batch_size", 8)),
        **settings,
    )


def measure(
    plan: Plan, *, say: Say = lambda _: None, open_worker: OpenWorker = Process
) -> Figures:
    """Take all the times of a plan.

    Args:
        plan: what is timed.
        say: told what is being done.
        open_worker: makes a worker of (program, huge pages).

    Returns:
        Plain JSON: "ratio_adam" and "ratio_sinkhorn", time at most rows over time at
        least rows: the median over turns of the ratio of the medians of a turn, None
        for a single size; "ratio", the same as "ratio_sinkhorn"; "dense_over_sparse",
        of float32 medians; "rows", optimizer -> number of rows -> figures; "dense", the
        same for the comparison; and what was done on which machine.

    Raises:
        BenchmarkError: a process failed or memory does not suffice.
        MissingExtraError: the corpus is not installed.
    """
    machine = machine_facts()
    with tempfile.TemporaryDirectory(prefix="memjax-bench-") as folder:
        file = Path(folder) / "batches.npz"
        with train_batches(plan.data) as batches:
            save_batches(file, [next(batches) for _ in range(plan.n_batches)])

        def open_one(case: TableCase) -> Worker:
            return open_worker(program_of(case, file), plan.huge_pages)

        by_optimizer, turns = {}, {}
        for optimizer in ("adam", "sinkhorn"):
            cases = [_case(plan, optimizer, n_rows) for n_rows in plan.rows]
            with _open_group(cases, open_one, say) as group:
                turns[optimizer] = _take_turns(plan, group, say)
                by_optimizer[optimizer] = _figures(plan, group, turns[optimizer])
        dense = {}
        for optimizer in ("sinkhorn", "sinkhorn_dense"):
            case = _case(plan, optimizer, plan.dense_rows, dtype="float32")
            with _open_group([case], open_one, say) as group:
                if optimizer == "sinkhorn":
                    times = _take_turns(plan, group, say)
                else:
                    say(f"{plan.dense_steps} dense steps")
                    times = [[group.everyone("steps", 1 + plan.dense_steps)[0][1:]]]
                dense[optimizer] = _figures(plan, group, times)
                machine["device"] = group.described[0]["device"]
    ratios = {f"ratio_{name}": _ratio(times) for name, times in turns.items()}
    sparse_ms, dense_ms = (next(iter(x.values()))["ms"] for x in dense.values())
    return {
        "ratio": ratios["ratio_sinkhorn"],
        **ratios,
        "dense_over_sparse": dense_ms / sparse_ms,
        "targets": TARGETS,
        "rows": by_optimizer,
        "dense": dense,
        "short": plan.short,
        "width": plan.width,
        "dtype": plan.dtype,
        "tokens_per_step": plan.data.batch_size * plan.data.context,
        "ids_per_step": plan.data.batch_size * plan.data.context * len(ORDERS),
        "warm_steps": plan.warm_steps,
        "steps": plan.n_turns * plan.turn_steps,
        "huge_pages": plan.huge_pages,
        "machine": machine,
    }


def _case(
    plan: Plan, optimizer: str, n_rows: int, dtype: str | None = None
) -> TableCase:
    return TableCase(
        optimizer=optimizer,
        n_rows=n_rows,
        width=plan.width,
        dtype=plan.dtype if dtype is None else dtype,
        capacity=plan.capacity,
    )


def program_of(case: TableCase, batches: Path) -> Program:
    return Program(
        target="memjax.benchmarks.table_step:table_step",
        arguments={"case": asdict(case), "batches": str(batches)},
        name=f"{case.optimizer} with {case.n_rows} rows",
        advice="choose fewer rows",
    )


class _Group:
    """Workers that are open together, described and not yet started."""

    def __init__(self, cases: Sequence[TableCase], workers: Sequence[Worker]) -> None:
        self.cases, self.workers = cases, workers
        self.described = [worker.answer() for worker in workers]

    def everyone(self, call: str, *arguments: Any) -> list[Any]:
        """Ask one after the other; the answers."""
        answers = []
        for worker in self.workers:
            worker.ask(call, *arguments)
            answers.append(worker.answer())
        return answers


@contextmanager
def _open_group(
    cases: Sequence[TableCase], open_one: Callable[[TableCase], Worker], say: Say
) -> Iterator[_Group]:
    """Workers of these cases, with their tables made; closed at the end."""
    sizes = ", ".join(f"{case.n_rows:,}" for case in cases)
    say(f"{cases[0].optimizer}, {cases[0].dtype}: {sizes} rows")
    with ExitStack() as stack:
        workers = []
        for case in cases:
            workers.append(open_one(case))
            stack.callback(workers[-1].close)
        group = _Group(cases, workers)
        _check_memory(group)
        group.everyone("start")
        yield group


def _check_memory(group: _Group) -> None:
    free = free_bytes()
    need = sum(facts["need_bytes"] for facts in group.described)
    on_host = group.described[0]["backend"] == "cpu"
    if on_host and free is not None and need > free:
        cases = group.cases
        sizes = " + ".join(f"{case.n_rows:,}" for case in cases)
        raise BenchmarkError(
            f"{cases[0].optimizer} with {sizes} rows in {cases[0].dtype} needs "
            f"{need / 1e9:.1f} GB together, and {free / 1e9:.1f} GB of memory are "
            "free; choose fewer rows"
        )


def _take_turns(plan: Plan, group: _Group, say: Say) -> list[list[list[float]]]:
    """Seconds [turn][size][step] after the warm-up."""
    say(f"{plan.warm_steps} steps before the clock starts")
    group.everyone("steps", plan.warm_steps)
    say(f"{plan.n_turns} turns of {plan.turn_steps} steps each")
    return [
        [
            times[UNTIMED:]
            for times in group.everyone("steps", UNTIMED + plan.turn_steps)
        ]
        for _ in range(plan.n_turns)
    ]


def _figures(
    plan: Plan, group: _Group, turns: list[list[list[float]]]
) -> dict[str, Figures]:
    """Number of rows -> its figures."""
    dense = group.cases[0].optimizer == "sinkhorn_dense"
    counts = group.everyone("finish")
    parts = []
    if plan.part_steps and not dense:
        parts = group.everyone("parts", UNTIMED + plan.part_steps)
    figures = {}
    for i, case in enumerate(group.cases):
        times = [1e3 * seconds for turn in turns for seconds in turn[i]]
        ms = statistics.median(times)
        figure: Figures = {"ms": ms, "ms_min": min(times), "steps": len(times)}
        if not dense:
            rows = counts[i].get("active_rows", counts[i]["unique_rows"])
            figure |= {"active_rows": rows, "ns_per_active_row": 1e6 * ms / rows}
        if parts:
            for k, name in enumerate(("lookup_ms", "gradient_ms", "update_ms")):
                seconds = [step[k] for step in parts[i][UNTIMED:]]
                figure[name] = 1e3 * statistics.median(seconds)
        figure |= counts[i]
        figure |= {k: group.described[i][k] for k in ("temp_bytes", "need_bytes")}
        figures[str(case.n_rows)] = figure
    return figures


def _ratio(turns: list[list[list[float]]]) -> float | None:
    """Time of the last size over that of the first, turn by turn; the median."""
    if len(turns[0]) == 1:
        return None
    return statistics.median(
        statistics.median(turn[-1]) / statistics.median(turn[0]) for turn in turns
    )
