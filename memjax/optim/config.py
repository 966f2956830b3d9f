"""Settings of the optimizer: plain data, checked when they are made.

What: `OptimConfig`, and `SinkhornConfig` for the tables inside it.
Why: a run is described by values that print, compare and travel as JSON.
When not: a schedule or transform of your own; hand that to the loop yourself.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memjax.errors import ConfigError
from memjax.ops.sinkhorn import check_balance_arguments
from memjax.optim.rate import SCHEDULES

LABELS = ("table", "matrix", "vector", "embedding", "frozen")
OPTIMIZERS = ("adamw", "muon")
DENSE_TABLE_OPTIMIZERS = ("sinkhorn_momentum", "adam", "adagrad", "sgd")
ROW_TABLE_OPTIMIZERS = (
    "sinkhorn_momentum",
    "sinkhorn_touched_rows",
    "lazy_adam",
    "adagrad",
    "sgd",
)
TABLE_OPTIMIZERS = tuple(dict.fromkeys(DENSE_TABLE_OPTIMIZERS + ROW_TABLE_OPTIMIZERS))
EMBEDDING_OPTIMIZERS = ("dense", "sinkhorn_momentum")


@dataclass(frozen=True, kw_only=True)
class SinkhornConfig:
    """Settings of `sinkhorn_momentum`; defaults are those of arXiv:2609.19969.

    Attributes:
        beta: decay of the momentum, 0 <= beta < 1.
        n_iterations: normalisations per step, odd.
        tau: rows at or below tau times the mean row norm are left alone.
        eps: added to every norm.
        gamma: RMS of a row's update at learning rate 1.
        norm: "l2" or "l1".
    """

    beta: float = 0.95
    n_iterations: int = 11
    tau: float = 1e-3
    eps: float = 1e-20
    gamma: float = 0.18
    norm: str = "l2"

    def __post_init__(self) -> None:
        path = "optim.sinkhorn"
        _check_number(f"{path}.beta", self.beta, 0, 1)
        _check_number(f"{path}.tau", self.tau, 0)
        _check_number(f"{path}.eps", self.eps, 0)
        _check_number(f"{path}.gamma", self.gamma, 0)
        check_balance_arguments(
            n_iterations=self.n_iterations, norm=self.norm, field=path
        )


@dataclass(frozen=True, kw_only=True)
class TableRule:
    """Settings of some tables; None takes that of all tables.

    Attributes:
        pattern: regular expression, searched in the path of a table
            ("block_1/memory/table"); the first rule that is found takes it.
        optimizer, learning_rate, clip_norm: as `table_optimizer`,
            `table_learning_rate` and `table_clip_norm` of `OptimConfig`. The tables of
            a rule are clipped together, apart from the others.
        schedule, warmup_steps: as in `OptimConfig`.
    """

    pattern: str
    optimizer: str | None = None
    learning_rate: float | None = None
    clip_norm: float | None = None
    schedule: str | None = None
    warmup_steps: int | None = None


class TableSettings(NamedTuple):
    """What holds for a table once its rule is known; fields as in `TableRule`."""

    optimizer: str
    learning_rate: float
    clip_norm: float | None
    schedule: str
    warmup_steps: int


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """How every kind of parameter is trained.

    Parameters carry a label: "matrix" (weights inside blocks), "vector" (gains,
    biases, scalars), "embedding" (token embedding and output head), "table"
    (value tables of a memory) or "frozen". Dense means matrix, vector and, with
    embedding="dense", embedding.

    Attributes:
        optimizer: "adamw", or "muon" for matrices with AdamW for the other dense.
        learning_rate: peak rate of the dense weights.
        betas: decay of AdamW's two moments.
        eps: added to the root of the second moment (AdamW, table Adam, Adagrad).
        weight_decay: decoupled decay of matrices; vectors and tables have none.
        embedding_weight_decay: the same for a dense embedding.
        muon_momentum: momentum of Muon (with Nesterov).
        muon_rms: RMS of a Muon update at rate 1, so that AdamW's rates carry over
            (arXiv:2502.16982); None for sqrt(max(1, fan_out / fan_in)) instead.
        clip_norm: largest global norm of the dense gradient; None leaves it.
        schedule: "cosine", "wsd" or "constant", for every rate.
        warmup_steps: linear warm-up, in steps.
        decay_frac: part of the run that "wsd" spends falling.
        end_frac: last rate as a part of the peak ("cosine", "wsd").
        table_optimizer: for tables in mode "dense" one of "sinkhorn_momentum", "adam"
            (a row that is no longer read keeps moving), "adagrad", "sgd"; in mode
            "rows" one of "sinkhorn_momentum" (exact, at the cost of the active rows),
            "sinkhorn_touched_rows" (rows of the step only: another, worse optimizer),
            "lazy_adam" (rows that were not read stand still), "adagrad", "sgd".
        table_learning_rate: peak rate of the tables.
        table_betas: decay of the two moments of table Adam.
        table_clip_norm: largest norm of the gradient of tables, those of a mode and of
            a rule together; None leaves it.
        table_rules: other settings for some tables.
        table_capacity: rows that Sinkhorn momentum in mode "rows" keeps in motion
            without a pass over the table; None takes 48 for every row read in a step,
            or all rows of the table when they are fewer.
        table_ema_decay: decay of the running mean of tables in mode "rows", which
            evaluations then use; None keeps none.
        table_stochastic_rounding: round bfloat16 tables in mode "rows" up or down at
            random, right on average.
        sinkhorn: settings of sinkhorn_momentum, for tables and embedding alike.
        embedding: "dense", or "sinkhorn_momentum" as arXiv:2609.19969 does.
        embedding_learning_rate: peak rate of the embedding; None takes the rate of
            the optimizer it shares, learning_rate or table_learning_rate.
        ema_decay: decay of the running mean of dense weights; None keeps none.
        label_rules: pairs (regular expression, label); the first one that is found
            in a parameter's path ("blocks/attention/query") replaces its label.
    """

    optimizer: str = "adamw"
    learning_rate: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    embedding_weight_decay: float = 0.0
    muon_momentum: float = 0.95
    muon_rms: float | None = 0.2
    clip_norm: float | None = 1.0
    schedule: str = "cosine"
    warmup_steps: int = 0
    decay_frac: float = 0.2
    end_frac: float = 0.1
    table_optimizer: str = "sinkhorn_momentum"
    table_learning_rate: float = 2e-2
    table_betas: tuple[float, float] = (0.9, 0.999)
    table_clip_norm: float | None = None
    table_rules: tuple[TableRule, ...] = ()
    table_capacity: int | None = None
    table_ema_decay: float | None = None
    table_stochastic_rounding: bool = False
    sinkhorn: SinkhornConfig = field(default_factory=SinkhornConfig)
    embedding: str = "dense"
    embedding_learning_rate: float | None = None
    ema_decay: float | None = None
    label_rules: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _check_choice("optim.optimizer", self.optimizer, OPTIMIZERS)
        _check_choice("optim.schedule", self.schedule, SCHEDULES)
        _check_choice("optim.table_optimizer", self.table_optimizer, TABLE_OPTIMIZERS)
        _check_choice("optim.embedding", self.embedding, EMBEDDING_OPTIMIZERS)
        for name in ("learning_rate", "table_learning_rate", "eps"):
            _check_number(f"optim.{name}", getattr(self, name), 0)
        for name in ("weight_decay", "embedding_weight_decay"):
            _check_number(f"optim.{name}", getattr(self, name), 0)
        _check_number("optim.muon_momentum", self.muon_momentum, 0, 1)
        for name in ("betas", "table_betas"):
            pair = getattr(self, name)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ConfigError(f"optim.{name}", pair, "two numbers")
            for i, value in enumerate(pair):
                _check_number(f"optim.{name}.{i}", value, 0, 1)
        for name in (
            "clip_norm",
            "table_clip_norm",
            "muon_rms",
            "embedding_learning_rate",
        ):
            if getattr(self, name) is not None:
                _check_number(f"optim.{name}", getattr(self, name), 0)
        for name in ("ema_decay", "table_ema_decay"):
            if getattr(self, name) is not None:
                _check_number(f"optim.{name}", getattr(self, name), 0, 1)
        if self.table_capacity is not None:
            _check_count("optim.table_capacity", self.table_capacity, 1)
        for name in ("decay_frac", "end_frac"):
            value = getattr(self, name)
            _check_number(f"optim.{name}", value, 0)
            if value > 1:
                raise ConfigError(f"optim.{name}", value, "a number from 0 to 1")
        _check_count("optim.warmup_steps", self.warmup_steps, 0)
        self._check_label_rules()
        self._check_table_rules()

    def rule_of(self, path: str) -> int | None:
        """Which rule takes the table at `path`; None when no rule does."""
        hits = (
            i
            for i, rule in enumerate(self.table_rules)
            if re.search(rule.pattern, path)
        )
        return next(hits, None)

    def table_settings(self, rule: int | None) -> TableSettings:
        """The settings of tables under a rule, or of those without one."""
        given = TableRule(pattern="") if rule is None else self.table_rules[rule]

        def either(own: Any, of_all: Any) -> Any:
            return of_all if own is None else own

        return TableSettings(
            optimizer=either(given.optimizer, self.table_optimizer),
            learning_rate=either(given.learning_rate, self.table_learning_rate),
            clip_norm=either(given.clip_norm, self.table_clip_norm),
            schedule=either(given.schedule, self.schedule),
            warmup_steps=either(given.warmup_steps, self.warmup_steps),
        )

    def _check_table_rules(self) -> None:
        if not isinstance(self.table_rules, tuple):
            raise ConfigError("optim.table_rules", self.table_rules, "a tuple of rules")
        for i, rule in enumerate(self.table_rules):
            path = f"optim.table_rules.{i}"
            if not isinstance(rule, TableRule):
                raise ConfigError(path, rule, "a TableRule")
            _check_pattern(f"{path}.pattern", rule.pattern)
            if rule.optimizer is not None:
                _check_choice(f"{path}.optimizer", rule.optimizer, TABLE_OPTIMIZERS)
            if rule.schedule is not None:
                _check_choice(f"{path}.schedule", rule.schedule, SCHEDULES)
            for name in ("learning_rate", "clip_norm"):
                if getattr(rule, name) is not None:
                    _check_number(f"{path}.{name}", getattr(rule, name), 0)
            if rule.warmup_steps is not None:
                _check_count(f"{path}.warmup_steps", rule.warmup_steps, 0)

    def _check_label_rules(self) -> None:
        if not isinstance(self.label_rules, tuple):
            raise ConfigError("optim.label_rules", self.label_rules, "a tuple of pairs")
        for i, rule in enumerate(self.label_rules):
            path = f"optim.label_rules.{i}"
            if not (
                isinstance(rule, tuple)
                and len(rule) == 2
                and all(isinstance(part, str) for part in rule)
            ):
                raise ConfigError(path, rule, "a pair (regular expression, label)")
            _check_choice(f"{path}.1", rule[1], LABELS)
            _check_pattern(f"{path}.0", rule[0])


def _check_choice(path: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(path, value, f"one of {list(allowed)}")


def _check_pattern(path: str, value: Any) -> None:
    try:
        re.compile(value)
    except (re.error, TypeError) as error:
        raise ConfigError(path, value, f"a regular expression ({error})") from None


def _check_count(path: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(path, value, f"an integer of at least {low}")


def _check_number(path: str, value: Any, low: float, below: float = math.inf) -> None:
    """low <= value < below; a NaN or an infinity is never allowed."""
    allowed = f"a finite number of at least {low}"
    if below != math.inf:
        allowed += f" and below {below}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (low <= value < below):
        raise ConfigError(path, value, allowed)
