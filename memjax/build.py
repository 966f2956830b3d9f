"""From an experiment to a run: the only place where all floors meet.

What: describe, train, evaluate and sample, each from an `Experiment` or a run folder.
Why: the floors below are handed functions and do not know each other.
When not: notebooks; they call the ops, layers and transforms directly.
"""

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from memjax.data.pipeline import eval_batches, prepare, train_batches
from memjax.data.tokenizer import load_tokenizer
from memjax.errors import CheckpointError, ConfigError
from memjax.evaluate.bits_per_byte import make_scorer, score, token_nats
from memjax.evaluate.generate import generate
from memjax.evaluate.memory_health import make_health
from memjax.experiment import Experiment, config_hash, load_experiment, to_dict
from memjax.models.language_model import LanguageModel, layouts
from memjax.models.parameters import abstract_params, cost, labels
from memjax.optim.build import build_optimizer, schedules
from memjax.optim.ema import ema_params, init_ema, update_ema
from memjax.optim.labels import apply_label_rules, group_norms
from memjax.parallel.mesh import data_reader, global_batch, make_mesh, replicated
from memjax.train.checkpoint import restore_params
from memjax.train.config import RESUMABLE_FIELDS
from memjax.train.loop import CHECKPOINT_FOLDER, fit
from memjax.train.run_folder import CONFIG_FILE, open_run_folder, write_result
from memjax.train.state import Ema

# What a rerun in the same folder may change: it alters no number of the run. The mesh
# is not among them, since sums over devices round differently.
MAY_CHANGE = (
    *RESUMABLE_FIELDS,
    "name",
    "notes",
    "data.n_threads",
    "data.n_workers",
    "data.cache_dir",
)


