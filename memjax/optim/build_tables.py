"""From settings to the optimizer of the tables in mode "rows".

What: `build_table_optimizer`, and `check_table_settings` for what spans both modes.
Why: which table gets which rule is decided once, by path, before anything runs.
When not: tables in mode "dense" are parameters; `build_optimizer` trains those.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from memjax.errors import ConfigError
from memjax.optim.build import entrywise_table, schedules, table_group
from memjax.optim.config import (
    DENSE_TABLE_OPTIMIZERS,
    ROW_TABLE_OPTIMIZERS,
    OptimConfig,
)
from memjax.optim.row_write import RowWriter
from memjax.optim.sinkhorn_rows import sinkhorn_rows
from memjax.optim.sinkhorn_touched_rows import sinkhorn_touched_rows
from memjax.optim.table_optimizer import TableOptimizer, rowwise
from memjax.optim.tables import TableGroup, TablesOptimizer, table_optimizer
from memjax.parallel.row_sharding import RowSharding

# Rows in motion per row read in a step: byte n-grams of orders 3 to 6 had 31 to 40.
CAPACITY_PER_READ = 48


def check_table_settings(
    config: OptimConfig,
    dense: Sequence[str],
    rows: Mapping[str, str],
    tables_dtype: str = "float32",
) -> None:
    """Raise ConfigError for settings of tables that nothing would read.

    Args:
        config: the settings.
        dense: paths of the tables in mode "dense".
        rows: {path: label} of those in mode "rows".
        tables_dtype: dtype name of the tables.
    """
    trained = [path for path, label in rows.items() if label == "table"]
    paths = [*dense, *trained]
    for i, rule in enumerate(config.table_rules):
        if not any(config.rule_of(path) == i for path in paths):
            raise ConfigError(
                f"optim.table_rules.{i}.pattern",
                rule.pattern,
                f"one that takes a table, after the rules before it; tables: {paths}",
            )
    for mode, found, allowed in (
        ("dense", dense, DENSE_TABLE_OPTIMIZERS),
        ("rows", list(rows), ROW_TABLE_OPTIMIZERS),
    ):
        for path in found:
            i = config.rule_of(path)
            optimizer = config.table_settings(i).optimizer
            field = "optim.table_optimizer"
            if i is not None and config.table_rules[i].optimizer is not None:
                field = f"optim.table_rules.{i}.optimizer"
            if optimizer not in allowed:
                raise ConfigError(
                    field, optimizer, f"one of {allowed} for {path} in mode '{mode}'"
                )
    for path, label in rows.items():
        if label not in ("table", "frozen"):
            raise ConfigError(
                f"label of {path}", label, "'table' or 'frozen' in mode 'rows'"
            )
    by_sinkhorn = [
        path
        for path in trained
        if config.table_settings(config.rule_of(path)).optimizer == "sinkhorn_momentum"
    ]
    if by_sinkhorn and config.sinkhorn.beta == 0:
        raise ConfigError(
            "optim.sinkhorn.beta",
            config.sinkhorn.beta,
            f"above 0 for {by_sinkhorn} in mode 'rows'; without momentum "
            "table_optimizer 'sinkhorn_touched_rows' is the same",
        )
    kept = "the default without a trained table in mode 'rows'"
    of_rows = {
        "table_capacity": (None, by_sinkhorn, f"{kept} and 'sinkhorn_momentum'"),
        "table_ema_decay": (None, trained, kept),
        "table_stochastic_rounding": (False, trained, kept),
    }
    for field, (default, readers, allowed) in of_rows.items():
        given = getattr(config, field)
        if given != default and not readers:
            raise ConfigError(f"optim.{field}", given, allowed)
    if config.table_stochastic_rounding and tables_dtype == "float32":
        raise ConfigError(
            "optim.table_stochastic_rounding", True, "False for tables of float32"
        )


def build_table_optimizer(
    config: OptimConfig,
    labels: Mapping[str, str],
    n_steps: int,
    *,
    reads: Mapping[str, int],
    n_rows: Mapping[str, int],
    sharding: RowSharding | None = None,
    seed: int = 0,
    on_host: Mapping[str, int] | None = None,
    kernels: Mapping[str, str] | None = None,
) -> TablesOptimizer:
    """The optimizer of the tables in mode "rows".

    Args:
        config: the settings (see `check_table_settings`).
        labels: {path: "table" or "frozen"}.
        n_steps: length of the run in optimizer steps.
        reads: {path: rows read in a step}, for the default capacity.
        n_rows: {path: rows without padding}.
        sharding: how the tables are divided.
        seed: of stochastic rounding.
        on_host: {path: most distinct rows of a step} of tables that are not on the
            device; they are clipped apart from the others.
        kernels: {path: program that sums gradients by row}, as in `table_optimizer`.
    """
    on_host = on_host or {}
    writer = RowWriter(
        stochastic_rounding=config.table_stochastic_rounding,
        seed=seed,
        ema_decay=config.table_ema_decay,
    )
    rates = schedules(config, n_steps)
    members: dict[tuple[int | None | str, bool], list[str]] = {}
    for path, label in labels.items():
        key = "frozen" if label == "frozen" else config.rule_of(path)
        members.setdefault((key, path in on_host), []).append(path)
    groups = []
    for (key, held), paths in members.items():
        pattern = "^(?:" + "|".join(re.escape(path) for path in paths) + ")$"
        if isinstance(key, str):
            groups.append(TableGroup(pattern, None))
            continue
        settings = config.table_settings(key)
        capacity = config.table_capacity
        if capacity is None:
            capacity = CAPACITY_PER_READ * max(reads[path] for path in paths)
        rate = rates[table_group(key)]
        held_reads = max(on_host[path] for path in paths) if held else None
        optimizer = _optimizer(
            config, settings.optimizer, rate, capacity, writer, held_reads
        )
        groups.append(TableGroup(pattern, optimizer, settings.clip_norm))
    return table_optimizer(groups, sharding=sharding, n_rows=n_rows, kernels=kernels)


def _optimizer(
    config: OptimConfig,
    name: str,
    rate: Any,
    capacity: int,
    writer: RowWriter,
    held_reads: int | None,
) -> TableOptimizer:
    sinkhorn = asdict(config.sinkhorn)
    if name == "sinkhorn_momentum":
        return sinkhorn_rows(
            rate, capacity=capacity, writer=writer, held_reads=held_reads, **sinkhorn
        )
    if name == "sinkhorn_touched_rows":
        return sinkhorn_touched_rows(rate, writer=writer, **sinkhorn)
    return rowwise(entrywise_table(config, name, rate), writer=writer)
