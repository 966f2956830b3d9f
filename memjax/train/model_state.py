"""Variables that the forward pass changes and no optimizer does.

What: `ModelState`, the functions that part them from the parameters.
Why: running statistics and carried fast weights are saved, restored and evaluated with
    the parameters, in one tree, but have no gradient and no optimizer.
When not: models that only read their parameters; `fit` then takes None.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class ModelState(NamedTuple):
    """How the state of a model is parted from the parameters of a run.

    The parameters of a run are one tree with the state in its places. A loss function
    takes that tree in training, and returns ((nats, (sums, new state))).

    Attributes:
        split: tree -> (parameters, state); also of a tree without tables; traceable.
        merge: (parameters, state) -> tree; traceable.
    """

    split: Callable[[Any], tuple[Any, Any]]
    merge: Callable[[Any, Any], Any]
