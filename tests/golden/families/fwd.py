"""What both forms of the Engram layer share: dtypes, the loss, comparing trees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.layers.engram import Engram
from memjax.layers.precision import Dtypes
from memjax.layers.record import METRICS
from tests.golden.case import Case

LOSS = "sum(output*cotangent)"


def dtypes_of(case: Case) -> Dtypes:
    """Everything in the dtype of the file."""
    return Dtypes(*(jnp.dtype(case.dtype),) * 4)


def compare(
    case: Case,
    layer: Engram,
    *,
    method: str,
    hidden_key: str,
    tree_of: Callable[[str], Any],
    rows: np.ndarray,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare output and all gradients of one layer call.

    Args:
        method: the layer's method that the case recorded.
        hidden_key: name of the recorded stream.
        tree_of: prefix -> the arrays "<prefix><name>" as our parameter tree.

    Returns:
        What the layer recorded, and the outputs of its submodules.
    """
    case.settings.take("loss", one_of=(LOSS,))
    params = jax.tree.map(jnp.asarray, tree_of("param_"))
    cotangent = jnp.asarray(case.data["cotangent"])
    rows = jnp.asarray(rows)

    def loss(params: Any, hidden: jax.Array) -> Any:
        output, state = layer.apply(
            {"params": params},
            hidden,
            rows,
            method=method,
            mutable=[METRICS],
            capture_intermediates=True,
            **options,
        )
        return jnp.sum(output * cotangent), (output, state)

    hidden = jnp.asarray(case.data[hidden_key])
    graded = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (output, state)), (grads, grad_hidden) = graded(params, hidden)
    case.close("output", output)
    case.close(f"grad_{hidden_key}", grad_hidden)
    want = tree_of("grad_")
    assert jax.tree.structure(grads) == jax.tree.structure(want)
    for (path, got), leaf in zip(
        jax.tree.leaves_with_path(grads), jax.tree.leaves(want), strict=True
    ):
        case.close(f"grad of {jax.tree_util.keystr(path)}", got, leaf)
    called = {
        # Several calls are of several streams.
        name: jnp.concatenate(value["__call__"], axis=-1)
        for name, value in state["intermediates"].items()
        if name != "__call__"
    }
    return state[METRICS], called
