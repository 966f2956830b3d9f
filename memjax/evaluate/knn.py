"""kNN-LM over a trained model: its datastore, and held-out scores of the mixture.

What: `KnnConfig`; `build_datastore` from training text; `score_knn`, which scores a
    split by the model alone, the neighbours alone and mixtures of both.
Why: what a memory of the whole training text would give says what there is to gain.
When not: the mathematics (ops.knn), the files (datastore) or the search (knn_search).
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from memjax.data.pipeline import Batch, EvalBatches
from memjax.errors import ConfigError
from memjax.evaluate.datastore import KEY_DTYPES, Datastore, write_datastore
from memjax.evaluate.knn_keys import KEYS
from memjax.evaluate.knn_search import INDEXES, exact_search, faiss_search
from memjax.ops.knn import interpolate, target_log_probs

logger = logging.getLogger(__name__)
Forward = Callable[[Any, Batch], tuple[Any, Any]]
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class KnnConfig:
    """Settings of a datastore and of its use.

    Attributes:
        k: neighbours of a token. The paper has 1024.
        lambdas: shares of the neighbours to be tried, each in [0, 1]. The paper's is
            0.25.
        temperature: distances are divided by it; the paper has none, that is 1.
        n_tokens: entries of the datastore; None: all of the training text. Each corpus
            gives the beginning of its text, in proportion to its size.
        key: which hidden state; one of `knn_keys.KEYS`.
        key_dtype: how keys are stored, "float16" or "float32".
        index: "exact", or "faiss" (the extra `knn`).
        probe: lists that faiss looks into; see `knn_search.faiss_search`.
    """

    k: int = 64
    lambdas: tuple[float, ...] = (0.25,)
    temperature: float = 1.0
    n_tokens: int | None = None
    key: str = "feed_forward"
    key_dtype: str = "float16"
    index: str = "exact"
    probe: int = 8

    def __post_init__(self) -> None:
        for field in ("k", "probe", "n_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"knn.{field}", value, "an integer >= 1")
        if not self.lambdas or not all(0 <= lam <= 1 for lam in self.lambdas):
            raise ConfigError("knn.lambdas", self.lambdas, "one or more in [0, 1]")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(
                "knn.temperature", self.temperature, "a finite number > 0"
            )
        choices = {"key": KEYS, "key_dtype": KEY_DTYPES, "index": INDEXES}
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ConfigError(
                    f"knn.{field}", getattr(self, field), f"one of {allowed}"
                )


def params_sha256(params: Any) -> str:
    """A hash of all parameters: paths, dtypes, shapes and bits.

    Rows that pad a divided table count, so it may differ with the number of devices.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        name = jax.tree_util.keystr(path)
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def entries_by_part(train: EvalBatches, n_tokens: int | None) -> dict[str, int]:
    """How many entries each corpus gives, in proportion to its text."""
    sizes = {name: train.part(name).n_targets for name in train.names}
    total = sum(sizes.values())
    wanted = total if n_tokens is None else min(n_tokens, total)
    found, seen, given = {}, 0, 0
    for name, size in sizes.items():
        seen += size
        upto = wanted * seen // total
        found[name], given = upto - given, upto
    return found


def build_datastore(
    folder: Path,
    about: Mapping[str, Any],
    forward: Forward,
    params: Any,
    train: EvalBatches,
    *,
    config: KnnConfig,
    width: int,
    vocab_size: int,
    place: Callable[[Batch], Any] = lambda batch: batch,
) -> None:
    """One entry for each token of the training text: the state before it, and itself.

    Args:
        folder: where it shall be; a datastore there is replaced.
        about: of which model and text; see `datastore.open_datastore`.
        forward: of `knn_keys.make_key_forward`.
        train: evaluation batches of the train split: each token is a target once, with
            the context that evaluation gives it.
        width: D of a key.
        place: puts a batch on the device.

    Raises:
        As `datastore.write_datastore`.

    Cost: a forward pass over the text; (2 or 4) * D + (2 or 4) bytes on disk per entry.
    """
    quotas = entries_by_part(train, config.n_tokens)

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for name, left in quotas.items():
            if left == 0:
                continue
            for batch, keys, _ in _forwarded(forward, params, train, name, place):
                values = batch["targets"][batch["weights"] > 0][:left]
                yield keys[: len(values)], values
                left -= len(values)
                if left == 0:
                    break

    write_datastore(
        folder,
        about,
        chunks(),
        n_entries=sum(quotas.values()),
        width=width,
        vocab_size=vocab_size,
        key_dtype=config.key_dtype,
    )


