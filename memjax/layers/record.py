"""Recording a value from inside a forward pass.

What: `record`, a `sow` that overwrites, into the collection "metrics"; `add_loss`, the
    same for a loss of the layer's own, into "losses".
Why: plain `sow` appends, so feeding a collection back grows it step by step.
When not: state that the next step needs is a variable, not a record.
"""

from typing import Any

import flax.linen as nn

METRICS = "metrics"
LOSSES = "losses"


def record(module: nn.Module, name: str, value: Any) -> None:
    """Store `value` under `name` in METRICS when the caller made it mutable.

    One value per module and name, the latest; scanned modules add the layer axis in
    front.
    """
    module.sow(METRICS, name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def add_loss(module: nn.Module, name: str, value: Any) -> None:
    """Add `value` to the training loss of whoever made LOSSES mutable.

    It is in nats a token, already times its weight: the training loss is the mean of
    the tokens' nats plus the sum of these. A latest value overwrites an earlier one.
    """
    module.sow(LOSSES, name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)
