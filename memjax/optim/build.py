"""From settings and labels to one optax transform.

What: `build_optimizer`, and `schedules` for the rates it applies.
Why: only the labels that occur get a group, so no state is ever empty.
When not: an optimizer of your own; any optax transform fits the training step.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from memjax.errors import ShapeError
from memjax.optim.clip import clip_by_norm
from memjax.optim.config import OptimConfig
from memjax.optim.labels import check_labels, path_name
from memjax.optim.precision import in_float32
from memjax.optim.rate import rate_schedule, scale_by_rate
from memjax.optim.sinkhorn_momentum import sinkhorn_momentum


def schedules(config: OptimConfig, n_steps: int) -> dict[str, Callable[[Any], Any]]:
    """Step -> learning rate for "dense", "embedding", "table" and "table_rule_<i>".

    All have the form of `config.schedule` unless a rule has its own. The rate of
    Sinkhorn momentum is given without its factor gamma.

    Raises:
        ConfigError: warm-up and decay do not fit into n_steps.
    """
    shared = (
        config.learning_rate
        if config.embedding == "dense"
        else config.table_learning_rate
    )
    own = config.embedding_learning_rate
    peaks = {
        "dense": config.learning_rate,
        "embedding": shared if own is None else own,
        "table": config.table_learning_rate,
    }
    forms = {
        name: (config.schedule, config.warmup_steps, peak, "optim")
        for name, peak in peaks.items()
    }
    for i in range(len(config.table_rules)):
        rule = config.table_settings(i)
        form = (rule.schedule, rule.warmup_steps, rule.learning_rate)
        forms[table_group(i)] = (*form, f"optim.table_rules.{i}")
    return {
        group: rate_schedule(
            kind,
            peak,
            n_steps,
            warmup_steps=warmup_steps,
            decay_frac=config.decay_frac,
            end_frac=config.end_frac,
            field=field,
        )
        for group, (kind, warmup_steps, peak, field) in forms.items()
    }


def table_group(i: int | None) -> str:
    """The group of the tables that rule i takes, or of those without a rule."""
    return "table" if i is None else f"table_rule_{i}"


def build_optimizer(
    config: OptimConfig, labels: Any, n_steps: int
) -> optax.GradientTransformation:
    """The transform that trains every labelled parameter.

    First each group's gradient is clipped by its own norm (dense together, tables
    together, those of a table rule together, an embedding under Sinkhorn momentum by
    itself with the tables' limit), then each label goes to its optimizer. Frozen
    parameters count in no norm and get zero updates, decay included.

    Moments and momentum are float32; updates keep the gradient's dtype. With
    Muon the last two axes of a matrix are taken as (in, out) and leading axes as
    stacked layers.

    Args:
        config: the settings; `config.label_rules` must already be in labels
            (`memjax.optim.labels.apply_label_rules`); `ema_decay` belongs to the
            training step.
        labels: tree of str with the structure of the parameters.
        n_steps: length of the run in optimizer steps.

    Raises:
        ConfigError: an unknown label, or a schedule that does not fit.
        ShapeError: at `init`, a table (or a matrix under Muon) of a wrong rank.
    """
    check_labels(labels)
    labels = jax.tree_util.tree_map_with_path(
        lambda path, label: (
            table_group(config.rule_of(path_name(path))) if label == "table" else label
        ),
        labels,
    )
    present = set(jax.tree.leaves(labels))
    rates = schedules(config, n_steps)
    makers = {
        "matrix": lambda: _matrix(config, rates),
        "vector": lambda: _vector(config, rates),
        "embedding": lambda: _embedding(config, rates),
        "frozen": optax.set_to_zero,
    }
    limits = {
        "dense": config.clip_norm,
        "embedding": config.table_clip_norm,
        "frozen": None,
    }
    for i in (None, *range(len(config.table_rules))):
        settings = config.table_settings(i)
        group = table_group(i)
        makers[group] = partial(_table, config, settings.optimizer, rates[group])
        limits[group] = settings.clip_norm
    steps = [
        optax.partition({label: makers[label]() for label in sorted(present)}, labels)
    ]
    groups = jax.tree.map(lambda label: _clip_group(config, label), labels)
    limits = {group: limits[group] for group in set(jax.tree.leaves(groups))}
    if any(limit is not None for limit in limits.values()):
        clips = {
            group: optax.identity() if limit is None else clip_by_norm(limit)
            for group, limit in sorted(limits.items())
        }
        steps.insert(0, optax.partition(clips, groups))
    return optax.chain(*steps)


def _clip_group(config: OptimConfig, label: str) -> str:
    if label == "embedding":
        return "dense" if config.embedding == "dense" else "embedding"
    return label if label.startswith("table") or label == "frozen" else "dense"


def _adamw(
    config: OptimConfig, rate: Any, weight_decay: float
) -> optax.GradientTransformation:
    b1, b2 = config.betas
    return in_float32(
        optax.chain(
            optax.scale_by_adam(b1=b1, b2=b2, eps=config.eps),
            optax.add_decayed_weights(weight_decay),
            scale_by_rate(rate),
        )
    )


def _matrix(config: OptimConfig, rates: Any) -> optax.GradientTransformation:
    if config.optimizer == "adamw":
        return _adamw(config, rates["dense"], config.weight_decay)
    return in_float32(
        optax.contrib.muon(
            learning_rate=rates["dense"],
            beta=config.muon_momentum,
            weight_decay=config.weight_decay,
            consistent_rms=config.muon_rms,
            muon_weight_dimension_numbers=_last_two_axes,
        )
    )


def _last_two_axes(tree: Any) -> Any:
    """Muon's axes of every matrix; a vector under this label is refused by path."""

    def axes(path: Any, leaf: Any) -> Any:
        if jnp.ndim(leaf) < 2:
            raise ShapeError(
                f"parameter {path_name(path)!r} of muon",
                tuple(jnp.shape(leaf)),
                "two or more axes (layers ..., in, out); label it vector",
            )
        return optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)

    return jax.tree_util.tree_map_with_path(axes, tree)


def _vector(config: OptimConfig, rates: Any) -> optax.GradientTransformation:
    return _adamw(config, rates["dense"], 0.0)


def _embedding(config: OptimConfig, rates: Any) -> optax.GradientTransformation:
    if config.embedding == "dense":
        return _adamw(config, rates["embedding"], config.embedding_weight_decay)
    return _sinkhorn(config, rates["embedding"])


def _table(
    config: OptimConfig, optimizer: str, rate: Any
) -> optax.GradientTransformation:
    if optimizer == "sinkhorn_momentum":
        return _sinkhorn(config, rate)
    return in_float32(entrywise_table(config, optimizer, rate))


def entrywise_table(
    config: OptimConfig, optimizer: str, rate: Any
) -> optax.GradientTransformation:
    """The transform "sgd", "adagrad" or, under any other name, Adam of a table."""
    if optimizer == "sgd":
        return scale_by_rate(rate)
    if optimizer == "adagrad":
        # eps stands inside the root there; squared, it means the same as Adam's.
        direction = optax.scale_by_rss(initial_accumulator_value=0.0, eps=config.eps**2)
    else:
        b1, b2 = config.table_betas
        direction = optax.scale_by_adam(b1=b1, b2=b2, eps=config.eps)
    return optax.chain(direction, scale_by_rate(rate))


def _sinkhorn(config: OptimConfig, rate: Any) -> optax.GradientTransformation:
    return sinkhorn_momentum(
        rate, accumulator_dtype="float32", **asdict(config.sinkhorn)
    )