def score_knn(
    datastore: Datastore,
    forward: Forward,
    params: Any,
    held_out: EvalBatches,
    *,
    config: KnnConfig,
    place: Callable[[Batch], Any] = lambda batch: batch,
    report: Report = logger.info,
) -> dict[str, Any]:
    """Bits per byte of the model, of the neighbours and of their mixtures.

    Args:
        datastore: of the same model.
        forward, params, place: as in `build_datastore`.
        held_out: evaluation batches of another split.
        report: told how large each search is.

    Returns:
        Plain data: k, temperature, key, index, n_entries, n_targets; in_neighbours, the
        share of the targets that some neighbour holds; lm, knn, and mixtures, a list
        with "lambda": each with bpb over all parts and parts {name: bpb}. knn is
        infinite unless in_neighbours is 1.

    Cost: a forward pass and a search; on the host 4 * D + 8 * K bytes for each target
        of a part.
    """
    shares = (0.0, 1.0, *config.lambdas)
    nats = np.zeros((len(held_out.names), len(shares)))
    n_held = 0
    for row, name in enumerate(held_out.names):
        keys, targets, lm = _scored(forward, params, held_out, name, place)
        report(f"{name}: {len(targets)} tokens, {len(datastore)} entries to search")
        found = _search(datastore, keys, config, report)
        # A missing neighbour's entry is -1; its value counts for nothing.
        values = datastore.values[np.maximum(found.entries, 0)].astype(np.int32)
        knn = target_log_probs(found.distances, values, targets, config.temperature)
        knn = np.asarray(knn)
        n_held += int(np.sum(knn > -np.inf))
        for column, lam in enumerate(shares):
            mixed = np.asarray(interpolate(-lm, knn, lam), np.float64)
            nats[row, column] = -np.sum(mixed)
    n_bytes = np.array([held_out.part(name).n_bytes for name in held_out.names])

    def figures(column: int) -> dict[str, Any]:
        bits = nats[:, column] / math.log(2)
        parts = dict(zip(held_out.names, (bits / n_bytes).tolist(), strict=True))
        return {"bpb": float(bits.sum() / n_bytes.sum()), "parts": parts}

    return {
        "k": config.k,
        "temperature": config.temperature,
        "key": config.key,
        "key_dtype": config.key_dtype,
        "index": config.index,
        "n_entries": len(datastore),
        "n_targets": held_out.n_targets,
        "in_neighbours": n_held / held_out.n_targets,
        "lm": figures(0),
        "knn": figures(1),
        "mixtures": [
            {"lambda": lam, **figures(column)}
            for column, lam in enumerate(config.lambdas, start=2)
        ],
    }


def _search(
    datastore: Datastore, keys: np.ndarray, config: KnnConfig, report: Report
) -> Any:
    if config.index == "faiss":
        return faiss_search(datastore, keys, config.k, probe=config.probe)
    return exact_search(datastore, keys, config.k, report=report)


def _forwarded(
    forward: Forward,
    params: Any,
    batches: EvalBatches,
    part: str,
    place: Callable[[Batch], Any],
) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
    """(batch, keys [N, D], nats [N]) of the scored targets of one part."""
    for batch in batches.part(part):
        scored = batch["weights"] > 0
        keys, nats = jax.device_get(forward(params, place(batch)))
        yield batch, keys[scored], nats[scored]


def _scored(
    forward: Forward, params: Any, batches: EvalBatches, part: str, place: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys, targets and nats of all scored targets of one part."""
    keys, targets, nats = [], [], []
    for batch, found, losses in _forwarded(forward, params, batches, part, place):
        keys.append(found)
        targets.append(batch["targets"][batch["weights"] > 0])
        nats.append(losses)
    return np.concatenate(keys), np.concatenate(targets), np.concatenate(nats)
