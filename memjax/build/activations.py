"""What a training step keeps between forward and backward pass, from shapes alone.

What: `activation_bytes` of one micro-batch on one device.
Why: activations decide how many rows fit a device, and no formula follows all memories,
    rematerialisation and scans; the traced program does.
When not: what a compiler makes of it. It needs working space besides, and computes some
    of it again instead of keeping it; `docs/planner.md` has measurements.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from memjax.build.parts import Parts
from memjax.experiment import Experiment

_REMAT = "prevent_cse"  # a parameter that only rematerialised pieces have


class Activations(NamedTuple):
    """Bytes.

    Attributes:
        kept: what the forward pass hands to the backward pass.
        block: the most that one rematerialised block keeps while it is computed again;
            0 without `model.remat`.
    """

    kept: int
    block: int


def activation_bytes(experiment: Experiment, n_rows: int) -> Activations:
    """Of the training loss of n_rows rows, as on one device; nothing is allocated.

    Counted are the arrays that autodiff keeps, each once, copies of parameters in
    another dtype among them. Parameters, the batch and constants are not counted.
    """
    parts = Parts(experiment)
    key = jax.eval_shape(lambda: jax.random.key(0))
    dense, tables = parts.split(jax.eval_shape(parts.init_params, key))
    state, held = parts.model_state, None
    if state is not None:
        dense, held = state.split(dense)

    def loss(dense: Any, held: Any, tables: Any, batch: Any, key: Any) -> Any:
        whole = dense if state is None else state.merge(dense, held)
        return parts.training_loss(parts.merge(whole, tables), batch, key)[0]

    batch = _abstract_batch(n_rows, experiment.data.context)
    arguments = (dense, held, tables, batch, key)
    kept = _kept_bytes(loss, arguments)
    if not experiment.model.remat:
        return Activations(kept, 0)
    blocks = [
        _kept_bytes(jaxpr_as_fun(ClosedJaxpr(block, ())), _shapes(block))
        for block in _rematerialised(jax.make_jaxpr(loss)(*arguments).jaxpr)
    ]
    return Activations(kept, max(blocks, default=0))


def _abstract_batch(n_rows: int, context: int) -> dict[str, jax.ShapeDtypeStruct]:
    """As the data pipeline makes it."""
    ids = ("tokens", "segments", "positions", "targets")
    dtypes = dict.fromkeys(ids, jnp.int32) | {"weights": jnp.float32}
    return {
        name: jax.ShapeDtypeStruct((n_rows, context), dtype)
        for name, dtype in dtypes.items()
    }


def _kept_bytes(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    """Bytes that the transpose of a function holds, beside the function's arguments.

    All arguments of a block are differentiated; of the loss the first alone, but what
    its other arguments need is kept for that one as well.
    """

    def transposed(*arguments: Any) -> Any:
        return jax.vjp(function, *arguments)[1]

    jaxpr = jax.make_jaxpr(transposed)(*arguments).jaxpr
    given = {*jaxpr.invars, *jaxpr.constvars}
    kept = {var for var in jaxpr.outvars if isinstance(var, Var)} - given
    return sum(_nbytes(var.aval) for var in kept)


def _rematerialised(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """The rematerialised pieces of a program, those inside others left out."""
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
                if isinstance(inner, Jaxpr) and _REMAT in eqn.params:
                    yield inner
                elif isinstance(inner, Jaxpr):
                    yield from _rematerialised(inner)


def _shapes(jaxpr: Jaxpr) -> tuple[jax.ShapeDtypeStruct, ...]:
    avals: Any = [var.aval for var in jaxpr.invars]
    return tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)


def _nbytes(aval: Any) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)
