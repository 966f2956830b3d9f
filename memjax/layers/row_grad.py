"""Gradients of a Linen model whose tables are in mode "rows".

What: `value_and_row_grad`, like `jax.value_and_grad`, with a `RowGradient` per read.
Why: one call gives what both optimizers want; taps and reads stay inside.
When not: tables in mode "dense"; `jax.value_and_grad` does those.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memjax.errors import ConfigError
from memjax.layers.table import READS, TABLES, TAPS, Read
from memjax.ops.row_gradient import RowGradient


class Grads(NamedTuple):
    """Gradients of both kinds.

    Attributes:
        params: a tree like the parameters.
        tables: {path of a table: gradients of its reads, in the order of the calls};
            tables that were not read have none.
    """

    params: Any
    tables: dict[str, tuple[RowGradient, ...]]


def value_and_row_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False
) -> Callable[..., tuple[Any, Grads]]:
    """A function (variables, *args) -> (loss, Grads) of a loss over Linen variables.

    Args:
        loss_fn: (variables, *args) -> (loss, state), where state is what
            `module.apply(variables, ..., mutable=["reads", ...])` returned beside its
            output; with has_aux, (loss, (state, aux)).
        has_aux: whether loss_fn returns something of its own as well.

    Returns:
        A function of (variables, *args); variables hold "params", "tables" and any
        other collections. It returns (loss, grads), or ((loss, aux), grads). The loss
        and the gradients equal those of the same tables in mode "dense".

    Raises:
        ConfigError: "reads" or "taps" are among the variables (they belong to one step
            and are made inside it), or loss_fn does not return the sown reads.

    Modules inside `nn.scan` or `nn.vmap` hand out their reads only when "reads" and
    "taps" are among the variable_axes; a table whose reads are not handed out is not
    trained, as one that nobody reads.

    Cost: the loss is traced once more to find the shapes of the reads; at run time, one
        addition of zeros per read, which the compiler may drop.
    """

    def split(out: Any) -> tuple[Any, Any, Any]:
        """loss, reads and aux of what loss_fn returned."""
        rest: Any = out[1] if _is_pair(out) else None
        state, aux = rest, None
        if has_aux:
            state, aux = rest if _is_pair(rest) else (None, None)
        if not isinstance(state, Mapping):
            raise ConfigError(
                "loss_fn",
                type(rest if _is_pair(out) else out).__name__,
                "to return (loss, state) with the state of apply(..., "
                "mutable=['reads']), or (loss, (state, aux)) with has_aux",
            )
        return out[0], state.get(READS, {}), aux

    def with_gradients(variables: Mapping[str, Any], *args: Any) -> tuple[Any, Grads]:
        for name in (READS, TAPS):
            if name in variables:
                raise ConfigError(
                    "variables", name, "collections of a model without reads and taps"
                )
        fixed = {name: tree for name, tree in variables.items() if name != "params"}
        params = variables.get("params", {})

        def reads_of(params: Any) -> Any:
            return split(loss_fn({**fixed, "params": params}, *args))[1]

        shapes = jax.eval_shape(reads_of, params)
        taps = jax.tree.map(_zero_tap, shapes, is_leaf=_is_read)
        if fixed.get(TABLES) and not taps:
            raise ConfigError(
                "loss_fn",
                "no reads",
                "a loss that applies the model with mutable=['reads'] and returns it",
            )

        def loss_of(params: Any, taps: Any) -> tuple[Any, Any]:
            tapped = {**fixed, "params": params}
            if taps:
                tapped[TAPS] = taps
            loss, reads, aux = split(loss_fn(tapped, *args))
            return loss, (reads, aux)

        (loss, (reads, aux)), (grads, bars) = jax.value_and_grad(
            loss_of, argnums=(0, 1), has_aux=True
        )(params, taps)
        tables: dict[str, tuple[RowGradient, ...]] = {}
        sown = jax.tree.leaves(reads, is_leaf=_is_read)
        missed = sorted({read.table for read in sown if not read.tapped})
        if missed:
            raise ConfigError(
                "loss_fn",
                f"reads of {missed} without taps",
                "a loss that applies the model with all of the variables it is given, "
                "and 'taps' beside 'reads' in the variable_axes of nn.scan",
            )
        for read, bar in zip(sown, jax.tree.leaves(bars), strict=True):
            gradient = RowGradient(read.ids, read.weights, bar)
            tables[read.table] = (*tables.get(read.table, ()), gradient)
        return ((loss, aux) if has_aux else loss), Grads(grads, tables)

    return with_gradients


def _is_pair(out: Any) -> bool:
    return isinstance(out, tuple) and len(out) == 2


def _is_read(leaf: Any) -> bool:
    return isinstance(leaf, Read)


def _zero_tap(read: Read) -> jax.Array:
    return jnp.zeros(read.tap.shape, read.tap.dtype)
