"""Tables and the states of their optimizers, carried over to other parts.

What: `Repartition`, from one `Division` of a table to another, and `repartition_rows`.
Why: a checkpoint of four devices must go on on three; its arrays have the padding of
    four, which nobody may take for rows.
When not: the same number of parts by rows; the arrays are then the same.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from memjax.errors import ShapeError
from memjax.parallel.division import Division


@dataclass(frozen=True)
class Repartition:
    """How one table changes its parts.

    Attributes:
        n_rows: rows of the table without padding.
        old, new: the parts before and after.
        shapes: the state after, as a tree of shapes.
    """

    n_rows: int
    old: Division
    new: Division
    shapes: Any

    def rows(self, array: Any) -> np.ndarray:
        """An array [R, ...] of the whole table: old padding dropped, new zeros added.

        As many stored rows as before: the array as it is.

        Raises:
            ShapeError: its first axis is not that of the table in the old parts.
        """
        host = np.asarray(array)
        want = self.old.padded(self.n_rows)
        if host.ndim == 0 or host.shape[0] != want:
            raise ShapeError("array by rows", host.shape, (want, "..."))
        if self.same_rows:
            return host
        return self.new.spread(self.old.joined(host, self.n_rows), self.n_rows)

    @property
    def same_rows(self) -> bool:
        """Whether the rows are stored where they were."""
        bounds = [part.bounds(self.n_rows) for part in (self.old, self.new)]
        return bounds[0] == bounds[1]


def repartition_rows(state: Any, change: Repartition) -> Any:
    """A state whose arrays are scalars or have the rows of the table; on the host."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) if np.ndim(leaf) == 0 else change.rows(leaf),
        state,
    )
