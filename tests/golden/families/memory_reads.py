"""What recorded memory layers share: one call, its gradients, both table modes.

What: `reproduce` compares output and every gradient; `check_read` queries, scores,
    slots and weights.
Why: the families differ in names and settings, not in how a layer is run.
When not: what a family's settings mean stands in its own file.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from memjax.layers.memory import MemoryInputs
from memjax.layers.record import METRICS
from memjax.layers.row_grad import value_and_row_grad
from memjax.layers.table import READS, TABLES
from memjax.ops.product_keys import dot_scores, product_key_search
from memjax.ops.row_gradient import RowGradient, dense_gradient, unique_rows
from tests.golden.case import Case

CALLED = "intermediates"
Tree = dict[str, Any]


def array(case: Case, name: str) -> np.ndarray:
    """A recorded array in the dtype that the case was computed in."""
    return case.data[name].astype(case.dtype)


def linear(case: Case, name: str, *, bias: bool = True) -> Tree:
    """A recorded torch Linear, or its gradients, as our Dense."""
    found = {"kernel": array(case, name + ".weight").T}
    return found | ({"bias": array(case, name + ".bias")} if bias else {})


def reproduce(
    case: Case, module_of: Callable[[str], nn.Module], tree_of: Callable[[str], Tree]
) -> tuple[Tree, dict[str, tuple[RowGradient, ...]]]:
    """Compare output, grad.x and the gradients of all parameters, in both table modes.

    Args:
        module_of: table mode -> a module with `read(x, inputs)`.
        tree_of: prefix ("param." or "grad.") -> recorded arrays as our parameters.

    Returns:
        What the modules recorded and gave when they were called, and the row gradients
        by table.
    """
    x = jnp.asarray(array(case, "x"))
    bar = jnp.asarray(array(case, "grad_out"))
    shape = x.shape[:2]
    places = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    inputs = MemoryInputs(jnp.ones(shape, jnp.int32), places)
    params, want = tree_of("param."), tree_of("grad.")
    state, rows = {}, {}
    for mode in ("dense", "rows"):
        module = module_of(mode)

        def loss_of(variables: Tree, module: nn.Module = module) -> Any:
            given = variables["params"]
            out, state = module.apply(
                {**variables, "params": given["module"]},
                given["x"],
                inputs,
                method="read",
                mutable=[METRICS, READS],
                capture_intermediates=True,
            )
            return jnp.sum(out * bar), (state, (out, state))

        own, tables = _without_tables(params) if mode == "rows" else (params, {})
        variables = {"params": {"module": own, "x": x}, TABLES: tables}
        graded = jax.jit(value_and_row_grad(loss_of, has_aux=True))
        (_, (out, state)), grads = graded(jax.tree.map(jnp.asarray, variables))
        case.close("out", out)
        case.close("grad.x", grads.params["x"])
        wanted, wanted_tables = _without_tables(want) if mode == "rows" else (want, {})
        _close_trees(case, grads.params["module"], wanted)
        if mode == "rows":
            rows = grads.tables
            named = _named(wanted_tables)
            assert set(named) == set(rows), "tables that were read"
            for path, leaf in named.items():
                summed = unique_rows(rows[path], *leaf.shape)
                case.close(f"grad of {path}", dense_gradient(summed, len(leaf)), leaf)
    return state, rows


def check_read(
    case: Case,
    prefix: str,
    state: Tree,
    path: tuple[str, ...],
    keys_HXNC: np.ndarray,
    *,
    rows_a_head: int = 0,
    half_k: int | None = None,
) -> np.ndarray:
    """Compare query, raw scores, slots and weights of the module at `path`.

    Args:
        rows_a_head: by how much the recorded slots of a head exceed those of the
            head before.

    Returns:
        The places of our K slots in the recorded order.
    """
    for name in path:
        state = {kind: tree[name] for kind, tree in state.items()}
    q = state[CALLED]["query"]["__call__"][0]
    if prefix + "query" in case.data:
        case.close(prefix + "query", jnp.reshape(q, case.data[prefix + "query"].shape))
    heads, halves, _, width = keys_HXNC.shape
    first_H1 = rows_a_head * np.arange(heads)[:, None]
    slots = case.data[prefix + "indices"] - first_H1
    q_BTHXC = jnp.reshape(q, (*q.shape[:2], heads, halves, width))
    scores = dot_scores(q_BTHXC, keys_HXNC)
    found = product_key_search(scores, slots.shape[-1], half_k)
    got = np.asarray(state[METRICS]["slots"]).reshape(slots.shape)
    # Best first in both, but scores closer than their rounding may change places.
    ours = np.argsort(np.argsort(slots, axis=-1), axis=-1)
    ours = np.take_along_axis(np.argsort(got, axis=-1), ours, axis=-1)

    def placed(values: Any) -> np.ndarray:
        values = np.asarray(values).reshape(slots.shape)
        return np.take_along_axis(values, ours, axis=-1)

    case.equal(prefix + "indices", placed(got), slots)
    case.equal(prefix + "indices", placed(found.slots), slots)
    case.close(prefix + "raw_scores", placed(found.scores))
    if prefix + "scores" in case.data:
        case.close(prefix + "scores", placed(state[METRICS]["weights"]))
    return ours


def _without_tables(tree: Tree) -> tuple[Tree, Tree]:
    """Parameters and tables, as trees of the same paths."""
    params: Tree = {}
    tables: Tree = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            params[name], found = _without_tables(value)
            tables |= {name: found} if found else {}
        else:
            (tables if name.endswith("table") else params)[name] = value
    return params, tables


def _named(tree: Tree) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _close_trees(case: Case, got: Tree, want: Tree) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want), "parameters differ"
    for path, leaf in _named(want).items():
        case.close(f"grad of {path}", _named(got)[path], leaf)
