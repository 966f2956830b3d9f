"""The optimizer of tables by rows from settings: every setting reaches its tables."""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.ops.row_gradient import RowGradient
from memjax.ops.rows import load, store
from memjax.optim.build import build_optimizer, schedules
from memjax.optim.build_tables import build_table_optimizer, check_table_settings
from memjax.optim.config import (
    ROW_TABLE_OPTIMIZERS,
    OptimConfig,
    SinkhornConfig,
    TableRule,
)

CONSTANT = OptimConfig(
    schedule="constant",
    table_learning_rate=0.1,
    sinkhorn=SinkhornConfig(n_iterations=3),
)
LABELS = {"a/table": "table", "b/table": "table", "c/table": "frozen"}
N_ROWS = dict.fromkeys(LABELS, 11)


def tables_of(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return {
        name: {"table": store(jnp.asarray(rng.standard_normal((11, 4)), dtype))}
        for name in "abc"
    }


def trained(config, dtype=jnp.float32, n_updates=2, n_steps=100, labels=LABELS):
    """Tables (as numbers), state and metrics after some steps of all-row gradients."""
    optimizer = build_table_optimizer(
        config, labels, n_steps, reads=dict.fromkeys(labels, 3), n_rows=N_ROWS
    )
    tables = tables_of(dtype)
    state = optimizer.init(tables)
    apply = jax.jit(optimizer.apply)
    for seed in range(n_updates):
        rng = np.random.default_rng(seed + 1)
        ids = jnp.asarray(rng.permutation(11)[:7, None], jnp.int32)
        grads = {
            path: (
                RowGradient(
                    ids, None, jnp.asarray(rng.standard_normal((7, 4)), jnp.float32)
                ),
            )
            for path in labels
        }
        tables, state, metrics = apply(grads, state, tables)
    values = {name: np.asarray(load(t["table"])) for name, t in tables.items()}
    return values, state, metrics, optimizer


def changed(one, other):
    return {name for name in one if np.any(one[name] != other[name])}


BOTH = {"a", "b"}
CHANGES = [
    ({}, {"table_optimizer": "lazy_adam"}, BOTH),
    ({}, {"table_optimizer": "sinkhorn_touched_rows"}, BOTH),
    ({"table_optimizer": "lazy_adam"}, {"table_betas": (0.5, 0.9)}, BOTH),
    ({"table_optimizer": "lazy_adam"}, {"eps": 0.1}, BOTH),
    ({"table_optimizer": "adagrad"}, {"eps": 0.1}, BOTH),
    ({}, {"table_learning_rate": 0.2}, BOTH),
    ({}, {"schedule": "cosine"}, BOTH),
    ({}, {"warmup_steps": 5}, BOTH),
    ({"table_optimizer": "sgd"}, {"table_clip_norm": 0.5}, BOTH),
    ({}, {"table_rules": (TableRule(pattern="a/", learning_rate=0.2),)}, {"a"}),
    ({}, {"table_rules": (TableRule(pattern="b/", optimizer="sgd"),)}, {"b"}),
    ({}, {"table_rules": (TableRule(pattern="a/", schedule="cosine"),)}, {"a"}),
    ({}, {"table_rules": (TableRule(pattern="a/", warmup_steps=9),)}, {"a"}),
    (
        {"table_optimizer": "sgd"},
        {"table_rules": (TableRule(pattern="b/", clip_norm=0.5),)},
        {"b"},
    ),
]


@pytest.mark.parametrize(("base", "change", "want"), CHANGES)
def test_every_setting_moves_exactly_its_tables(base, change, want):
    config = replace(CONSTANT, **base)
    got = changed(trained(config)[0], trained(replace(config, **change))[0])
    assert got == want


def test_the_list_of_rule_settings_is_complete():
    used = {
        f.name
        for _, change, _ in CHANGES
        for rule in change.get("table_rules", ())
        for f in fields(TableRule)
        if getattr(rule, f.name) is not None
    }
    assert used == {f.name for f in fields(TableRule)}


def test_p14_a_frozen_table_stays_bit_equal():
    """P14: frozen means frozen, whatever its gradient."""
    before = {n: np.asarray(t["table"]) for n, t in tables_of().items()}
    values, state, _, _ = trained(CONSTANT, n_updates=10)
    assert changed(before, values) == BOTH
    assert set(state) == {"a/table", "b/table"}


def test_tables_of_one_rule_are_clipped_together():
    config = replace(CONSTANT, table_optimizer="sgd", table_clip_norm=0.5)
    before = {n: np.asarray(t["table"]) for n, t in tables_of().items()}
    after, _, metrics, _ = trained(config, n_updates=1)
    moved = np.sqrt(sum(np.sum((after[n] - before[n]) ** 2) for n in "ab"))
    assert moved == pytest.approx(0.1 * 0.5, rel=1e-5)
    assert float(metrics["grad_norm/a/table"]) > 0.5


def test_capacity_running_mean_and_rounding_reach_the_optimizer():
    # 48 for each of the 3 rows read is more than the 11 rows there are.
    assert trained(CONSTANT)[1]["a/table"].ids_A.shape == (11,)
    state = trained(replace(CONSTANT, table_capacity=5))[1]["a/table"]
    assert state.ids_A.shape == (5,) and int(state.overflow_steps) > 0

    config = replace(CONSTANT, table_ema_decay=0.5)
    values, state, _, optimizer = trained(config)
    tables = {n: {"table": jnp.asarray(v)} for n, v in values.items()}
    means = optimizer.mean(tables, state)
    assert np.abs(means["a"]["table"] - values["a"]).max() > 1e-3
    np.testing.assert_array_equal(means["c"]["table"], values["c"])

    random = replace(CONSTANT, table_stochastic_rounding=True)
    nearest = trained(CONSTANT, jnp.bfloat16)[0]
    assert changed(nearest, trained(random, jnp.bfloat16)[0]) == BOTH


def test_rates_of_rules_are_reported():
    rule = TableRule(pattern="a/", learning_rate=0.5, schedule="constant")
    rates = schedules(replace(CONSTANT, table_rules=(rule,)), 10)
    assert float(rates["table_rule_0"](3)) == 0.5
    assert float(rates["table"](3)) == pytest.approx(0.1)


def test_a_rule_that_does_not_fit_the_run_is_named():
    rule = TableRule(pattern="a/", schedule="cosine", warmup_steps=20)
    with pytest.raises(ConfigError, match="optim.table_rules.0.warmup_steps = 20"):
        schedules(replace(CONSTANT, table_rules=(rule,)), 10)


def test_rules_reach_dense_tables_too():
    rule = TableRule(pattern="a", optimizer="sgd", clip_norm=0.5, learning_rate=1.0)
    config = replace(CONSTANT, table_rules=(rule,))
    params = {"a": jnp.ones((5, 2)), "b": jnp.ones((5, 2))}
    transform = build_optimizer(config, {"a": "table", "b": "table"}, 10)
    grads = jax.tree.map(lambda p: 3 * p, params)
    updates, _ = transform.update(grads, transform.init(params), params)
    assert float(jnp.linalg.norm(updates["a"])) == pytest.approx(0.5, rel=1e-5)
    rms = float(jnp.sqrt(jnp.mean(updates["b"] ** 2)))
    assert rms == pytest.approx(0.18 * 0.1, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "dense", "rows", "message"),
    [
        ({"table_optimizer": "adam"}, [], ["t"], "table_optimizer = 'adam'.*lazy_adam"),
        ({"table_optimizer": "lazy_adam"}, ["t"], [], "'lazy_adam'.*'dense'"),
        (
            {"table_rules": (TableRule(pattern="t", optimizer="adam"),)},
            [],
            ["t"],
            "table_rules.0.optimizer = 'adam'",
        ),
        (
            {"table_rules": (TableRule(pattern="x"),)},
            [],
            ["t"],
            "rules.0.pattern = 'x'",
        ),
        ({"table_capacity": 5}, ["t"], [], "table_capacity = 5"),
        ({"table_ema_decay": 0.5}, ["t"], [], "table_ema_decay = 0.5"),
        ({"table_stochastic_rounding": True}, [], ["t"], "tables of float32"),
        (
            {"table_capacity": 5, "table_optimizer": "adagrad"},
            [],
            ["t"],
            "table_capacity = 5.*'sinkhorn_momentum'",
        ),
        (
            {"sinkhorn": SinkhornConfig(beta=0.0)},
            [],
            ["t"],
            r"optim\.sinkhorn\.beta = 0",
        ),
    ],
)
def test_settings_that_nothing_reads_are_refused(change, dense, rows, message):
    config = replace(CONSTANT, **change)
    with pytest.raises(ConfigError, match=message):
        check_table_settings(config, dense, dict.fromkeys(rows, "table"))


