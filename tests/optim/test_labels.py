"""Label rules and norms per label."""

import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
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
