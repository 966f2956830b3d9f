"""Recording a value from inside a forward pass.

What: `record`, a `sow` that overwrites, into the collection "metrics".
Why: plain `sow` appends, so feeding a collection back grows it step by step.
When not: state that the next step needs is a variable, not a record.
"""

from typing import Any

import flax.linen as nn

METRICS = "metrics"


def record(module: nn.Module, name: str, value: Any) -> None:
    """Store `value` under `name` in METRICS when the caller made it mutable.

    One value per module and name, the latest; scanned modules add the layer axis in
    front.
    """
    module.sow(METRICS, name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)
