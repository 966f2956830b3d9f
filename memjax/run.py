"""Runs: train, score and sample, each from an experiment or a run folder.

What: `train`, `evaluate`, `evaluate_knn`, `measure_memory`, `sample`, and `load_run`
    and `load_fp8` for a look at the parameters.
Why: one function per command, usable from a notebook as well.
When not: a loop of your own; hand `memjax.train.loop.fit` your functions.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from memjax.build.decoding import decoding
from memjax.build.evaluator import Evaluator
from memjax.build.host_tables import (
    HostReader,
    live_reader,
    on_device,
    open_host_tables,
    saved_reader,
    with_tables,
)
from memjax.build.knn import knn_scores
from memjax.build.parts import Parts
from memjax.build.sizes import check_memory
from memjax.data.cache import cache_root
from memjax.data.pipeline import eval_batches, prepare, train_batches
from memjax.data.state import ForAnyReaders
from memjax.data.tokenizer import load_tokenizer
from memjax.errors import CheckpointError, ConfigError
from memjax.evaluate.generate import generate
from memjax.evaluate.knn import KnnConfig
from memjax.evaluate.memory_health import make_health
from memjax.evaluate.memory_measures import measure
from memjax.experiment import Experiment, config_hash, load_experiment, to_dict
from memjax.models.fp8_tables import fp8_model, quantize_tables, refuse_training
from memjax.models.memories import carried_state
from memjax.models.parameters import cost, merge_variables
from memjax.optim.build import build_optimizer, schedules
from memjax.optim.labels import group_norms
from memjax.parallel.mesh import (
    data_reader,
    global_batch,
    make_mesh,
    mesh_for_reading,
)
from memjax.parallel.processes import agree
from memjax.train.config import RESUMABLE_FIELDS
from memjax.train.host_item import host_folder
from memjax.train.kept_programs import kept_programs
from memjax.train.loop import fit
from memjax.train.restore_params import restore_params
from memjax.train.run_folder import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    open_run_folder,
    write_result,
)
from memjax.train.state import abstract_state

DATASTORE_FOLDER = "datastore"

# What a rerun in the same folder may change: the state keeps its meaning. On another
# mesh, as on other devices, sums round differently; starts.jsonl has both.
MAY_CHANGE = (
    *RESUMABLE_FIELDS,
    "mesh",
    "name",
    "notes",
    "data.n_threads",
    "data.n_workers",
    "data.hash_on",
    "data.cache_dir",
)


def train(
    experiment: Experiment,
    run_dir: str | os.PathLike[str],
    changes: Sequence[str] = (),
) -> dict[str, Any]:
    """Train, or go on training, in `run_dir`.

    Args:
        experiment: validated here, against the devices too.
        run_dir: made when missing; holds another experiment's run: an error.
        changes: how the experiment differs from its file, for the records.

    Returns:
        Plain data: `stopped_by` (None when the run reached its end), `steps`, and for a
        run that ended `valid_bpb`, `valid` ({part: bits per byte}), sizes, seconds,
        tokens, seed, config_hash; the same is then in result.json.
    """
    experiment.validate(jax.device_count())
    refuse_training(experiment.model.memories)
    check_memory(experiment)
    config, data = experiment.train, experiment.data
    mesh = make_mesh(experiment.mesh)
    parts = Parts(experiment, mesh)
    prepared = prepare(data)
    reader, n_readers = data_reader(mesh)
    evaluator = Evaluator(parts, "valid", mesh, prepared)
    rates = schedules(experiment.optim, config.n_steps)
    transform = build_optimizer(experiment.optim, parts.dense_labels, config.n_steps)
    health = make_health(parts.model, parts.loss)
    with (
        kept_programs(config.compilation_cache, cache_root(data.cache_dir)),
        train_batches(
            data,
            reader=reader,
            n_readers=n_readers,
            prepared=prepared,
            row_ids=parts.row_ids,
        ) as batches,
    ):
        agree("data", {**batches.state(), "fingerprint": parts.fingerprint()})
        # Last, so that an error above leaves no folder in the way of the next try.
        folder = open_run_folder(
            run_dir,
            config=to_dict(experiment),
            changes=changes,
            may_change=MAY_CHANGE,
            n_steps=config.n_steps,
        )
        host_tables = open_host_tables(parts, folder)
        if host_tables:
            evaluator.place = live_reader(parts, host_tables)
        result = fit(
            config,
            run_dir=folder,
            mesh=mesh,
            init_params=parts.init_params,
            loss_fn=parts.training_loss,
            transform=transform,
            batches=ForAnyReaders(batches, n_readers),
            eval_fn=evaluator,
            learning_rate=lambda step: {
                group: rate(step) for group, rate in rates.items()
            },
            fingerprint=parts.fingerprint(),
            seed=experiment.seed,
            bytes_per_token=evaluator.bytes_per_token,
            ema=parts.ema,
            tables=parts.tables,
            model_state=parts.model_state,
            host_tables=host_tables,
            placement=parts.placement,
            group_norms=lambda tree: group_norms(tree, parts.dense_labels),
            health_fn=lambda state, batch: health(parts.seen(state), batch),
            notes=carried_state(experiment.model.memories),
        )
    summary: dict[str, Any] = {"stopped_by": result.stopped_by, "steps": result.step}
    if result.final is None:
        return summary
    sizes = cost(experiment.model, data.context)
    summary |= {
        "valid_bpb": result.final["bpb"],
        "valid": _by_part(result.final),
        "best_bpb": result.best_bpb,
        "best_step": result.best_step,
        "train_s": result.train_s,
        "tokens": result.tokens_seen,
        "params_dense": sizes.dense_params,
        "params_table": sizes.table_params,
        "seed": experiment.seed,
        "config_hash": config_hash(experiment),
    }
    if jax.process_index() == 0:
        write_result(folder, summary)
    return summary


def load_run(
    run_dir: str | os.PathLike[str], step: int | None = None
) -> tuple[Parts, Any, int]:
    """A run's experiment, its parameters (averaged when it keeps an average), a step.

    On the run's mesh where that takes as many devices as there are, else in copies on
    all of them. Tables on the host come as tables in mode "rows", on the device, where
    they must fit.

    Args:
        run_dir: a run folder.
        step: which checkpoint; the newest whole one by default.

    Raises:
        CheckpointError: no run, no such checkpoint, or one of another configuration.
        ConfigError: tables on the host that the device has no memory for.
    """
    parts, params, step, reader = _load(run_dir, step)
    if reader is None:
        return parts, params, step
    return on_device(parts), with_tables(params, reader), step


def _load(
    run_dir: str | os.PathLike[str], step: int | None
) -> tuple[Parts, Any, int, HostReader | None]:
    """As `load_run`, with slots in place of tables on the host, and their reader."""
    folder = Path(run_dir)
    if not (folder / CONFIG_FILE).exists():
        raise CheckpointError(f"{folder} is not a run folder: it has no {CONFIG_FILE}")
    experiment = load_experiment(folder / CONFIG_FILE).experiment
    here = mesh_for_reading(experiment.mesh, jax.device_count())
    experiment = replace(experiment, mesh=here)
    mesh = make_mesh(here)
    parts = Parts(experiment, mesh)
    abstract = abstract_state(
        parts.init_params,
        optax.identity(),
        mesh,
        ema=parts.ema,
        tables=parts.tables,
        model_state=parts.model_state,
        placement=parts.placement,
    )
    params, step = restore_params(
        folder / CHECKPOINT_FOLDER,
        abstract,
        parts.fingerprint(),
        ema=parts.ema,
        tables=parts.tables,
        step=step,
    )
    if not parts.host_plans:
        return parts, params, step, None
    saved = host_folder(folder / CHECKPOINT_FOLDER / str(step))
    return parts, params, step, saved_reader(parts, saved)


def load_fp8(
    run_dir: str | os.PathLike[str], step: int | None = None
) -> tuple[Parts, Any, int]:
    """As `load_run`, with the value tables in 8-bit floats; the run is left as it is.

    Raises also:
        ConfigError: tables that are divided, or what `fp8_model` says.
    """
    parts, params, step = load_run(run_dir, step)
    if (size := parts.mesh.shape["table"]) > 1:
        raise ConfigError("mesh.table", size, "1 for tables in FP8")
    model = parts.experiment.model
    experiment = replace(parts.experiment, model=fp8_model(model))
    params = merge_variables(quantize_tables(params, model))
    return Parts(experiment, parts.mesh), params, step


def evaluate(
    run_dir: str | os.PathLike[str],
    split: str = "valid",
    step: int | None = None,
    *,
    fp8: bool = False,
) -> dict[str, Any]:
    """Score a run's checkpoint on a split: `SPLIT_bpb`, `SPLIT` by part, `step`.

    With `fp8`, its value tables are read in 8-bit floats.
    """
    if fp8:
        reader, (parts, params, step) = None, load_fp8(run_dir, step)
    else:
        parts, params, step, reader = _load(run_dir, step)
    evaluator = Evaluator(parts, split, parts.mesh, prepare(parts.experiment.data))
    if reader is not None:
        evaluator.place = reader
    found = evaluator(params)
    return {f"{split}_bpb": found["bpb"], split: _by_part(found), "step": step}


def evaluate_knn(
    run_dir: str | os.PathLike[str],
    split: str = "valid",
    step: int | None = None,
    *,
    config: KnnConfig | None = None,
    rebuild: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Score a run's checkpoint mixed with the nearest neighbours in its training text.

    Args:
        run_dir, split, step: as in `evaluate`.
        config: of the datastore and its use; None: the defaults.
        rebuild, report: as in `memjax.build.knn.knn_scores`, which says what is
            returned and raised, beside `split` and `step` and what `load_run` raises.
    """
    parts, params, step = load_run(run_dir, step)
    found = knn_scores(
        parts,
        params,
        step,
        Path(run_dir) / DATASTORE_FOLDER,
        split,
        config=config or KnnConfig(),
        rebuild=rebuild,
        report=report,
    )
    return {"split": split, "step": step, **found}


