"""Held-out bits per byte of an experiment.

What: `Evaluator`, all parts of one split, each and together.
Why: one object scores the same windows at every step of a run and after it.
When not: one batch, or a loop of your own; `evaluate.bits_per_byte` has the functions.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from memjax.build.parts import Parts
from memjax.data.pipeline import eval_batches
from memjax.evaluate.bits_per_byte import make_scorer, score
from memjax.parallel.mesh import data_reader, global_batch


class Evaluator:
    """Held-out bits per byte of one split; called with parameters.

    Attributes:
        bytes_per_token: bytes of the split per scored target.
        place: puts a batch on the devices; a `HostReader` where tables are on the host.
    """

    def __init__(self, parts: Parts, split: str, mesh: Any, prepared: Any) -> None:
        reader, n_readers = data_reader(mesh)
        self._batches = eval_batches(
            parts.experiment.data,
            split,
            reader=reader,
            n_readers=n_readers,
            prepared=prepared,
            row_ids=parts.row_ids,
        )
        self.place: Callable[[Any], Any] = partial(global_batch, mesh)
        self._scorer = make_scorer(parts.logits)
        self.bytes_per_token = self._batches.n_bytes / self._batches.n_targets

    def __call__(self, params: Any, max_batches: int | None = None) -> dict[str, float]:
        """{"bpb": all parts together, "bpb/PART": each}; max_batches is per part."""
        found: dict[str, float] = {}
        nats, n_bytes = 0.0, 0.0
        for name in self._batches.names:
            part = self._batches.part(name)
            placed = (
                self.place(batch) for batch in itertools.islice(part, max_batches)
            )
            scored = score(self._scorer, params, placed)
            bytes_per_token = part.n_bytes / part.n_targets
            found[f"bpb/{name}"] = scored.bpb(bytes_per_token)
            nats += scored.nats
            n_bytes += scored.n_tokens * bytes_per_token
        return {"bpb": nats / (math.log(2) * n_bytes), **found}
