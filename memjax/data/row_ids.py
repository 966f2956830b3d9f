"""Table rows that the data pipeline looks up, beside the tokens of a batch.

What: `RowIds`, which adds the rows of each layer to a batch as fields `rows/LAYER`, and
    `given_rows`, which finds them there.
Why: rows known before a step can be fetched before it, and need not be hashed in it.
When not: by default the model hashes its tokens itself; see `ops.hashed_rows`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from memjax.ops.hashed_rows import Layout, host_rows

PREFIX = "rows/"

AnyBatch = TypeVar("AnyBatch", bound=Mapping[str, Any])


@dataclass(frozen=True, eq=False)
class RowIds:
    """Adds to a batch the rows that its tokens address.

    Attributes:
        layouts: {layer: layout} of the layers whose rows are wanted.
        classes_V: the class of each id, for layouts of classes; None: of the ids.

    It pickles, so processes that read can call it.
    """

    layouts: Mapping[int, Layout]
    classes_V: np.ndarray | None = None

    def __call__(self, batch: AnyBatch) -> AnyBatch:
        """The batch with a field `rows/LAYER`, int32 [B, T, C], for each layer.

        Raises:
            DataError: a token outside the vocabulary.
        """
        found = host_rows(
            self.layouts, batch["tokens"], batch["segments"], classes_V=self.classes_V
        )
        rows = {f"{PREFIX}{layer}": rows_BTC for layer, rows_BTC in found.items()}
        return {**batch, **rows}  # pyright: ignore[reportReturnType]


def given_rows(batch: Mapping[str, Any]) -> dict[int, Any]:
    """{layer: rows [B, T, C]} of a batch; empty where the model is to hash."""
    return {
        int(name.removeprefix(PREFIX)): array
        for name, array in batch.items()
        if name.startswith(PREFIX)
    }
