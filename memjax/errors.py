"""The exceptions memjax raises on purpose.

What: one small family; each message names the field, its value and what is allowed.
Why: the command line prints `str(error)` as its only line and exits non-zero.
When not: bugs of ours stay ordinary exceptions with their traceback.
"""

from typing import Any


class MemjaxError(Exception):
    """Base of every error a user can cause and mend."""


class ConfigError(MemjaxError, ValueError):
    """A configuration field has a value that is not allowed."""

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        super().__init__(f"{field} = {value!r} is not allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class ShapeError(MemjaxError, ValueError):
    """An array does not have the shape the function documents."""

    def __init__(self, name: str, got: tuple[int, ...], want: Any) -> None:
        super().__init__(f"{name} has shape {got}, expected {want}")


class DataError(MemjaxError):
    """A corpus, token store or text file is missing, corrupt or of another kind."""


class CheckpointError(MemjaxError):
    """A checkpoint is torn, or belongs to another configuration."""


class TrainingError(MemjaxError):
    """Training stopped: a non-finite loss or an unusable run folder."""


class MissingExtraError(MemjaxError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed: pip install 'memjax[{extra}]' brings it"
        )
