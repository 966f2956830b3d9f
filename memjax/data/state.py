"""The saved place of a training stream.

What: compares a saved state with what is read now, and rewrites its reader count.
Why: a place in other data, or in another order, is no place; say which field differs.
When not: saving it beside the parameters is the business of the checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from memjax.errors import ConfigError, DataError


def check_state(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """DataError naming the first field in which `state` differs from `identity`.

    Args:
        state: as `Batches.state()` gave it, also after a trip through JSON.
        identity: the same without `step`.
    """
    for field, now in identity.items():
        saved = state.get(field)
        if saved != now:
            hint = ""
            if field == "n_readers":
                hint = "; state_for_readers rewrites a state for another number"
            raise DataError(
                f"the saved state of the data has {field} = {saved!r}, "
                f"this run has {now!r}{hint}"
            )
    step = state.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise DataError(f"the saved state of the data has step = {step!r}")


def state_for_readers(state: Mapping[str, Any], n_readers: int) -> dict[str, Any]:
    """The same place for another number of readers.

    Exact: which rows a batch has does not depend on the readers, only who reads them.

    Raises:
        ConfigError: batch_size of the state is no multiple of n_readers.
    """
    if n_readers < 1 or state["batch_size"] % n_readers:
        raise ConfigError(
            "n_readers", n_readers, f"a divisor of batch_size = {state['batch_size']}"
        )
    return {**state, "n_readers": n_readers}