def measure_memory(
    run_dir: str | os.PathLike[str],
    split: str = "valid",
    step: int | None = None,
    *,
    order: int = 3,
) -> dict[str, Any]:
    """Usage and trust of the memories of a run's checkpoint over a split.

    Args:
        run_dir, split, step: as in `evaluate`.
        order: n of the n-grams whose frequency in the training text is looked up.

    Returns:
        `split`, `step` and what `memjax.evaluate.memory_measures.measure` says, plain
        data. Nothing is written.

    Raises:
        ConfigError: a run without memories, an order below 1, or several processes.
        CheckpointError: as `load_run`.
    """
    if jax.process_count() > 1:
        raise ConfigError("processes", jax.process_count(), "1: counts are on its host")
    parts, params, step = load_run(run_dir, step)
    data, mesh = parts.experiment.data, parts.mesh
    prepared = prepare(data)
    read: dict[str, Any] = {"prepared": prepared, "row_ids": parts.row_ids}
    with train_batches(data, **read) as batches:
        train_batch = global_batch(mesh, next(batches))
    held_out = eval_batches(data, split, **read)
    found = measure(
        parts.model,
        params,
        (global_batch(mesh, batch) for batch in held_out),
        gradients=parts.gradients,
        train_stores=[prepared.store(part.name, "train") for part in prepared.parts],
        train_batch=train_batch,
        order=order,
    )
    return {"split": split, "step": step, **found}


