"""Room on the disk for one more checkpoint.

What: `lacks_room`, from what the last one took.
Why: asked before, a full disk is one line; the checkpoint library's threads print much
    when they fail, and leave a part of a checkpoint.
When not: a disk that is filled meanwhile; that is an error of the writer.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax


def lacks_room(directory: Path, newest: int | None, params: Any) -> str | None:
    """What speaks against one more checkpoint in `directory`; None if nothing does.

    Args:
        directory: made if it is missing; a folder is made in it, on trial.
        newest: the last whole step there; the next takes about as much.
        params: without a whole step, half of their bytes must be free: files are
            compressed, which gains little on weights and nearly all on zeros.

    Counts files, not their blocks. Costs one look at each file of the last step.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=directory, prefix=".trial").cleanup()
        disk = shutil.disk_usage(directory)
    except OSError as error:
        return error.strerror or str(error)
    if newest is None:
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) // 2
        reason = f"the parameters alone are {2 * needed}"
    else:
        files = (directory / str(newest)).rglob("*")
        needed = sum(file.stat().st_size for file in files if file.is_file())
        reason = f"the last one, step {newest}, took {needed}"
    if disk.total == 0 or disk.free >= needed:  # some file systems do not know
        return None
    return f"{disk.free} bytes are free, and {reason}"
