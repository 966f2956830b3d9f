"""From a DataConfig to batches.

What: `prepare` finds or builds the stores; `train_batches` and `eval_batches` read.
Why: three calls are all that a training loop, an evaluation or a notebook needs.
When not: rows of n-gram tables follow from the batches, by `memjax.ops`; with
    `hash_on` "host" they are in the batches, see `memjax.data.row_ids`.

Several processes: reader r of n gets rows r * B/n .. (r + 1) * B/n - 1 of every batch.
What a batch holds does not depend on n.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memjax.data.config import DataConfig
from memjax.data.folder import open_split
from memjax.data.loading import BatchReader
from memjax.data.packing import Batch, MixedWindows, empty_batch
from memjax.data.prepared import Prepared, prepare
from memjax.data.scoring import ScoredRows
from memjax.data.state import check_state
from memjax.errors import ConfigError, DataError

__all__ = ["Batch", "Batches", "EvalBatches", "Prepared", "eval_batches", "prepare"]
__all__ += ["train_batches"]

AddRows = Callable[[Batch], Batch]
"""Adds table rows to a batch; see `memjax.data.row_ids`, which needs jax."""

logger = logging.getLogger(__name__)


def _rows_of_reader(field: str, batch_size: int, reader: int, n_readers: int) -> range:
    if n_readers < 1:
        raise ConfigError("n_readers", n_readers, "an integer >= 1")
    if not 0 <= reader < n_readers:
        raise ConfigError("reader", reader, f"0..{n_readers - 1}")
    if batch_size % n_readers:
        raise ConfigError(field, batch_size, f"a multiple of the {n_readers} readers")
    n_rows = batch_size // n_readers
    return range(reader * n_rows, (reader + 1) * n_rows)


def _check_row_ids(config: DataConfig, row_ids: AddRows | None) -> None:
    if config.hash_on == "host" and row_ids is None:
        raise ConfigError("data.hash_on", "host", "'device' where no row_ids are given")


def _with_rows(batch: Batch, row_ids: AddRows | None) -> Batch:
    return batch if row_ids is None else row_ids(batch)


class _TrainSource:
    """This reader's rows of every batch; see `BatchSource`."""

    def __init__(
        self,
        windows: MixedWindows,
        context: int,
        batch_size: int,
        rows: range,
        row_ids: AddRows | None,
    ) -> None:
        self._windows = windows
        self._context = context
        self._batch_size = batch_size
        self._rows = rows
        self._row_ids = row_ids
        self.steps_per_epoch = windows.n_windows // batch_size

    def __len__(self) -> int:
        return 1 << 62  # without end

    def __getitem__(self, index: int) -> Batch:
        epoch, step = divmod(index, self.steps_per_epoch)
        batch = empty_batch(len(self._rows), self._context)
        for row, number in enumerate(self._rows):
            window = step * self._batch_size + number
            self._windows.fill(batch, row, epoch, window)
        return _with_rows(batch, self._row_ids)


class Batches:
    """Endless iterator over the training batches of one reader.

    Attributes:
        step: batches handed out since the beginning of training; the next one's index.
        steps_per_epoch: batches of an epoch, the same for all readers.
        n_windows: windows by corpus in an epoch.
        n_left_out: windows of an epoch that do not fill a batch (fewer than
            batch_size, others in each epoch).
        n_left_out_tokens: targets that do not fill a window, by corpus.
        tokens_per_step: targets of a whole batch over all readers.
    """

    def __init__(
        self,
        config: DataConfig,
        prepared: Prepared,
        *,
        reader: int,
        n_readers: int,
        row_ids: AddRows | None = None,
    ) -> None:
        _check_row_ids(config, row_ids)
        rows = _rows_of_reader("data.batch_size", config.batch_size, reader, n_readers)
        stores = [open_split(part.folder, "train") for part in prepared.parts]
        windows = MixedWindows(
            stores,
            [part.weight for part in prepared.parts],
            context=config.context,
            seed=config.seed,
            shuffle=config.shuffle_documents,
        )
        names = [part.name for part in prepared.parts]
        self.n_windows = dict(zip(names, windows.n_each, strict=True))
        self.n_left_out = windows.n_windows % config.batch_size
        self.n_left_out_tokens = dict(zip(names, windows.n_tail, strict=True))
        for name, n_windows in self.n_windows.items():
            if n_windows == 0:
                raise DataError(
                    f"{name} train has fewer tokens than one window of data.context = "
                    f"{config.context}"
                )
        self._source = _TrainSource(
            windows, config.context, config.batch_size, rows, row_ids
        )
        self.steps_per_epoch = self._source.steps_per_epoch
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the train splits have {windows.n_windows} windows of {config.context}"
                f" tokens, fewer than one batch: data.batch_size = {config.batch_size}"
            )
        self.tokens_per_step = config.batch_size * config.context
        self._config = config
        self._identity: dict[str, Any] = {
            "tokenizer": prepared.tokenizer.fingerprint,
            "corpora": [
                [part.name, part.weight, store.fingerprint]
                for part, store in zip(prepared.parts, stores, strict=True)
            ],
            "context": config.context,
            "batch_size": config.batch_size,
            "seed": config.seed,
            "shuffle_documents": config.shuffle_documents,
            "n_readers": n_readers,
        }
        self._reader: BatchReader | None = None
        self.step = 0
        logger.info(
            "an epoch has %d batches; left out: %d windows and %d tokens",
            self.steps_per_epoch,
            self.n_left_out,
            sum(windows.n_tail),
        )

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        if self._reader is None:
            self._reader = BatchReader(
                self._source,
                self.step,
                n_threads=self._config.n_threads,
                n_workers=self._config.n_workers,
            )
        batch = next(self._reader)
        self.step += 1
        return batch

    def seek(self, step: int) -> None:
        """Make batch number `step` (>= 0) the next one."""
        if step < 0:
            raise ConfigError("start", step, "an integer >= 0")
        self.close()
        self.step = step

    def state(self) -> dict[str, Any]:
        """Where the iterator stands and what it reads; plain JSON, the same for all
        readers. Batches read ahead and not yet handed out do not count."""
        return {"step": self.step, **self._identity}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            DataError: the state is of other data or other settings; names the first
                field. Another number of readers is an error too, since it is seldom
                meant: `state_for_readers` rewrites a state on purpose.
        """
        check_state(state, self._identity)
        self.seek(state["step"])

    def close(self) -> None:
        """Stop reading ahead. The iterator can still be used."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def train_batches(
    config: DataConfig,
    *,
    reader: int = 0,
    n_readers: int = 1,
    start: int = 0,
    prepared: Prepared | None = None,
    row_ids: AddRows | None = None,
) -> Batches:
    """Training batches, without end, beginning with number `start`.

    Args:
        config: what is read.
        reader, n_readers: this process and how many there are; batch_size must be a
            multiple of n_readers.
        start: first batch; costs nothing, however large.
        prepared: result of `prepare(config)`; made here by default.
        row_ids: adds the table rows to every batch; needed when `hash_on` is "host".

    Raises:
        ConfigError: a reader out of range, batch_size no multiple of n_readers, or
            "host" without row_ids.
        DataError: fewer tokens than one batch, and all that `prepare` raises.
    """
    batches = Batches(
        config,
        prepared or prepare(config),
        reader=reader,
        n_readers=n_readers,
        row_ids=row_ids,
    )
    batches.seek(start)
    return batches


