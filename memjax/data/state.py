"""The saved place of a training stream.

What: compares a saved state with what is read now, and rewrites its reader count;
    `ForAnyReaders` does so whenever a state is restored.
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


class ForAnyReaders:
    """Batches that go on from a place which any number of readers has saved.

    What batch number n holds depends on the configuration alone, and n is the step.

    Args:
        batches: of one reader; `restore` takes states of as many readers only.
        n_readers: how many there are now.
    """

    def __init__(self, batches: Any, n_readers: int) -> None:
        self._batches = batches
        self._n_readers = n_readers

    def __next__(self) -> Any:
        return next(self._batches)

    def state(self) -> dict[str, Any]:
        """As the batches' own."""
        return self._batches.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; errors as `Batches.restore`, except for the
        number of readers."""
        self._batches.restore({**state, "n_readers": self._n_readers})


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
