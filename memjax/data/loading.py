"""Reading ahead: threads and processes in front of a source of batches.

What: an iterator over source[start], source[start + 1], ... through grain.
Why: the model should not wait for the next batch; grain keeps their order.
When not: the batches are cut in `memjax.data.packing`, not here.

A record of the source is a whole batch of this process, so grain never sees single
rows and the batches cannot depend on how many threads or processes read.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np

from memjax.data.packing import Batch


class BatchSource(Protocol):
    """Random access to batches: a pure function of the index, safe between threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


class _From:
    """A source from record `start` on."""

    def __init__(self, source: BatchSource, start: int) -> None:
        self._source = source
        self._start = start

    def __len__(self) -> int:
        return len(self._source) - self._start

    def __getitem__(self, index: int) -> Batch:
        return self._source[self._start + int(index)]


class BatchReader:
    """Iterator over a source from record `start` on, reading ahead.

    Args:
        source: the batches; with workers it must pickle.
        start: first record.
        n_threads: threads that read, 0 for none.
        n_workers: processes that read, 0 for none.

    `close`, or the end of the program, stops its threads and processes.
    """

    def __init__(
        self, source: BatchSource, start: int, *, n_threads: int, n_workers: int
    ) -> None:
        # Imported here: grain takes a second to import, and brings jax if it is there.
        import grain

        records: Sequence[Any] = _From(source, start)  # type: ignore[assignment]
        options = grain.ReadOptions(
            num_threads=n_threads, prefetch_buffer_size=2 * n_threads
        )
        dataset = grain.MapDataset.source(records).to_iter_dataset(options)
        if n_workers:
            from absl import flags

            # grain's workers hand on the flags of absl and insist on parsed ones,
            # which only programs started by absl have.
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()
            dataset = dataset.mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=n_workers, per_worker_buffer_size=2
                )
            )
        self._copies = n_workers > 0
        self._records: list[Iterator[Any]] = [iter(dataset)]
        # Left to the garbage collector at exit, grain closes too late, and prints.
        self.close = weakref.finalize(self, _close, self._records)

    def __iter__(self) -> "BatchReader":
        return self

    def __next__(self) -> Batch:
        if not self._records:
            raise StopIteration
        batch = next(self._records[0])
        if self._copies:
            # Workers hand out arrays in shared memory, which is a scarce thing to keep.
            batch = {name: np.array(array) for name, array in batch.items()}
        return cast(Batch, batch)


def _close(records: list[Iterator[Any]]) -> None:
    """Close the iterator and drop it, so that nothing is left for the exit."""
    close = getattr(records.pop(), "close", None)
    if close is not None:
        close()
