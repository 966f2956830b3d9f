"""kNN-LM of an experiment: its datastore, and held-out scores of the mixture.

What: `knn_scores`: builds the datastore of a checkpoint, or opens it, and scores.
Why: a datastore belongs to one checkpoint and one text; here both are known.
When not: pieces of it in a notebook; `evaluate.knn` has the functions.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from memjax.build.parts import Parts
from memjax.data.pipeline import eval_batches, prepare
from memjax.errors import ConfigError
from memjax.evaluate.datastore import open_datastore
from memjax.evaluate.knn import (
    KnnConfig,
    build_datastore,
    entries_by_part,
    params_sha256,
    score_knn,
)
from memjax.evaluate.knn_keys import make_key_forward
from memjax.experiment import config_hash
from memjax.parallel.mesh import global_batch


def knn_scores(
    parts: Parts,
    params: Any,
    step: int,
    folder: Path,
    split: str,
    *,
    config: KnnConfig,
    rebuild: bool = False,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Scores of a checkpoint with neighbours from the train split.

    Args:
        parts: with a mesh; params, step: of its checkpoint.
        folder: the datastore; built when it is not there, and left for the next call.
        split: what is scored.
        rebuild: build it anew, whatever stands there.
        report: told what is being done.

    Returns:
        See `evaluate.knn.score_knn`.

    Raises:
        ConfigError: several processes, or a key that the model does not have.
        CheckpointError: the datastore is that of another checkpoint, text or setting.
        DataError: it is damaged or cannot be written; see `write_datastore`.
    """
    if jax.process_count() > 1:
        raise ConfigError("processes", jax.process_count(), "1: a datastore is on disk")
    experiment = parts.experiment
    prepared = prepare(experiment.data)
    forward = make_key_forward(parts.model, config.key)
    held_out, train = (
        eval_batches(experiment.data, name, prepared=prepared, row_ids=parts.row_ids)
        for name in (split, "train")
    )
    quotas = entries_by_part(train, config.n_tokens)
    about = {
        "model": {
            "config": config_hash(experiment),
            "step": step,
            "parameters": params_sha256(params),
        },
        "text": {
            name: {
                "train": prepared.store(name, "train").fingerprint,
                "n_tokens": quota,
            }
            for name, quota in quotas.items()
        },
        "key": config.key,
        "key_dtype": config.key_dtype,
    }

    def place(batch: Any) -> Any:
        return global_batch(parts.mesh, batch)

    if rebuild or not folder.exists():
        report(f"building {folder}: {sum(quotas.values())} tokens")
        build_datastore(
            folder,
            about,
            forward,
            params,
            train,
            config=config,
            width=experiment.model.d_model,
            vocab_size=experiment.model.vocab_size,
            place=place,
        )
    return score_knn(
        open_datastore(folder, about),
        forward,
        params,
        held_out,
        config=config,
        place=place,
        report=report,
    )