class _EvalSource:
    """This reader's rows of the evaluation batches of one part."""

    def __init__(
        self,
        rows: ScoredRows,
        context: int,
        size: int,
        mine: range,
        row_ids: AddRows | None,
    ) -> None:
        self._scored = rows
        self._context = context
        self._size = size
        self._mine = mine
        self._row_ids = row_ids

    def __len__(self) -> int:
        return -(-self._scored.n_rows // self._size)

    def __getitem__(self, index: int) -> Batch:
        batch = empty_batch(len(self._mine), self._context)
        for row, place in enumerate(self._mine):
            number = index * self._size + place
            if number < self._scored.n_rows:
                self._scored.fill(batch, row, number)
        return _with_rows(batch, self._row_ids)


class EvalBatches:
    """The evaluation batches of one reader; each `iter` begins anew.

    A batch holds rows of one part only; the parts follow one another. The last batch
    of a part is filled up with rows of padding (weights 0), so all readers have the
    same number of batches of the same shape.

    Attributes:
        names: the parts, in order.
        n_bytes: bytes of text over all parts and readers: with bits per byte =
            nats / (ln 2 * n_bytes), nats summed over all readers.
        n_targets: scored tokens over all parts and readers (the sum of all weights).
        n_batches: batches of a pass.
    """

    def __init__(
        self,
        parts: Mapping[str, ScoredRows],
        sources: Mapping[str, _EvalSource],
        n_threads: int,
    ) -> None:
        self.names = tuple(parts)
        self.n_bytes = sum(rows.n_bytes for rows in parts.values())
        self.n_targets = sum(rows.n_targets for rows in parts.values())
        self.n_batches = sum(len(source) for source in sources.values())
        self._parts = parts
        self._sources = sources
        self._n_threads = n_threads

    def part(self, name: str) -> "EvalBatches":
        """The batches of one part alone."""
        if name not in self._parts:
            raise ConfigError("part", name, f"one of {', '.join(self.names)}")
        return EvalBatches(
            {name: self._parts[name]}, {name: self._sources[name]}, self._n_threads
        )

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[Batch]:
        for source in self._sources.values():
            reader = BatchReader(source, 0, n_threads=self._n_threads, n_workers=0)
            try:
                yield from reader
            finally:
                reader.close()


def eval_batches(
    config: DataConfig,
    split: str = "valid",
    *,
    reader: int = 0,
    n_readers: int = 1,
    prepared: Prepared | None = None,
    row_ids: AddRows | None = None,
) -> EvalBatches:
    """Batches that score every byte of a split once; the rule is in
    `memjax.data.scoring`.

    Args:
        config: what is read; weights of corpora do not matter here.
        split: `valid`, or, said on purpose, `test` or `train`.
        reader, n_readers: this process and how many there are; eval_batch_size must be
            a multiple of n_readers.
        prepared: result of `prepare(config)`; made here by default.
        row_ids: as in `train_batches`.

    Raises:
        ConfigError: unknown split, reader out of range, eval_batch_size no multiple
            of n_readers, or `hash_on` "host" without row_ids.
        DataError: a part without documents in this split, and all that `prepare`
            raises.
    """
    _check_row_ids(config, row_ids)
    size = config.eval_batch_size
    mine = _rows_of_reader("data.eval_batch_size", size, reader, n_readers)
    parts: dict[str, ScoredRows] = {}
    sources: dict[str, _EvalSource] = {}
    for part in (prepared or prepare(config)).parts:
        store = open_split(part.folder, split)
        if store.n_tokens == 0:
            raise DataError(f"{part.name} has no text in its {split} split")
        rows = ScoredRows(store, context=config.context, stride=config.eval_stride)
        parts[part.name] = rows
        sources[part.name] = _EvalSource(rows, config.context, size, mine, row_ids)
    return EvalBatches(parts, sources, config.n_threads)
