"""One training step of a table without a model around it, timed.

What: `TableCase`, which optimizer at which size, and `TableStep`, the step compiled,
    run and timed.
Why: how the cost of a table depends on its size is hidden by a model's other costs.
When not: comparing several sizes; `table_rows` does that, each in its own process.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from memjax.benchmarks.machine import huge_page_frac
from memjax.ops.ngram_hash import host_ngram_rows, ngram_layouts
from memjax.ops.row_gradient import RowGradient, unique_rows
from memjax.ops.rows import carrier_of, get_rows
from memjax.optim.sinkhorn_momentum import sinkhorn_momentum
from memjax.optim.sinkhorn_rows import sinkhorn_rows
from memjax.optim.table_optimizer import TableOptimizer, rowwise

ORDERS = (3, 4, 5, 6)
VOCAB_SIZE, PAD_ID = 257, 256
LEARNING_RATE = 0.01
N_COTANGENTS = 4


@dataclass(frozen=True, kw_only=True)
class TableCase:
    """What is timed.

    Attributes:
        optimizer: "adam" and "sinkhorn" by the rows that were read, or
            "sinkhorn_dense", over all rows.
        n_rows: rows of the table, about: one prime per n-gram order adds up to it.
        width: columns.
        dtype: of table, moments and momentum; "bfloat16" or "float32".
        capacity: rows in the buffer of "sinkhorn".
    """

    optimizer: str
    n_rows: int
    width: int = 32
    dtype: str = "bfloat16"
    capacity: int = 2**18


class TableStep:
    """The step of a case over the batches of a file, compiled when it is made.

    Rows of all batches are computed beforehand on the host and are on the device before
    a clock starts. The gradient of a read is a fixed random array plus the read itself,
    so that it cannot be formed before the table was read, as in a model. The table
    begins with zeros, whatever its size. Nothing large is allocated before `start`.

    Attributes:
        need_bytes: memory of table, state and, for the dense form, its temporaries.
        temp_bytes: what the compiled step sets aside beside its arguments and results:
            for Adam less than a table, or a table would be copied; for Sinkhorn by rows
            the tables of its dense step, which ordinary steps do not touch.
    """

    def __init__(self, case: TableCase, tokens_SBT: Any, segments_SBT: Any) -> None:
        self.case = case
        self._ids = _row_ids(case, tokens_SBT, segments_SBT)
        layout_rows, read_shape = self._ids.n_rows, self._ids.rows.shape[1:]
        self._make_read_gradients = jax.jit(
            lambda: jax.random.normal(
                jax.random.key(0), (N_COTANGENTS, *read_shape, case.width)
            )
        )
        dense = case.optimizer == "sinkhorn_dense"
        self._form = (_Dense if dense else _ByRows)(case, layout_rows)
        self._state: Any = None
        self._done = 0
        self._counts: dict[str, jax.Array] = {}
        shapes = (
            *jax.eval_shape(self._form.start),
            jax.ShapeDtypeStruct(read_shape, jnp.int32),
            jax.ShapeDtypeStruct((*read_shape, case.width), jnp.float32),
        )
        step = jax.jit(self._form.step, donate_argnums=(0, 1))
        self._step = step.lower(*shapes).compile()
        memory = self._step.memory_analysis()
        assert memory is not None
        self.temp_bytes = int(memory.temp_size_in_bytes)
        # What sinkhorn_rows sets aside for a dense step is not touched without one.
        self.need_bytes = dense * self.temp_bytes + int(
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )

    def describe(self) -> dict[str, Any]:
        """Device and memory of the case."""
        return {
            "backend": jax.default_backend(),
            "device": f"{jax.devices()[0].device_kind}",
            "need_bytes": self.need_bytes,
            "temp_bytes": self.temp_bytes,
        }

    def start(self) -> None:
        """Make the table, its optimizer's state and the gradients of the reads."""
        self._state = jax.block_until_ready(self._form.start())
        self._gradients = [*jax.block_until_ready(self._make_read_gradients())]

    def steps(self, n: int) -> list[float]:
        """Do n steps; the seconds of each."""

        def whole(ids: jax.Array, gradient: jax.Array) -> list[float]:
            begin = time.perf_counter()
            table, state, counts = self._step(*self._state, ids, gradient)
            jax.block_until_ready((table, state))
            seconds = time.perf_counter() - begin
            self._state, self._counts = (table, state), counts
            return [seconds]

        return [seconds for (seconds,) in self._run(n, whole)]

    def parts(self, n: int) -> list[list[float]]:
        """Do n steps as three programs; the seconds of each step's lookup, row
        gradient and update. Their sum is a little more than a whole step."""
        if not isinstance(self._form, _ByRows):
            raise ValueError("a dense step has no parts")
        lookup, gradient_of, update = self._form.programs()

        def three(ids: jax.Array, gradient: jax.Array) -> list[float]:
            table, state = self._state
            clock = [time.perf_counter()]
            read = jax.block_until_ready(lookup(table, ids))
            clock.append(time.perf_counter())
            rows = jax.block_until_ready(gradient_of(ids, gradient, read))
            clock.append(time.perf_counter())
            table, state, self._counts = update(table, state, rows)
            self._state = jax.block_until_ready((table, state))
            clock.append(time.perf_counter())
            return [b - a for a, b in zip(clock, clock[1:], strict=False)]

        return self._run(n, three)

    def counts(self) -> dict[str, int]:
        """Of the last step: unique and active rows; dense steps so far."""
        return {name: int(count) for name, count in self._counts.items()}

    def finish(self) -> dict[str, Any]:
        """The counts, and how much of this process' memory lies in huge pages."""
        return self.counts() | {"huge_page_frac": huge_page_frac()}

    def _run(
        self, n: int, once: Callable[[jax.Array, jax.Array], list[float]]
    ) -> list[list[float]]:
        seconds = []
        for _ in range(n):
            ids = self._ids.rows[self._done % len(self._ids.rows)]
            ids = jax.block_until_ready(jax.device_put(ids))
            gradient = self._gradients[self._done % N_COTANGENTS]
            seconds.append(once(ids, gradient))
            self._done += 1
        return seconds


