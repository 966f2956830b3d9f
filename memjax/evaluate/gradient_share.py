"""Where the gradient of the loss goes: backbone, memory, tables.

What: `make_gradient_share`, parts of the squared norm by kind of parameter, and
    `make_backbone_norms`, the backbone's gradient with and without the memory.
Why: a memory that explains the targets takes the backbone's gradient away long before
    held-out loss shows it.
When not: norms of every group in every step; the training loop has those.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from memjax.models.config import ModelConfig
from memjax.models.parameters import labels, merge_variables, split_variables
from memjax.ops.row_gradient import unique_rows

LossFn = Callable[..., tuple[Array, Any]]
KINDS = ("backbone", "memory", "tables")
# Modules called so, and the weight of the memory's branch in the three-branch block.
_OF_MEMORY = re.compile(r"memory(_\w+)?|w_mem(_\d+)?")


def kind_of(path: tuple[Any, ...]) -> str:
    """Which of KINDS a dense parameter that is no table belongs to, from its path."""
    names = [str(getattr(part, "key", part)) for part in path]
    return "memory" if any(map(_OF_MEMORY.fullmatch, names)) else "backbone"


def make_gradient_share(
    gradients: Callable[[Any, Any, Array], Any],
) -> Callable[[Any, Any], dict[str, float]]:
    """A function (params, batch) -> how the gradient's squared norm divides.

    Args:
        gradients: (params, batch, key) -> ((nats, aux), (gradients of the dense
            parameters, {path: row gradients})), the gradients of one training step;
            aux is {"weight"}, or a tuple that begins with it.

    Returns:
        "backbone", "memory" (dense weights of memories) and "tables" (dense tables and
        tables in mode "rows"): parts of the squared norm, which add up to 1; all NaN
        when the gradient is 0. And "norm", of the mean loss over everything.

    Cost: a training step without its update.
    """

    @jax.jit
    def squares(params: Any, batch: Any) -> tuple[dict[str, Array], Array]:
        (_, aux), (dense, rows) = gradients(params, batch, jax.random.key(0))
        sums = aux[0] if isinstance(aux, tuple) else aux
        found = {kind: jnp.zeros((), jnp.float32) for kind in KINDS}
        is_table = [kind == "table" for kind in jax.tree.leaves(labels(dense))]
        for (path, leaf), table in zip(
            jax.tree_util.tree_leaves_with_path(dense), is_table, strict=True
        ):
            kind = "tables" if table else kind_of(path)
            found[kind] += _square(leaf)
        for reads in rows.values():
            width = reads[0].cotangent.shape[-1]
            found["tables"] += _square(unique_rows(reads, 2**31 - 1, width).sums_UW)
        return found, sums["weight"]

    def share(params: Any, batch: Any) -> dict[str, float]:
        found, weight = jax.device_get(squares(params, batch))
        total = float(sum(found.values()))
        norm = total**0.5 / max(float(weight), 1)
        parts = {
            kind: float(square) / total if total else float("nan")
            for kind, square in found.items()
        }
        return {**parts, "norm": norm}

    return share


def make_backbone_norms(
    config: ModelConfig, loss_fn: LossFn
) -> Callable[[Any, dict[str, Any]], dict[str, Array]]:
    """A jitted function (params, batch) -> norms of the backbone's gradient.

    Args:
        config: of the model.
        loss_fn: (params, batch, key, drop_memory=bool) -> (summed nats, {"weight"}).

    Returns:
        backbone_grad_norm and backbone_grad_norm_without_memory: norms of the gradient
        of the mean loss with respect to every parameter but tables, with the memory in
        place and with every gate at 0.

    Cost: two forward and backward passes.
    """

    @jax.jit
    def gradient_norms(params: Any, batch: dict[str, Any]) -> dict[str, Array]:
        variables = split_variables(params, config)
        leaves, tree = jax.tree.flatten(variables["params"])
        is_table = [
            kind == "table" for kind in jax.tree.leaves(labels(variables["params"]))
        ]
        dense = [x for x, t in zip(leaves, is_table, strict=True) if not t]

        def mean_nats(dense: list[Array], drop_memory: bool) -> Array:
            rest = iter(dense)
            merged = [
                x if t else next(rest) for x, t in zip(leaves, is_table, strict=True)
            ]
            whole = merge_variables({**variables, "params": tree.unflatten(merged)})
            key = jax.random.key(0)
            nats, aux = loss_fn(whole, batch, key, drop_memory=drop_memory)
            return nats / jnp.maximum(aux["weight"], 1)

        norms = {}
        for name, drop in (("", False), ("_without_memory", True)):
            grads = jax.grad(mean_nats)(dense, drop)
            total = sum(_square(g) for g in grads)
            norms[f"backbone_grad_norm{name}"] = jnp.sqrt(total)
        return norms

    return gradient_norms


def _square(leaf: Array) -> Array:
    return jnp.sum(jnp.square(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))))
