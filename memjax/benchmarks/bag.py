"""The weighted row sum and its three gradients, alone.

What: `entries`: forward, gradient of the weights, sums by unique row, gradient of the
    whole table; our side of them. `bag_torch` has the other.
Why: a memory's speed is that of its bag, and a bag's is that of memory itself.
When not: what surrounds the bag; see `product_keys`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.benchmarks.contender import Contender, Ready
from memjax.benchmarks.duel import Duel
from memjax.benchmarks.entry import Entry
from memjax.benchmarks.figure import Target, Work
from memjax.benchmarks.process import Program
from memjax.ops.embedding_bag import embedding_bag
from memjax.ops.row_gradient import RowGradient, dense_gradient, unique_rows

PARTS = ("forward", "weight_gradient", "row_sums", "table_gradient")
FORWARD_TARGET = Target(of="of_floor", value=0.8)


@dataclass(frozen=True, kw_only=True)
class BagCase:
    """Sizes: N tokens, K reads of each, width W, R rows. Ids are uniform, float32."""

    part: str
    n_tokens: int = 4096
    n_reads: int = 128
    width: int = 512
    n_rows: int = 2**18

    def work(self) -> Work:
        """What the part must move at least."""
        reads = self.n_tokens * self.n_reads
        row = 4 * self.width
        if self.part in ("forward", "weight_gradient"):
            return Work(words="a copy of the rows that are read", copied=reads * row)
        tokens = self.n_tokens * row
        if self.part == "table_gradient":
            words = "cotangents read once, the table's gradient written once"
            return Work(words=words, moved=tokens + self.n_rows * row)
        words = "cotangents read once, sums of unique rows written once"
        return Work(words=words, moved=tokens + self.n_unique * row)

    @property
    def n_unique(self) -> int:
        """Unique rows among so many uniform reads, on average."""
        reads = self.n_tokens * self.n_reads
        return round(self.n_rows * -np.expm1(reads * np.log1p(-1 / self.n_rows)))


def entries(short: bool) -> list[Entry]:
    """Forward at 32 and 128 reads a token; the gradients at 128."""
    sizes: dict[str, int] = {}
    if short:
        sizes = {"n_tokens": 256, "width": 64, "n_rows": 4096}
    cases = [BagCase(part="forward", n_reads=32, **sizes)]
    cases += [BagCase(part=part, **sizes) for part in PARTS]
    return [duel(case).entry() for case in cases]


def duel(case: BagCase) -> Duel:
    """Both sides of a case."""
    arguments = vars(case)
    name = f"bag/{case.part}/{case.n_tokens}x{case.n_reads}x{case.width}"
    table = 4 * case.n_rows * case.width
    reads = 4 * case.n_tokens * case.n_reads * case.width
    ours, theirs = (
        Program(
            target=f"memjax.benchmarks.{module}",
            arguments=arguments,
            name=f"{name} in {framework}",
            need_bytes=need + 2**29,
        )
        for module, framework, need in (
            ("bag:contender", "jax", 3 * table),
            ("bag_torch:contender", "torch", 3 * table + 2 * reads),
        )
    )
    target = FORWARD_TARGET if case.part == "forward" else None
    return Duel(
        name=name, forms={"bag": (ours, theirs)}, work=case.work(), target=target
    )


def arrays(case: BagCase) -> dict[str, np.ndarray]:
    """The same inputs on both sides: table, ids, weights, cotangent and a probe.

    The probe [W] turns a gradient of the table's size into one number a row, for the
    comparison.
    """
    draw = np.random.default_rng(0)
    shape = (case.n_tokens, case.n_reads)
    table_RW = draw.random((case.n_rows, case.width), np.float32)
    table_RW -= 0.5
    return {
        "table": table_RW,
        "ids": draw.integers(0, case.n_rows, shape, np.int32),
        "weights": draw.random(shape, np.float32),
        "cotangent": draw.random((case.n_tokens, case.width), np.float32) - 0.5,
        "probe": draw.random(case.width, np.float32) - 0.5,
    }


def contender(**arguments: Any) -> Contender:
    """Our side."""
    case = BagCase(**arguments)
    return Contender("jax", lambda: _ready(case))


def _ready(case: BagCase) -> Ready:
    given = {name: jnp.asarray(x) for name, x in arrays(case).items()}
    table_RW, ids_NK, weights_NK = given["table"], given["ids"], given["weights"]
    g_NW, probe_W = given["cotangent"], given["probe"]

    def forward(table_RW: Any, ids_NK: Any, weights_NK: Any, g_NW: Any) -> jax.Array:
        del g_NW
        return embedding_bag(table_RW, ids_NK, weights_NK)

    def weight_gradient(table_RW: Any, ids_NK: Any, weights_NK: Any, g_NW: Any) -> Any:
        _, pull = jax.vjp(
            lambda w_NK: embedding_bag(table_RW, ids_NK, w_NK), weights_NK
        )
        return pull(g_NW)[0]

    def row_sums(table_RW: Any, ids_NK: Any, weights_NK: Any, g_NW: Any) -> Any:
        gradient = RowGradient(ids_NK, weights_NK, g_NW)
        return unique_rows(gradient, *table_RW.shape)

    def table_gradient(table_RW: Any, ids_NK: Any, weights_NK: Any, g_NW: Any) -> Any:
        _, pull = jax.vjp(
            lambda t_RW: embedding_bag(t_RW, ids_NK, weights_NK), table_RW
        )
        return pull(g_NW)[0]

    functions = {
        "forward": forward,
        "weight_gradient": weight_gradient,
        "row_sums": row_sums,
        "table_gradient": table_gradient,
    }
    function = jax.jit(functions[case.part])

    def run() -> Any:
        return jax.block_until_ready(function(table_RW, ids_NK, weights_NK, g_NW))

    def outputs() -> dict[str, Any]:
        out = run()
        if case.part == "row_sums":
            probed = out._replace(sums_UW=(out.sums_UW @ probe_W)[:, None])
            return {"out": dense_gradient(probed, case.n_rows)[:, 0]}
        return {"out": out @ probe_W if case.part == "table_gradient" else out}

    return Ready(variants={"xla": run}, outputs=outputs)
