"""What the trainer is handed for tables that are trained by rows.

What: `TableTraining`, the functions and shardings of a model's tables.
Why: the step, the state and the checkpoints treat tables apart from dense weights,
    without knowing what a table is read by or which optimizer it has.
When not: models whose tables are ordinary parameters; `fit` then takes None.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class TableTraining(NamedTuple):
    """Tables among the parameters of a run.

    The parameters of a run are one tree with the tables in their places; the dense part
    and the tables are split where they are treated differently.

    Attributes:
        split: params -> (dense, tables); traceable.
        merge: (dense, tables) -> params; traceable.
        gradients: (params, batch, key) -> ((nats, aux), (dense gradients, row
            gradients)); the loss and sums as those of the step's loss function. Row
            gradients are a tree of arrays whose first axis is that of the batch.
        init: tables -> state of the optimizer; traceable.
        apply: (row gradients, state, tables, scale) -> (tables, state, metrics);
            traceable. Metrics are named "NAME/PATH"; names that end in "_norm" are
            joined over tables.
        mean: (tables, state) -> running means where they are kept, else the tables.
        shardings: (tables, state), as shapes -> the same trees of shardings.
        layout: JSON: "rows", {path: rows without padding}; "parts" and "by", into which
            parts each table is divided.
        repartition: (tables, state, layout of a checkpoint) -> (tables, state) in the
            parts of this run.
        keeps_mean: whether `mean` differs from the tables.
        read: (tables, state) -> the tables as a batch reads them; traceable. They
            differ where the state holds slots of tables on the host.
    """

    split: Callable[[Any], tuple[Any, Any]]
    merge: Callable[[Any, Any], Any]
    gradients: Callable[[Any, Any, jax.Array], Any]
    init: Callable[[Any], Any]
    apply: Callable[[Any, Any, Any, jax.Array], tuple[Any, Any, dict[str, jax.Array]]]
    mean: Callable[[Any, Any], Any]
    shardings: Callable[[Any, Any], tuple[Any, Any]]
    layout: dict[str, Any]
    repartition: Callable[[Any, Any, dict[str, Any]], tuple[Any, Any]]
    keeps_mean: bool
    read: Callable[[Any, Any], Any] = lambda tables, state: tables
