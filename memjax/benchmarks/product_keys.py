"""A product-key memory: read, read and backward, whole training step.

What: `entries` at three sizes, in the dense and the row form; `ProductKeyCase`, what is
    computed; `arrays`, the same inputs and weights for both sides.
Why: the layer with the heaviest step, and the one that PyTorch releases exist of.
When not: its bag alone; see `bag`. Memory+ has entries of its own in `memory_plus`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memjax.benchmarks.duel import Duel
from memjax.benchmarks.entry import Entry
from memjax.benchmarks.figure import Target, Work
from memjax.benchmarks.process import Program

PARTS = ("read", "read_backward", "step")
FORMS = ("dense", "rows")
# (sub-keys of a half, width) -> how much faster than PyTorch a step is to be.
SIZES: Mapping[tuple[int, int], float | None] = {
    (512, 512): 1.4,
    (1024, 512): 2.2,
    (2048, 128): 1.2,
}
BATCH = 8
LEARNING_RATE = 1e-3
# optax adds it after the bias correction, PyTorch's SparseAdam before.
ADAM_EPS = 1e-12
# Scores that are equal up to rounding may be ranked otherwise by the other side: among
# 16384 selections a slot or two. The first step of Adam is little more than the sign of
# the gradient: entries near 0 then move the other way, and one in 10000 is 2 % of the
# norm.
MAX_DIFFERENCE = {"read": 1e-2, "read_backward": 1e-2, "step": 5e-2}


@dataclass(frozen=True, kw_only=True)
class ProductKeyCase:
    """What both sides compute, in float32.

    Attributes:
        part: "read": y; "read_backward": the gradients of mean over tokens of half the
            squared distance of y to a target, for the stream, keys, query weights and
            table; "step": those of the weights, and Adam on all of them.
        form: "dense": the table's gradient is a table; "rows": it is a sum for each row
            that was read (PyTorch: sparse=True), and Adam is lazy (SparseAdam).
        layer: "xlm": `ProductKeyMemory` with a linear query, as in arXiv:1907.05242;
            "memory_plus": `MemoryPlus`, form "swilu".
        n_sub_keys, width: N of each half, so N * N rows, and D of stream and rows.
        n_tokens, n_heads, k, half_width: tokens T, heads H, rows read K of each, width
            C of a half-key.
    """

    part: str
    form: str = "dense"
    layer: str = "xlm"
    n_sub_keys: int = 512
    width: int = 512
    n_tokens: int = 4096
    n_heads: int = 4
    k: int = 32
    half_width: int = 128

    @property
    def n_rows(self) -> int:
        """Rows of the table."""
        return self.n_sub_keys**2

    @property
    def n_reads(self) -> int:
        """Rows read, all tokens and heads together."""
        return self.n_tokens * self.n_heads * self.k

    def work(self) -> Work:
        """Matrix products; rows read (and, backward, read again); what Adam moves."""
        into = self.n_heads * 2 * self.half_width
        products = self.width * into + into * self.n_sub_keys
        if self.layer == "memory_plus":
            products += 2 * self.width**2
        backward = self.part != "read"
        flops = 2 * self.n_tokens * products * (3 if backward else 1)
        words = ["matrix products", "rows read once from memory"]
        moved = 4 * self.n_reads * self.width
        if backward:
            words[1] = "rows read once forward and once backward"
            words.append("the gradient of the rows read written once")
            moved = 4 * self.width * (2 * self.n_reads + self.n_unique)
        if self.part == "step":
            words.append("table and moments of the rows read, read and written once")
            moved += 4 * self.width * 6 * self.n_unique
        return Work(words="; ".join(words), flops=flops, moved=moved)

    @property
    def n_unique(self) -> int:
        """Unique rows, as if slots were uniform."""
        return round(self.n_rows * -np.expm1(self.n_reads * np.log1p(-1 / self.n_rows)))

    def need_bytes(self) -> tuple[int, int]:
        """Memory at the peak of our process and of PyTorch's, about."""
        table = 4 * self.n_rows * self.width
        reads = 4 * self.width * min(self.n_reads, self.n_rows)
        extra = 2**30 * self.n_tokens // 4096
        sparse = self.form == "rows"
        if self.part == "read":
            return 2 * table + extra, 2 * table + extra
        if self.part == "read_backward":
            theirs = 4 * self.width * self.n_reads if sparse else table
            return 2 * table + reads + extra, 2 * table + theirs + extra
        theirs = 4 * table + (6 * reads if sparse else table)
        return 4 * table + (reads if sparse else 0) + extra, theirs + extra


