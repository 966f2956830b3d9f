"""Tables and the states of their rows in host memory, or in files mapped into it.

What: `HostStore`: arrays whose first axis are the rows of one table; rows are gathered
    and written, and all of it is copied block by block.
Why: a table larger than the memory of a device, or of the machine, is trained here.
When not: tables that fit on the devices; those are arrays of the state.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memjax.errors import CheckpointError, TrainingError

BLOCK_BYTES = 1 << 24


class HostLeaf(NamedTuple):
    """An array [R, ...] of a table.

    Attributes:
        row_shape: of one row; () for one number a row.
        dtype: as it is stored (bfloat16 as uint16).
        initial: every entry before the first step; None where `HostStore.fill` says it.
    """

    row_shape: tuple[int, ...]
    dtype: Any
    initial: float | None


class HostStore:
    """The arrays of one table, by name, in the order of `leaves`.

    Args:
        n_rows: rows R.
        leaves: what each array is.
        folder: where the files lie, one an array; None: in this machine's memory.

    Rows of zeros take no memory until they are written. Files take their place at once,
    since a full disk would later end the process without a word; they have no name, so
    that they go with the process, however it ends.

    Raises:
        TrainingError: a file cannot be made, or there is no room for it.
    """

    def __init__(
        self,
        n_rows: int,
        leaves: Mapping[str, HostLeaf],
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.n_rows, self.leaves = n_rows, dict(leaves)
        self.folder = None if folder is None else Path(folder)
        self._arrays: list[np.ndarray] = []
        for leaf in self.leaves.values():
            array = self._made((n_rows, *leaf.row_shape), np.dtype(leaf.dtype))
            if leaf.initial:
                for part in self.blocks(leaf):
                    array[part] = leaf.initial
            self._arrays.append(array)

    def _made(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if self.folder is None:
            return np.zeros(shape, dtype)
        n_bytes = math.prod(shape) * dtype.itemsize
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    os.posix_fallocate(file.fileno(), 0, n_bytes)
                return np.memmap(file, dtype, "w+", shape=shape)
        except OSError as error:
            raise TrainingError(
                f"a table's {n_bytes} bytes cannot be kept in {self.folder}: "
                f"{error.strerror or error}; allowed (train.host_tables): a folder "
                "that may be written, on a disk with room for it"
            ) from error

    def __getitem__(self, name: str) -> np.ndarray:
        """The live array of a name."""
        return self._arrays[list(self.leaves).index(name)]

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._arrays)

    def blocks(self, leaf: HostLeaf | None = None) -> Iterator[slice]:
        """Slices of rows, one after the other, of about `BLOCK_BYTES`."""
        wide = [leaf] if leaf is not None else self.leaves.values()
        row = max(
            int(np.prod(x.row_shape, dtype=np.int64)) * np.dtype(x.dtype).itemsize
            for x in wide
        )
        size = max(1, BLOCK_BYTES // max(row, 1))
        for first in range(0, self.n_rows, size):
            yield slice(first, min(first + size, self.n_rows))

    def fill(self, name: str, rows: Callable[[int, int], Any]) -> None:
        """Set an array to `rows(first, n)`, block by block."""
        array = self[name]
        for part in self.blocks(self.leaves[name]):
            array[part] = rows(part.start, part.stop - part.start)

    def gather(self, rows_n: np.ndarray, size: int | None = None) -> list[np.ndarray]:
        """Rows of every array, as new arrays of `size` rows; the rest is zeros."""
        size = len(rows_n) if size is None else size
        found = []
        for array in self._arrays:
            taken = np.zeros((size, *array.shape[1:]), array.dtype)
            np.take(array, rows_n, axis=0, out=taken[: len(rows_n)], mode="clip")
            found.append(taken)
        return found

    def write(self, rows_n: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Set distinct rows of every array; more values than rows are left out."""
        for array, new in zip(self._arrays, values, strict=True):
            array[rows_n] = new[: len(rows_n)]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Copy all arrays into `NAME.npy` of a folder, block by block, to the disk.

        Not through mapped files: a full disk would end the process without a word.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, array in zip(self.leaves, self._arrays, strict=True):
            header = np.lib.format.header_data_from_array_1_0(array)
            with open(Path(folder) / file_name(name), "wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for part in self.blocks(self.leaves[name]):
                    file.write(np.ascontiguousarray(array[part]).data)
                file.flush()
                os.fsync(file.fileno())

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Set all arrays from what `save` wrote.

        Raises:
            CheckpointError: a file is missing, or of another shape or dtype.
        """
        for name, array in zip(self.leaves, self._arrays, strict=True):
            copy = open_saved(folder, name)
            if (copy.shape, copy.dtype) != (array.shape, array.dtype):
                raise CheckpointError(
                    f"{Path(folder) / file_name(name)} holds {copy.dtype}"
                    f"{list(copy.shape)}, wanted {array.dtype}{list(array.shape)}"
                )
            for part in self.blocks(self.leaves[name]):
                array[part] = copy[part]


def open_saved(folder: str | os.PathLike[str], name: str) -> np.ndarray:
    """An array that `HostStore.save` wrote, mapped and not read yet."""
    path = Path(folder) / file_name(name)
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def file_name(name: str) -> str:
    """The file of an array: its name, with "." for "/"."""
    return name.replace("/", ".") + ".npy"
