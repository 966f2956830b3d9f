"""Settings out of range name the field, the value and what is allowed."""

import dataclasses

import pytest

from memjax.errors import ConfigError
from memjax.optim.config import OptimConfig, SinkhornConfig


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("optimizer", "adam", "adamw"),
        ("learning_rate", -1.0, "at least 0"),
        ("learning_rate", float("nan"), "finite"),
        ("learning_rate", "fast", "finite"),
        ("betas", (0.9,), "two numbers"),
        ("betas", (0.9, 1.0), "below 1"),
        ("eps", -1e-8, "at least 0"),
        ("weight_decay", -0.1, "at least 0"),
        ("embedding_weight_decay", float("inf"), "finite"),
        ("muon_momentum", 1.0, "below 1"),
        ("muon_rms", -0.2, "at least 0"),
        ("clip_norm", -1.0, "at least 0"),
        ("schedule", "linear", "cosine"),
        ("warmup_steps", -1, "integer"),
        ("warmup_steps", 2.0, "integer"),
        ("decay_frac", 1.5, "from 0 to 1"),
        ("end_frac", -0.1, "at least 0"),
        ("table_optimizer", "muon", "sinkhorn_momentum"),
        ("table_learning_rate", True, "finite"),
        ("table_betas", 0.9, "two numbers"),
        ("table_clip_norm", -1.0, "at least 0"),
        ("embedding", "adam", "dense"),
        ("embedding_learning_rate", -1.0, "at least 0"),
        ("ema_decay", 1.0, "below 1"),
        ("label_rules", (("a",),), "a pair"),
        ("label_rules", (("a", "tables"),), "frozen"),
        ("label_rules", (("(", "table"),), "regular expression"),
        ("label_rules", [("a", "table")], "tuple"),
    ],
)
def test_bad_values(field, value, allowed):
    with pytest.raises(ConfigError, match=rf"optim\.{field}.*{allowed}"):
        OptimConfig(**{field: value})


@pytest.mark.parametrize(
    "field, value",
    [
        ("beta", 1.0),
        ("n_iterations", 4),
        ("tau", -1.0),
        ("eps", float("nan")),
        ("gamma", -1.0),
        ("norm", "linf"),
    ],
)
def test_bad_sinkhorn_values(field, value):
    with pytest.raises(ConfigError, match=rf"optim\.sinkhorn\.{field}"):
        SinkhornConfig(**{field: value})


def test_defaults_are_frozen_and_hold_plain_data():
    config = OptimConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.learning_rate = 1.0  # type: ignore[misc]
    assert config.sinkhorn == SinkhornConfig(
        beta=0.95, n_iterations=11, tau=1e-3, eps=1e-20, gamma=0.18, norm="l2"
    )
