"""Reading ahead: threads and processes in front of a source of batches.

What: an iterator over source[start], source[start + 1], ... through grain.
Why: the model should not wait for the next batch; grain keeps their order.
When not: the batches are cut in `memjax.data.packing`, not here.

A record of the source is a whole batch of this process, so grain never sees single
rows and the batches cannot depend on how many threads or processes read.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

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


def read_batches(
    source: BatchSource, start: int, *, n_threads: int, n_workers: int
) -> Iterator[Batch]:
    """Iterate over a source from record `start` on, reading ahead.

    Args:
        source: the batches; with workers it must pickle.
        start: first record.
        n_threads: threads that read, 0 for none.
        n_workers: processes that read, 0 for none.

    Returns:
        An iterator; `close_reader` ends its threads and processes.
    """
    # Imported here: grain takes a second to import, and brings jax where it is there.
    import grain

    records: Sequence[Any] = _From(source, start)  # type: ignore[assignment]
    options = grain.ReadOptions(
        num_threads=n_threads, prefetch_buffer_size=2 * n_threads
    )
    dataset = grain.MapDataset.source(records).to_iter_dataset(options)
    if n_workers:
        from absl import flags

        # grain's workers hand on the flags of absl and insist on parsed ones, which
        # only programs started by absl have.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS(sys.argv[:1], known_only=True)
        dataset = dataset.mp_prefetch(
            grain.MultiprocessingOptions(
                num_workers=n_workers, per_worker_buffer_size=2
            )
        )
    return iter(dataset)


def close_reader(reader: Iterator[Batch]) -> None:
    """Stop the threads and processes of an iterator of `read_batches`."""
    close = getattr(reader, "close", None)
    if close is not None:
        close()
