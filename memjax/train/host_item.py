"""Tables on the host as an item of a checkpoint.

What: `HostSave`, an argument of the checkpoint library that calls a function with the
    folder to write into; `host_folder` finds it again.
Why: the item is torn, kept and deleted with the rest of its checkpoint.
When not: what is written; see `host_tables`.

The files are written while `save` is called, so nothing changes meanwhile. They are
read without the library, in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from memjax.errors import CheckpointError

HOST_ITEM = "host"


class _Writer(ocp.CheckpointHandler):
    """Calls the function of a `HostSave`."""

    def save(self, directory: Any, args: "HostSave") -> None:
        args.write(Path(directory))

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise CheckpointError(f"{directory} is read by memjax.train.host_tables")


@ocp.args.register_with_handler(_Writer, for_save=True, for_restore=True)
@dataclass
class HostSave(ocp.args.CheckpointArgs):
    """Write an item by a function of its folder."""

    write: Callable[[Path], None]


def host_folder(checkpoint: Path) -> Path:
    """The folder that the function of a `HostSave` wrote.

    Raises:
        CheckpointError: the checkpoint has none.
    """
    folder = checkpoint / HOST_ITEM
    if not folder.is_dir():
        raise CheckpointError(f"{checkpoint} holds no tables on the host: no {folder}")
    return folder