def entries(short: bool) -> list[Entry]:
    """Three parts at each size."""
    if short:
        small: dict[str, Any] = dict(n_tokens=256, n_heads=2, k=8, half_width=16)
        sizes: Mapping[tuple[int, int], float | None] = {(32, 32): None}
    else:
        small, sizes = {}, SIZES
    made = []
    for (n_sub_keys, width), least in sizes.items():
        for part in PARTS:
            cases = [
                ProductKeyCase(
                    part=part, form=form, n_sub_keys=n_sub_keys, width=width, **small
                )
                for form in (FORMS if part != "read" else FORMS[:1])
            ]
            aim = None
            if part == "step" and least is not None:
                aim = Target(value=least)
            made.append(duel("product_keys", cases, aim).entry())
    return made


def duel(
    benchmark: str, cases: Sequence[ProductKeyCase], target: Target | None = None
) -> Duel:
    """The forms of one part and size."""
    one = cases[0]
    name = f"{benchmark}/{one.part}/n{one.n_sub_keys}_d{one.width}"
    forms = {}
    for case in cases:
        ours, theirs = (
            Program(
                target=f"memjax.benchmarks.product_keys_{framework}:contender",
                arguments=asdict(case),
                name=f"{name}, {case.form}, in {framework}",
                need_bytes=need,
            )
            for framework, need in zip(("jax", "torch"), case.need_bytes(), strict=True)
        )
        forms[case.form] = (ours, theirs)
    work = min((case.work() for case in cases), key=lambda work: work.moved)
    return Duel(
        name=name,
        forms=forms,
        work=work,
        target=target,
        max_difference=MAX_DIFFERENCE[one.part],
    )


def arrays(case: ProductKeyCase) -> dict[str, Any]:
    """Inputs and weights, float32, the same on both sides.

    Returns:
        "x" and "aim" [T, D], the stream and what y is compared with; "probe" [D], which
        turns a table into one number a row; "weights": "kernel" [D, H * 2C], columns by
        head, half, place, "bias", "keys" [H, 2, N, C], "table" [R, D] and for Memory+
        "gate_kernel", "gate_bias", "value_kernel" and "value_bias".
    """
    draw = np.random.default_rng(0)
    width, into = case.width, case.n_heads * 2 * case.half_width

    def uniform(size: float, *shape: int) -> np.ndarray:
        values = draw.random(shape, np.float32)
        values -= 0.5
        values *= 2 * size
        return values

    weights = {
        "kernel": uniform(width**-0.5, width, into),
        "bias": uniform(width**-0.5, into),
        "keys": uniform(
            case.half_width**-0.5, case.n_heads, 2, case.n_sub_keys, case.half_width
        ),
        "table": uniform(1.7 * width**-0.5, case.n_rows, width),
    }
    if case.layer == "memory_plus":
        for name in ("gate", "value"):
            weights[f"{name}_kernel"] = uniform(1.7 * width**-0.5, width, width)
            weights[f"{name}_bias"] = uniform(0.1, width)
    return {
        "x": uniform(1.7, case.n_tokens, width),
        "aim": uniform(1.7, case.n_tokens, width),
        "probe": uniform(1.0, width),
        "weights": weights,
    }