@dataclass(frozen=True)
class Parts:
    """The functions of an experiment; cheap to make, nothing is allocated."""

    experiment: Experiment

    @cached_property
    def model(self) -> LanguageModel:
        """The Linen module."""
        return LanguageModel(self.experiment.model)

    @cached_property
    def abstract(self) -> Any:
        """Shapes and dtypes of the parameters."""
        return abstract_params(self.experiment.model)

    @cached_property
    def labels(self) -> Any:
        """The optimizer's label of every parameter, after the user's rules."""
        return apply_label_rules(
            labels(self.abstract), self.abstract, self.experiment.optim.label_rules
        )

    @cached_property
    def ema(self) -> Ema | None:
        """The running average of the dense weights; None when the run keeps none."""
        decay = self.experiment.optim.ema_decay
        if decay is None:
            return None
        return Ema(
            init=lambda params: init_ema(params, self.labels),
            update=lambda ema, params, step: update_ema(ema, params, decay, step),
            merge=ema_params,
        )

    def init_params(self, key: Array) -> Any:
        """Parameters from a typed key; traceable."""
        tokens_11 = jnp.zeros((1, 1), jnp.int32)
        return self.model.init(key, tokens_11)["params"]

    def logits(
        self,
        params: Any,
        batch: dict[str, Array],
        *,
        key: Array | None = None,
        drop_memory: bool = False,
    ) -> Array:
        """[B, T, V]; a key turns dropout on."""
        return self.model.apply(
            {"params": params},
            batch["tokens"],
            batch["segments"],
            batch["positions"],
            train=key is not None,
            drop_memory=drop_memory,
            rngs=None if key is None else {"dropout": key},
        )  # pyright: ignore[reportReturnType]

    def loss(
        self, params: Any, batch: dict[str, Array], key: Array, **options: Any
    ) -> tuple[Array, dict[str, Array]]:
        """Summed nats of the weighted targets, and their summed weight."""
        logits_BTV = self.logits(params, batch, key=key, **options)
        nats_BT = token_nats(logits_BTV, batch["targets"]) * batch["weights"]
        return jnp.sum(nats_BT), {"weight": jnp.sum(batch["weights"])}

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must share beside the shapes: tokens and addressing."""
        model = self.experiment.model
        return {
            "tokenizer": load_tokenizer(self.experiment.data.tokenizer).fingerprint,
            "ngram_layouts": {
                str(layer): layout.fingerprint()
                for layer, layout in layouts(model).items()
            },
        }


def describe(experiment: Experiment) -> dict[str, Any]:
    """Sizes, shapes and costs of an experiment, as plain data. Touches no device."""
    parts = Parts(experiment)
    sizes = cost(experiment.model, experiment.data.context)
    leaves = jax.tree_util.tree_leaves_with_path(parts.abstract)
    return {
        "params_dense": sizes.dense_params,
        "params_table": sizes.table_params,
        "bytes_dense": sizes.dense_bytes,
        "bytes_table": sizes.table_bytes,
        "flops_per_token": sizes.flops_per_token,
        "table_bytes_per_token": sizes.table_bytes_per_token,
        "tokens_per_step": experiment.data.batch_size * experiment.data.context,
        "n_steps": experiment.train.n_steps,
        "shapes": {
            jax.tree_util.keystr(path, simple=True, separator="/"): {
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "label": label,
            }
            for (path, leaf), label in zip(
                leaves, jax.tree.leaves(parts.labels), strict=True
            )
        },
    }


def check_memory(experiment: Experiment) -> None:
    """Raise ConfigError when parameters, gradients and momenta cannot fit in memory.

    Counted: each parameter, its gradient, one float32 momentum for tables, two for
    the rest; against the memory of a device, or of this machine for a CPU. Only what
    is certain not to fit is refused; activations are not counted.
    """
    sizes = cost(experiment.model, experiment.data.context)
    needed = 2 * (sizes.table_bytes + sizes.dense_bytes)
    needed += 4 * sizes.table_params + 8 * sizes.dense_params
    available = _memory_bytes()
    if available is not None and needed > available:
        raise ConfigError(
            "model.memories.rows_per_head",
            tuple(memory.rows_per_head for memory in experiment.model.memories),
            f"training needs at least {needed} bytes ({sizes.table_bytes} of them the "
            f"tables) and {available} are there; use fewer or narrower rows, or "
            "precision.tables = 'bfloat16'",
        )


def _memory_bytes() -> int | None:
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
            return None
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


class Evaluator:
    """Held-out bits per byte of one split; called with parameters.

    Attributes:
        bytes_per_token: bytes of the split per scored target.
    """

    def __init__(self, parts: Parts, split: str, mesh: Any, prepared: Any) -> None:
        reader, n_readers = data_reader(mesh)
        self._batches = eval_batches(
            parts.experiment.data,
            split,
            reader=reader,
            n_readers=n_readers,
            prepared=prepared,
        )
        self._mesh = mesh
        self._scorer = make_scorer(parts.logits)
        self.bytes_per_token = self._batches.n_bytes / self._batches.n_targets

    def __call__(self, params: Any, max_batches: int | None = None) -> dict[str, float]:
        """{"bpb": all parts together, "bpb/PART": each}; max_batches is per part."""
        found: dict[str, float] = {}
        nats, n_bytes = 0.0, 0.0
        for name in self._batches.names:
            part = self._batches.part(name)
            placed = (
                global_batch(self._mesh, batch)
                for batch in itertools.islice(part, max_batches)
            )
            scored = score(self._scorer, params, placed)
            bytes_per_token = part.n_bytes / part.n_targets
            found[f"bpb/{name}"] = scored.bpb(bytes_per_token)
            nats += scored.nats
            n_bytes += scored.n_tokens * bytes_per_token
        return {"bpb": nats / (math.log(2) * n_bytes), **found}


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
    check_memory(experiment)
    parts = Parts(experiment)
    config, data = experiment.train, experiment.data
    folder = open_run_folder(
        run_dir, config=to_dict(experiment), changes=changes, may_change=MAY_CHANGE
    )
    mesh = make_mesh(experiment.mesh)
    prepared = prepare(data)
    reader, n_readers = data_reader(mesh)
    evaluator = Evaluator(parts, "valid", mesh, prepared)
    rates = schedules(experiment.optim, config.n_steps)
    health = make_health(experiment.model, parts.loss)
    with train_batches(
        data, reader=reader, n_readers=n_readers, prepared=prepared
    ) as batches:
        result = fit(
            config,
            run_dir=folder,
            mesh=mesh,
            init_params=parts.init_params,
            loss_fn=parts.loss,
            transform=build_optimizer(experiment.optim, parts.labels, config.n_steps),
            batches=batches,
            eval_fn=evaluator,
            learning_rate=lambda step: {
                group: rate(step) for group, rate in rates.items()
            },
            fingerprint=parts.fingerprint(),
            seed=experiment.seed,
            bytes_per_token=evaluator.bytes_per_token,
            ema=parts.ema,
            group_norms=lambda tree: group_norms(tree, parts.labels),
            health_fn=lambda state, batch: health(state.params, batch),
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

    Args:
        run_dir: a run folder.
        step: which checkpoint; the newest whole one by default.

    Raises:
        CheckpointError: no run, no such checkpoint, or one of another configuration.
    """
    folder = Path(run_dir)
    if not (folder / CONFIG_FILE).exists():
        raise CheckpointError(f"{folder} is not a run folder: it has no {CONFIG_FILE}")
    parts = Parts(load_experiment(folder / CONFIG_FILE).experiment)
    sharding = replicated(make_mesh(parts.experiment.mesh))
    checkpoints, fingerprint = folder / CHECKPOINT_FOLDER, parts.fingerprint()

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    ema = parts.ema
    abstract_ema = None if ema is None else jax.eval_shape(ema.init, parts.abstract)
    params, average, step = restore_params(
        checkpoints,
        placed(parts.abstract),
        fingerprint,
        step=step,
        abstract_ema=placed(abstract_ema),
    )
    if ema is not None:
        params = ema.merge(average, params)
    return parts, params, step


def evaluate(
    run_dir: str | os.PathLike[str], split: str = "valid", step: int | None = None
) -> dict[str, Any]:
    """Score a run's checkpoint on a split: `SPLIT_bpb`, `SPLIT` by part, `step`."""
    parts, params, step = load_run(run_dir, step)
    data = parts.experiment.data
    mesh = make_mesh(parts.experiment.mesh)
    found = Evaluator(parts, split, mesh, prepare(data))(params)
    return {f"{split}_bpb": found["bpb"], split: _by_part(found), "step": step}


def sample(
    run_dir: str | os.PathLike[str],
    prompt: bytes = b"",
    *,
    n_tokens: int = 300,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    step: int | None = None,
) -> bytes:
    """Text that a run's model writes after `prompt`, until a document ends.

    The prompt is put at the start of a document. Same seed, same text.
    """
    parts, params, _ = load_run(run_dir, step)
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
    )
    ends = np.flatnonzero(drawn == tokenizer.separator)
    return tokenizer.decode(drawn[: ends[0]] if len(ends) else drawn)


def _by_part(found: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("bpb/"): x for name, x in found.items() if name != "bpb"}