@pytest.mark.parametrize(
    "change", [{"table_capacity": 5}, {"table_ema_decay": 0.5}], ids=str
)
def test_a_frozen_table_reads_no_settings_of_rows(change):
    config = replace(CONSTANT, **change)
    with pytest.raises(ConfigError, match=next(iter(change))):
        check_table_settings(config, [], {"t": "frozen"})
    check_table_settings(config, [], {"t": "frozen", "u": "table"})


def test_a_table_by_rows_has_no_other_label():
    with pytest.raises(ConfigError, match="label of t = 'matrix'"):
        check_table_settings(CONSTANT, [], {"t": "matrix"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": "("}, r"table_rules.0.pattern = '\('"),
        ({"optimizer": "adamax"}, "table_rules.0.optimizer = 'adamax'"),
        ({"schedule": "step"}, "table_rules.0.schedule = 'step'"),
        ({"learning_rate": -1.0}, "table_rules.0.learning_rate = -1.0"),
        ({"clip_norm": -1.0}, "table_rules.0.clip_norm = -1.0"),
        ({"warmup_steps": -1}, "table_rules.0.warmup_steps = -1"),
    ],
)
def test_bad_rules_are_refused(change, message):
    rule = TableRule(**{"pattern": "t", **change})
    with pytest.raises(ConfigError, match=message):
        OptimConfig(table_rules=(rule,))
    with pytest.raises(ConfigError, match="table_capacity = 0"):
        OptimConfig(table_capacity=0)
    with pytest.raises(ConfigError, match="table_ema_decay = 1.0"):
        OptimConfig(table_ema_decay=1.0)


def test_every_optimizer_by_rows_can_be_built():
    for name in ROW_TABLE_OPTIMIZERS:
        optimizer = build_table_optimizer(
            replace(CONSTANT, table_optimizer=name),
            {"a/table": "table"},
            10,
            reads={"a/table": 3},
            n_rows=N_ROWS,
        )
        assert set(optimizer.init({"a": tables_of()["a"]})) == {"a/table"}
