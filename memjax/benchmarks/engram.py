"""Engram alone: forward, forward and backward, and a whole step with its optimizer.

What: `entries`, against the public demo's layer in plain PyTorch; our side of them.
    `engram_torch` has the other.
Why: what a hashed memory costs a model is its projections, its norms and its rows.
When not: hashing, whose rows are given here; a model around it, see `train_step`.
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
from memjax.benchmarks.figure import Target, Work
from memjax.benchmarks.process import Program
from memjax.layers.engram import Engram, EngramConfig
from memjax.layers.precision import Dtypes, PrecisionConfig
from memjax.layers.row_grad import value_and_row_grad
from memjax.ops.row_gradient import dense_gradient, unique_rows
from memjax.optim.table_optimizer import rowwise
from memjax.optim.tables import apply_updates, table_optimizer

# (part, our form, PyTorch's form) -> how much faster than PyTorch it is to be.
PARTS = {
    ("forward", "rows", "rows"): 1.7,
    ("backward", "rows", "rows"): 1.6,
    ("backward", "dense", "dense"): None,
    ("step", "rows", "rows"): 1.3,
    ("step", "rows", "dense"): 4.0,
}
LEARNING_RATE = 1e-3
# optax adds it after the bias correction, PyTorch's SparseAdam before.
ADAM_EPS = 1e-12
# The gate is a square root of the score, so steep near 0 that rounding of a score shows
# in the gradient. The first step of Adam is little more than the gradient's sign.
MAX_DIFFERENCE = {"forward": 1e-4, "backward": 1e-2, "step": 5e-2}


@dataclass(frozen=True, kw_only=True)
class EngramCase:
    """What a side computes, in float32.

    Attributes:
        part: "forward": stream + branch; "backward": the gradients of its product with
            a cotangent, for stream, weights and table; "step": those of the weights,
            and Adam on all of them.
        form: "rows": the table's gradient is a sum for each row that was read (PyTorch:
            sparse=True), and Adam is lazy (SparseAdam); "dense": it is a table.
        n_branches, width, row_width: M, D and W.
        n_batch, n_tokens: B and T.
        n_columns: rows read by a token, C: two orders of C / 2 heads.
        n_rows: R; ids are uniform.
    """

    part: str
    form: str = "rows"
    n_branches: int = 1
    width: int = 512
    row_width: int = 16
    n_batch: int = 8
    n_tokens: int = 512
    n_columns: int = 16
    n_rows: int = 8_001_784

    def work(self) -> Work:
        """Matrix products, and the rows that are read and written."""
        n = self.n_batch * self.n_tokens
        times = 1 if self.part == "forward" else 3
        flops = 2 * n * (self.n_branches + 1) * self.width
        flops *= self.n_columns * self.row_width * times
        rows = 4 * n * self.n_columns * self.row_width
        moved = rows + 8 * n * self.n_branches * self.width * (1 + times // 3)
        words = "matrix products; rows read once; stream read and written"
        if self.part != "forward":
            words += ", and its gradient; gradients of the rows written"
            moved += rows
        if self.part == "step":
            words += "; rows and moments read and written"
            moved += 6 * rows
        return Work(words=words, flops=flops, moved=moved)

    def need_bytes(self) -> int:
        """Memory at the peak, about."""
        table = 4 * self.n_rows * self.row_width
        copies = {"forward": 1, "backward": 2, "step": 4}[self.part]
        return (copies + 1) * table + 2**30


def entries(short: bool) -> list[Entry]:
    """Five parts, of one stream of 512 and of four of 256."""
    sizes: dict[str, int] = {}
    if short:
        sizes = {"n_tokens": 16, "n_columns": 4, "n_rows": 5000}
    made = []
    for shape in (
        {"n_branches": 1, "width": 512, "row_width": 16},
        {"n_branches": 4, "width": 256, "row_width": 32},
    ):
        for (part, ours, theirs), least in PARTS.items():
            our_case, their_case = (
                EngramCase(part=part, form=form, **{**shape, **sizes})
                for form in (ours, theirs)
            )
            target = None if least is None else Target(value=least)
            made.append(duel(our_case, their_case, target).entry())
    return made


def duel(ours: EngramCase, theirs: EngramCase, target: Target | None = None) -> Duel:
    """Both sides of a case; their forms may differ, as after one step they agree."""
    name = f"engram/{ours.part}/{ours.n_branches}x{ours.width}/{theirs.form}"
    form = f"{ours.form} against {theirs.form}"
    programs = tuple(
        Program(
            target=f"memjax.benchmarks.{module}:contender",
            arguments=asdict(case),
            name=f"{name} in {framework}",
            need_bytes=case.need_bytes(),
        )
        for case, module, framework in (
            (ours, "engram", "jax"),
            (theirs, "engram_torch", "torch"),
        )
    )
    notes = ()
    if (ours.part, ours.form) == ("backward", "rows"):
        notes = ("without huge pages the target is 1.15",)
    return Duel(
        name=name,
        forms={form: programs},  # pyright: ignore[reportArgumentType]
        work=ours.work(),
        target=target,
        max_difference=MAX_DIFFERENCE[ours.part],
        notes=notes,
    )


def arrays(case: EngramCase) -> dict[str, Any]:
    """Inputs and weights of both sides: kernels [in, out], one key for each branch.

    The probe [W] turns a gradient of the table's size into one number a row.
    """
    draw = np.random.default_rng(0)
    n_in = case.n_columns * case.row_width
    shape_MD = (case.n_branches, case.width)
    lead = (case.n_batch, case.n_tokens)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return scale * draw.standard_normal(shape, np.float32)

    weights = {
        "table": draw.random((case.n_rows, case.row_width), np.float32) - 0.5,
        "value": normal(n_in, case.width, scale=n_in**-0.5),
        "value_bias": normal(case.width, scale=0.1),
        "conv": normal(4, case.n_branches * case.width, scale=0.5),
    }
    for m in range(case.n_branches):
        weights[f"key_{m}"] = normal(n_in, case.width, scale=n_in**-0.5)
        weights[f"key_{m}_bias"] = normal(case.width, scale=0.1)
    for name in ("key_norm", "query_norm", "conv_norm"):
        weights[name] = 1 + normal(*shape_MD, scale=0.1)
    return {
        "weights": weights,
        "hidden": normal(*lead, *shape_MD),
        "cotangent": normal(*lead, *shape_MD),
        "ids": draw.integers(0, case.n_rows, (*lead, case.n_columns), np.int32),
        "probe": normal(case.row_width),
    }


def contender(**arguments: Any) -> Contender:
    """Our side."""
    case = EngramCase(**arguments)
    return Contender("jax", lambda: _ready(case))


def _ready(case: EngramCase) -> Ready:
    given = arrays(case)
    variables = _variables(case, given.pop("weights"))
    given = {name: jnp.asarray(x) for name, x in given.items()}
    config = EngramConfig(
        orders=(2, 3),
        n_heads=case.n_columns // 2,
        row_width=case.row_width,
        n_branches=case.n_branches,
        table_mode=case.form,
    )
    layer = Engram(config, case.n_rows, Dtypes.of(PrecisionConfig()))
    if case.part == "forward":
        forward = jax.jit(layer.apply)

        def read() -> Any:
            return jax.block_until_ready(
                forward(variables, given["hidden"], given["ids"])
            )

        return Ready(variants={"layer": read}, outputs=lambda: {"y": read()})

    def loss(variables: Any, given: Any) -> tuple[Any, Any]:
        """Of weights and the stream, which stand in "params"."""
        params = variables["params"]
        y, state = layer.apply(
            variables | {"params": params["layer"]},
            params["hidden"],
            given["ids"],
            mutable=["reads"],
        )
        return jnp.sum(y * given["cotangent"]), state

    if case.part == "backward":
        return _backward(case, loss, variables, given)
    return _step(loss, variables, given)


def _variables(case: EngramCase, weights: dict[str, Any]) -> dict[str, Any]:
    w = {name: jnp.asarray(x) for name, x in weights.items()}
    params: dict[str, Any] = {"conv": w["conv"]}
    for name in ("value", *(f"key_{m}" for m in range(case.n_branches))):
        params[name] = {"kernel": w[name], "bias": w[f"{name}_bias"]}
    for name in ("key_norm", "query_norm", "conv_norm"):
        params[name] = {"scale": w[name]}
    if case.form == "rows":
        return {"params": params, "tables": {"table": w["table"]}}
    return {"params": params | {"table": w["table"]}}


def _backward(case: EngramCase, loss: Any, variables: Any, given: Any) -> Ready:
    shape = (case.n_rows, case.row_width)

    @jax.jit
    def gradients(variables: Any, given: Any) -> Any:
        params = {"layer": variables["params"], "hidden": given["hidden"]}
        _, grads = value_and_row_grad(loss)(variables | {"params": params}, given)
        if case.form == "dense":
            return grads.params, None
        return grads.params, unique_rows(grads.tables["table"], *shape)

    def run() -> Any:
        return jax.block_until_ready(gradients(variables, given))

    def outputs() -> dict[str, Any]:
        params, rows = run()
        layer = params["layer"]
        if rows is None:
            probed_R = layer["table"] @ given["probe"]
        else:
            sums_U1 = (rows.sums_UW @ given["probe"])[:, None]
            probed_R = dense_gradient(rows._replace(sums_UW=sums_U1), shape[0])[:, 0]
        return {"hidden": params["hidden"], "table": probed_R} | _named(layer)

    return Ready(variants={"layer": run}, outputs=outputs)


def _step(loss: Any, variables: Any, given: Any) -> Ready:
    adam = optax.adam(LEARNING_RATE, eps=ADAM_EPS)
    by_rows = table_optimizer(rowwise(adam))
    params, tables = variables["params"], variables["tables"]
    state = [params, jax.jit(adam.init)(params), tables, jax.jit(by_rows.init)(tables)]

    def step(params: Any, moments: Any, tables: Any, rows: Any, given: Any) -> Any:
        # The stream's gradient goes on to the layers below; here it is the result.
        both = {"layer": params, "hidden": given["hidden"]}
        _, grads = value_and_row_grad(loss)({"params": both, "tables": tables}, given)
        updates, moments = adam.update(grads.params["layer"], moments, params)
        params, tables, rows, _ = apply_updates(
            params, updates, tables, grads.tables, rows, by_rows
        )
        return grads.params["hidden"], params, moments, tables, rows

    jitted = jax.jit(step, donate_argnums=(0, 1, 2, 3))
    before_R = tables["table"] @ given["probe"]
    before = {name: jnp.array(x) for name, x in _named(params).items()}
    del params, tables, variables

    def run() -> Any:
        hidden, *state[:] = jitted(*state, given)
        return jax.block_until_ready((hidden, state))[0]

    def outputs() -> dict[str, Any]:
        hidden = run()
        after = _named(state[0])
        moved = {name: after[name] - before[name] for name in before}
        moved_R = state[2]["table"] @ given["probe"] - before_R
        return moved | {"table": moved_R, "hidden": hidden}

    return Ready(variants={"layer": run}, outputs=outputs)


def _named(params: Any) -> dict[str, Any]:
    """Some of the parameters, or of their gradients, by the names of `arrays`."""
    names = ("value", "key_0")
    found = {name: params[name]["kernel"] for name in names}
    return found | {"conv": params["conv"], "key_norm": params["key_norm"]["scale"]}
