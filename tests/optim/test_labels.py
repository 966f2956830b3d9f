"""Label rules and norms per label."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.errors import ConfigError
from memjax.optim.build import build_optimizer
from memjax.optim.config import OptimConfig
from memjax.optim.labels import apply_label_rules, group_norms

LABELS = {
    "blocks": {"attention": {"query": "matrix"}, "norm": {"gain": "vector"}},
    "embed": "embedding",
    "memory": {"table": "table"},
}
PARAMS = {
    "blocks": {"attention": {"query": jnp.ones((2, 2))}, "norm": {"gain": jnp.ones(3)}},
    "embed": jnp.full((2, 2), 2.0),
    "memory": {"table": jnp.full((4, 1), -3.0, jnp.bfloat16)},
}


def test_rules_replace_labels_and_the_first_wins():
    got = apply_label_rules(
        LABELS,
        PARAMS,
        (("attention/query$", "frozen"), ("^blocks/", "vector"), ("embed", "table")),
    )
    assert got == {
        "blocks": {"attention": {"query": "frozen"}, "norm": {"gain": "vector"}},
        "embed": "table",
        "memory": {"table": "table"},
    }
    assert apply_label_rules(LABELS, PARAMS, ()) == LABELS


def test_a_rule_that_matches_nothing_is_an_error_naming_it():
    with pytest.raises(ConfigError, match=r"label_rules.1 = \('atention', 'frozen'\)"):
        apply_label_rules(LABELS, PARAMS, (("embed", "table"), ("atention", "frozen")))


def test_a_rule_behind_others_is_an_error():
    with pytest.raises(ConfigError, match="taken by earlier rules"):
        apply_label_rules(LABELS, PARAMS, (("blocks", "vector"), ("query", "frozen")))


def test_unknown_labels_and_another_tree_are_errors():
    with pytest.raises(ConfigError, match="label of embed = 'emb'"):
        apply_label_rules({**LABELS, "embed": "emb"}, PARAMS, ())
    with pytest.raises(ConfigError, match="'frosen'"):
        apply_label_rules(LABELS, PARAMS, (("embed", "frosen"),))
    with pytest.raises(ConfigError, match="a tree like the parameters"):
        apply_label_rules({"embed": "embedding"}, PARAMS, ())


def test_group_norms():
    got = group_norms(PARAMS, LABELS)
    assert list(got) == ["table", "matrix", "vector", "embedding"]
    want = {"table": 6.0, "matrix": 2.0, "vector": 3**0.5, "embedding": 4.0}
    for label, norm in got.items():
        np.testing.assert_allclose(norm, want[label], rtol=1e-6)
        assert norm.dtype == jnp.float32


def test_p14_frozen_means_frozen():
    """P14: a = b = 10, gradients 1 and 1, b frozen: after 10 steps b is bit-equal."""
    params = {"a": jnp.array([10.0]), "b": jnp.array([10.0])}
    labels = apply_label_rules(
        {"a": "matrix", "b": "matrix"}, params, (("^a", "vector"), ("^b", "frozen"))
    )
    config = OptimConfig(learning_rate=0.1, weight_decay=0.1, schedule="constant")
    transform = build_optimizer(config, labels, 10)
    state = transform.init(params)
    for _ in range(10):
        grads = {"a": jnp.ones(1), "b": jnp.ones(1)}
        updates, state = transform.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert params["b"].tobytes() == np.float32([10.0]).tobytes()
    assert float(params["a"][0]) < 9.5


def test_p14_rules_and_parameters_that_do_not_meet():
    """P14: a rule that matches nothing, and a label without a group, are errors."""
    params = {"a": jnp.ones(1)}
    with pytest.raises(ConfigError, match="label_rules.0.*matches none"):
        apply_label_rules({"a": "vector"}, params, (("b", "frozen"),))
    with pytest.raises(ConfigError, match="label of a = 'unknown'"):
        build_optimizer(OptimConfig(), {"a": "unknown"}, 10)
