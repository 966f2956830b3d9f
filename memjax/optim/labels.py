"""Labels of parameters: which group trains a leaf.

What: checks, user rules over labels, and norms per label for the log.
Why: a misspelt rule or label is an error before the first step, not a silent no.
When not: deciding the labels; the model does that, it knows its own parameters.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import optax

from memjax.errors import ConfigError
from memjax.optim.clip import global_norm
from memjax.optim.config import LABELS


def path_name(path: Any) -> str:
    """A parameter's path as people write it: "blocks/attention/query"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check_labels(labels: Any) -> None:
    """Raise ConfigError, naming the path, for a label that is not in `LABELS`."""
    for path, label in jax.tree_util.tree_leaves_with_path(labels):
        if label not in LABELS:
            raise ConfigError(
                f"label of {path_name(path)}", label, f"one of {list(LABELS)}"
            )


def apply_label_rules(
    labels: Any, params: Any, rules: Sequence[tuple[str, str]]
) -> Any:
    """Labels with the user's rules applied; the first rule that matches wins.

    A rule (regular expression, label) matches where `re.search` finds it in the
    parameter's path, "blocks/attention/query".

    Args:
        labels: tree of str from the model.
        params: the parameters (arrays or shapes), same structure as labels.
        rules: pairs in order of precedence.

    Returns:
        A new tree of str.

    Raises:
        ConfigError: the trees differ, a label is unknown, or a rule decides no
            parameter, because nothing matches or earlier rules took it all.
    """
    if jax.tree.structure(labels) != jax.tree.structure(params):
        raise ConfigError(
            "labels",
            jax.tree.structure(labels),
            f"a tree like the parameters, {jax.tree.structure(params)}",
        )
    check_labels(labels)
    n_decided = [0] * len(rules)
    n_matched = [0] * len(rules)

    def relabel(path: Any, label: str) -> str:
        name = path_name(path)
        hits = [i for i, (pattern, _) in enumerate(rules) if re.search(pattern, name)]
        for i in hits:
            n_matched[i] += 1
        if not hits:
            return label
        n_decided[hits[0]] += 1
        return rules[hits[0]][1]

    relabelled = jax.tree_util.tree_map_with_path(relabel, labels)
    for i, rule in enumerate(rules):
        if n_decided[i] == 0:
            names = [
                path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(labels)
            ]
            why = (
                "all it matches is taken by earlier rules"
                if n_matched[i]
                else f"it matches none of the paths {names}"
            )
            raise ConfigError(
                f"optim.label_rules.{i}", rule, f"a rule must decide a parameter; {why}"
            )
    check_labels(relabelled)
    return relabelled


def select(tree: Any, labels: Any, wanted: Sequence[str]) -> list[Any]:
    """The leaves of `tree` whose label is in `wanted`, in tree order."""
    return [
        leaf
        for leaf, label in zip(
            jax.tree.leaves(tree), jax.tree.leaves(labels), strict=True
        )
        if label in wanted
    ]


def group_norms(tree: Any, labels: Any) -> dict[str, jax.Array]:
    """Euclidean norm of a tree (gradients, updates, parameters) per label.

    Returns:
        float32 scalars for the labels that occur, in the order of `LABELS`.
    """
    present = set(jax.tree.leaves(labels))
    return {
        label: global_norm(select(tree, labels, (label,)))
        for label in LABELS
        if label in present
    }


def masked_by(labels: Any, tree: Any, wanted: Sequence[str]) -> Any:
    """`tree` with `optax.MaskedNode()` in place of leaves of other labels."""
    return jax.tree.map(
        lambda label, leaf: leaf if label in wanted else optax.MaskedNode(),
        labels,
        tree,
    )