def sample(
    run_dir: str | os.PathLike[str],
    prompt: bytes = b"",
    *,
    n_tokens: int = 300,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    step: int | None = None,
    fp8: bool = False,
) -> bytes:
    """Text that a run's model writes after `prompt`, until a document ends.

    The prompt is put at the start of a document. Same seed, same text. With `fp8`, the
    value tables are read in 8-bit floats.
    """
    parts, params, _ = (load_fp8 if fp8 else load_run)(run_dir, step)
    data = parts.experiment.data
    tokenizer = load_tokenizer(data.tokenizer)
    ids = np.concatenate([[tokenizer.separator], tokenizer.encode(prompt)])

    def logits_fn(params: Any, tokens_1T: Array, segments_1T: Array) -> Array:
        positions_1T = jnp.arange(tokens_1T.shape[1])[None]
        return parts.logits(
            params,
            {
                "tokens": tokens_1T,
                "segments": segments_1T,
                "positions": positions_1T,
            },
        )

    drawn = generate(
        logits_fn,
        params,
        ids,
        n_tokens=n_tokens,
        context=data.context,
        vocab_size=tokenizer.vocab_size,
        key=jax.random.key(seed),
        temperature=temperature,
        top_k=top_k,
        decoding=decoding(parts, data.context),
    )
    ends = np.flatnonzero(drawn == tokenizer.separator)
    return tokenizer.decode(drawn[: ends[0]] if len(ends) else drawn)


def _by_part(found: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("bpb/"): x for name, x in found.items() if name != "bpb"}
