"""A step of the table optimizer: over the whole table, and over its active rows.

What: `entries` at 1 and 16 million rows of width 32, dense and exact-sparse; our side.
    `sinkhorn_torch` has the other, which is dense: there is no sparse one to compare.
Why: eleven normalisations of a table are as many passes over it, if written down so.
When not: a step with its model; see `train_step`.
"""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from memjax.benchmarks.contender import Contender, Ready
from memjax.benchmarks.duel import Duel
from memjax.benchmarks.entry import Entry
from memjax.benchmarks.figure import Work
from memjax.benchmarks.process import Program
from memjax.ops.row_gradient import UniqueRows
from memjax.optim.sinkhorn_momentum import sinkhorn_momentum
from memjax.optim.sinkhorn_rows import sinkhorn_rows

FORMS = ("dense", "rows")
RATE, GAMMA, BETA, N_ITERATIONS, TAU, EPS = 1e-3, 0.18, 0.95, 11, 1e-3, 1e-20


@dataclass(frozen=True, kw_only=True)
class SinkhornCase:
    """What a side computes, in float32, at the published settings.

    Attributes:
        form: "dense": `sinkhorn_momentum` on a gradient like the table; "rows":
            `sinkhorn_rows` on the rows that were read.
        n_rows, width: R and W of the table.
        n_read: rows with a gradient in a step.
        n_sets: sets of such rows that take turns, so that as many times n_read rows
            are active.
    """

    form: str
    n_rows: int
    width: int = 32
    n_read: int = 16384
    n_sets: int = 8

    @property
    def n_active(self) -> int:
        """Rows that move in a step."""
        return self.n_read * self.n_sets

    def work(self) -> Work:
        """Momentum and table read and written once, six further reads of the rows."""
        rows = self.n_rows if self.form == "dense" else self.n_active
        words = "table and momentum of the rows that are swept, read and written once; "
        words += "six more reads of the update"
        return Work(words=words, moved=(4 + 6) * 4 * rows * self.width)

    def need_bytes(self) -> tuple[int, int]:
        """Memory at the peak of our process and of PyTorch's, about."""
        table = 4 * self.n_rows * self.width
        ours = 5 if self.form == "dense" else 4
        return ours * table + 2**30, 5 * table + 2**30


def entries(short: bool) -> list[Entry]:
    """Both forms at both sizes."""
    small: dict[str, int] = {}
    sizes = (2**20, 2**24)
    if short:
        small, sizes = {"n_read": 64}, (4096,)
    return [
        duel(SinkhornCase(form=form, n_rows=n_rows, **small)).entry()
        for n_rows in sizes
        for form in FORMS
    ]


def duel(case: SinkhornCase) -> Duel:
    """Both sides of a case."""
    name = f"sinkhorn/{case.form}/{case.n_rows}x{case.width}"
    ours, theirs = (
        Program(
            target=f"memjax.benchmarks.{module}:contender",
            arguments=asdict(case),
            name=f"{name} in {framework}",
            need_bytes=need,
        )
        for module, framework, need in zip(
            ("sinkhorn", "sinkhorn_torch"),
            ("jax", "torch"),
            case.need_bytes(),
            strict=True,
        )
    )
    return Duel(
        name=name,
        forms={f"{case.form} against dense": (ours, theirs)},
        work=case.work(),
        notes=(f"{case.n_active} active rows, {case.n_read} read in a step",),
    )


def arrays(case: SinkhornCase) -> dict[str, np.ndarray]:
    """Ids [sets, U], ascending, sums [sets, U, W] and a probe [W]; the table is 0."""
    draw = np.random.default_rng(0)
    ids = draw.permutation(case.n_rows)[: case.n_active].astype(np.int32)
    shape = (case.n_sets, case.n_read, case.width)
    return {
        "ids": np.sort(ids.reshape(case.n_sets, case.n_read), axis=1),
        "sums": draw.standard_normal(shape, np.float32),
        "probe": draw.standard_normal(case.width, np.float32),
    }


def contender(**arguments: Any) -> Contender:
    """Our side."""
    case = SinkhornCase(**arguments)
    return Contender("jax", lambda: _ready(case))


def _ready(case: SinkhornCase) -> Ready:
    given = arrays(case)
    ids, sums = jnp.asarray(given["ids"]), jnp.asarray(given["sums"])
    settings = dict(gamma=GAMMA, beta=BETA, n_iterations=N_ITERATIONS, tau=TAU, eps=EPS)
    table_RW = jnp.zeros((case.n_rows, case.width))
    if case.form == "rows":
        capacity = min(2 * case.n_active, case.n_rows)
        by_rows = sinkhorn_rows(RATE, capacity=capacity, **settings)  # pyright: ignore[reportArgumentType]

        def step(table_RW: Any, state: Any, ids_U: Any, sums_UW: Any) -> Any:
            rows = UniqueRows(ids_U, sums_UW, jnp.int32(case.n_read))
            table_RW, state, metrics = by_rows.apply(rows, state, table_RW)
            return table_RW, state, metrics["dense_steps"]

        state: Any = jax.jit(by_rows.init)(table_RW)
    else:
        dense = sinkhorn_momentum(RATE, **settings)  # pyright: ignore[reportArgumentType]

        def step(table_RW: Any, state: Any, ids_U: Any, sums_UW: Any) -> Any:
            gradient_RW = jnp.zeros_like(table_RW).at[ids_U].set(sums_UW)
            updates, state = dense.update(gradient_RW, state, table_RW)
            return optax.apply_updates(table_RW, updates), state, jnp.int32(0)

        state = jax.jit(dense.init)(table_RW)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    held, turn = [table_RW, state], [0]
    del table_RW, state

    def run() -> Any:
        i = turn[0] % case.n_sets
        turn[0] += 1
        *held[:], n_dense = jitted(*held, ids[i], sums[i])
        jax.block_until_ready(held)
        return n_dense

    def outputs() -> dict[str, Any]:
        for _ in range(3):
            run()
        return {"table": held[0] @ given["probe"]}

    return Ready(variants={"step": run}, outputs=outputs)