@dataclass(frozen=True)
class _RowIds:
    """Row numbers of every batch, int32 [S, B, T, C], and the rows of the table."""

    rows: np.ndarray
    n_rows: int


def _row_ids(case: TableCase, tokens_SBT: Any, segments_SBT: Any) -> _RowIds:
    (layout,) = ngram_layouts(
        vocab_size=VOCAB_SIZE,
        pad_id=PAD_ID,
        orders=ORDERS,
        n_heads=1,
        rows_per_head=case.n_rows // len(ORDERS),
        layer_ids=(0,),
    )
    rows = [
        host_ngram_rows(tokens_BT, layout, segments_BT=segments_BT)
        for tokens_BT, segments_BT in zip(tokens_SBT, segments_SBT, strict=True)
    ]
    return _RowIds(np.stack(rows), layout.n_rows)


class _Form:
    """A table of zeros and its optimizer."""

    def __init__(self, shape: tuple[int, int], dtype: Any, optimizer: Any) -> None:
        self._shape, self._dtype, self._optimizer = shape, dtype, optimizer

    def start(self) -> tuple[jax.Array, Any]:
        """(table, state) before the first step."""
        table_RW = jnp.zeros(self._shape, self._dtype)
        return table_RW, jax.jit(self._optimizer.init)(table_RW)


class _ByRows(_Form):
    """The step at the cost of the rows that were read."""

    def __init__(self, case: TableCase, n_rows: int) -> None:
        shape, dtype = (n_rows, case.width), carrier_of(case.dtype)
        super().__init__(shape, dtype, _row_optimizer(case))

    def step(
        self, table_RW: jax.Array, state: Any, ids_BTC: Any, gradient_BTCW: Any
    ) -> Any:
        """(table, state, counts) after one step."""
        rows = self._gradient(ids_BTC, gradient_BTCW, get_rows(table_RW, ids_BTC))
        # All reads of the table come before its first write, or it would be copied.
        table_RW, rows = lax.optimization_barrier((table_RW, rows))
        return self._update(table_RW, state, rows)

    def programs(self) -> tuple[Any, Any, Any]:
        """Lookup, row gradient and update as programs of their own."""
        return (
            jax.jit(get_rows),
            jax.jit(self._gradient),
            jax.jit(self._update, donate_argnums=(0, 1)),
        )

    def _gradient(self, ids_BTC: Any, gradient_BTCW: Any, read_BTCW: Any) -> Any:
        reads = RowGradient(ids_BTC[..., None], None, gradient_BTCW + read_BTCW)
        return unique_rows([reads], *self._shape)

    def _update(self, table_RW: jax.Array, state: Any, rows: Any) -> Any:
        table_RW, state, metrics = self._optimizer.apply(rows, state, table_RW)
        counts = {name: metrics[name] for name in _COUNTS if name in metrics}
        return table_RW, state, counts | {"unique_rows": rows.count}


_COUNTS = ("active_rows", "dense_steps", "overflow_steps")


def _row_optimizer(case: TableCase) -> TableOptimizer:
    if case.optimizer == "adam":
        return rowwise(optax.adam(LEARNING_RATE), state_dtype=case.dtype)
    if case.optimizer == "sinkhorn":
        return sinkhorn_rows(
            LEARNING_RATE, capacity=case.capacity, momentum_dtype=case.dtype
        )
    raise ValueError(f"no optimizer {case.optimizer!r}")


class _Dense(_Form):
    """The step over all rows: a gradient of the table's shape, an optax transform."""

    def __init__(self, case: TableCase, n_rows: int) -> None:
        optimizer = sinkhorn_momentum(LEARNING_RATE)
        super().__init__((n_rows, case.width), case.dtype, optimizer)

    def step(
        self, table_RW: jax.Array, state: Any, ids_BTC: Any, gradient_BTCW: Any
    ) -> Any:
        """(table, state, counts) after one step."""
        read_BTCW, pull_back = jax.vjp(partial(_read, ids_BTC), table_RW)
        (gradient_RW,) = pull_back(gradient_BTCW + read_BTCW)
        updates_RW, state = self._optimizer.update(gradient_RW, state, table_RW)
        return optax.apply_updates(table_RW, updates_RW), state, {}


def _read(ids_BTC: jax.Array, table_RW: jax.Array) -> jax.Array:
    return table_RW.at[ids_BTC].get(mode="promise_in_bounds")


def table_step(case: dict[str, Any], batches: str) -> TableStep:
    """The step of a case and a file that were written as JSON."""
    return TableStep(TableCase(**case), *load_batches(Path(batches)))


def load_batches(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, segments) [S, B, T] that `save_batches` wrote."""
    with np.load(path) as arrays:
        return arrays["tokens"], arrays["segments"]


def save_batches(path: Path, batches: list[Any]) -> None:
    """Write the tokens and segments of batches to an .npz file."""
    np.savez(
        path,
        tokens=np.stack([batch["tokens"] for batch in batches]),
        segments=np.stack([batch["segments"] for batch in batches]),
    )
