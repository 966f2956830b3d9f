"""Family meta: Memory+ layers, one or several over a shared table, and its bag."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from memjax.layers.memory import MemoryInputs, own_tables
from memjax.layers.memory_plus import MemoryPlus, MemoryPlusConfig
from memjax.layers.precision import Dtypes
from memjax.ops.embedding_bag import embedding_bag
from memjax.ops.row_gradient import RowGradient
from tests.golden.case import Case
from tests.golden.families.fwd import dtypes_of
from tests.golden.families.memory_reads import (
    Tree,
    array,
    check_read,
    linear,
    reproduce,
)

_LAYER = {"query", "raw_scores", "indices", "scores", "bag_out"}
_LAYER |= {"grad.scores", "grad.bag_out"}
_TABLES = {
    "table": "values.weight",
    "down_table": "values_u.weight",
    "up_table": "values_v.weight",
}


class Layers(nn.Module):
    """h + mem_l(h) of each layer in turn; one layer alone is mem(h)."""

    config: MemoryPlusConfig
    dtypes: Dtypes
    n_layers: int
    share: bool
    out_width: int

    @nn.compact
    def read(self, h: jax.Array, inputs: MemoryInputs) -> jax.Array:
        if self.share:
            specs = self.config.table_specs(self.out_width)
            tables = own_tables(self, self.config, specs, None, self.dtypes, None)
            inputs = inputs.replace(tables=tables)
        for i in range(self.n_layers):
            layer = MemoryPlus(
                self.config,
                self.dtypes,
                out_width=self.out_width,
                name=f"layer_{i}",
            )
            read = layer.read(h, inputs)
            h = read if self.n_layers == 1 else h + read
        return h


def run(case: Case) -> None:
    (_run_bag if "bag" in case.settings else _run_layers)(case)


def _run_layers(case: Case) -> None:
    settings, data = case.settings, case.data
    widths = settings.take("input_dim"), settings.take("output_dim")
    assert data["x"].shape[-1] == widths[0] and data["grad_out"].shape[-1] == widths[1]
    for name in ("topk_boundary_gap_min", "topk_order_gap_min"):
        settings.number(name, 0, np.inf)
    n_layers = settings.take("n_layers")
    # A table that one layer shares with nobody is its own.
    share = settings.take("mem_share_values", default=True) and n_layers > 1
    swilu = settings.take("swilu_projection", default=True)
    experts = settings.take("peer_variant", default=False, one_of=(False, True))
    v_dim = settings.take("mem_v_dim", default=-1)
    config = MemoryPlusConfig(
        n_sub_keys=settings.take("mem_n_keys", default=1024),
        key_width=settings.take("mem_k_dim", default=512),
        n_heads=settings.take("mem_heads", default=4),
        k=settings.take("mem_knn", default=32),
        value_width=v_dim if v_dim > 0 and not experts else None,
        form="experts" if experts else "swilu" if swilu else "plain",
        gate="sigmoid" if settings.take("mem_gated", default=False) else "none",
        query_bias=settings.take("mem_query_bias", default=True),
    )
    prefixes = [f"l{i}." if n_layers > 1 else "" for i in range(n_layers)]
    layers = {f"layer_{i}": prefix for i, prefix in enumerate(prefixes)}
    names = config.table_specs(widths[1])

    def tables_of(kind: str, prefix: str) -> Tree:
        return {name: array(case, kind + prefix + _TABLES[name]) for name in names}

    def tree_of(kind: str) -> Tree:
        tree: Tree = tables_of(kind, prefixes[0]) if share else {}
        for name, prefix in layers.items():
            own = {} if share else tables_of(kind, prefix)
            tree[name] = own | _layer_tree(case, config, kind + prefix)
        return tree

    def module_of(mode: str) -> nn.Module:
        set_up = dataclasses.replace(config, table_mode=mode)
        return Layers(set_up, dtypes_of(case), n_layers, share, widths[1])

    case.expect_arrays(_known(config, prefixes, share, swilu))
    state, rows = reproduce(case, module_of, tree_of)
    params = tree_of("param.")
    for i, (name, prefix) in enumerate(layers.items()):
        keys = params[name]["keys"]
        order = check_read(case, prefix, state, (name,), keys)
        if not experts:
            stored = (params if share else params[name])["table"]
            reads = rows["table"] if share else rows[f"{name}/table"]
            _check_bag(case, prefix, stored, reads[i if share else 0], order)


def _check_bag(
    case: Case, prefix: str, stored: np.ndarray, read: RowGradient, order: np.ndarray
) -> None:
    """The weighted sum inside a layer, and what its gradient was."""
    bag, pull = jax.vjp(
        lambda weights: embedding_bag(jnp.asarray(stored), read.ids, weights),
        read.weights,
    )
    shape = case.data[prefix + "bag_out"].shape
    case.close(prefix + "bag_out", jnp.reshape(bag, shape))
    case.close(prefix + "grad.bag_out", jnp.reshape(read.cotangent, shape))
    weights_bar = np.reshape(pull(read.cotangent)[0], order.shape)
    placed = np.take_along_axis(weights_bar, order, axis=-1)
    case.close(prefix + "grad.scores", placed)


def _layer_tree(case: Case, config: MemoryPlusConfig, at: str) -> Tree:
    """Parameters of one layer, but its tables; `at` is kind and layer."""
    shape = (config.n_heads, 2, config.n_sub_keys, config.key_width // 2)
    tree: Tree = {"keys": array(case, at + "keys").reshape(shape)}
    for name, recorded in _linears(config).items():
        bias = name != "query" or config.query_bias
        tree[name] = linear(case, at + recorded, bias=bias)
    return tree


def _linears(config: MemoryPlusConfig) -> dict[str, str]:
    found = {"query": "query_proj.query_mlps.0"}
    if config.projects:
        found["value"] = "value_proj"
    if config.form == "swilu":
        found["swilu"] = "swilu_projection"
    if config.gate == "sigmoid":
        found["token_gate"] = "gating"
    return found


def _known(
    config: MemoryPlusConfig, prefixes: list[str], share: bool, swilu: bool
) -> set[str]:
    known = {"x", "grad_out", "out", "grad.x"}
    linears = set(_linears(config).values())
    if swilu:
        # The release makes them beside experts too, where nothing uses them.
        linears |= {"value_proj", "swilu_projection"}
    for i, prefix in enumerate(prefixes):
        names = {"keys"} | {f"{n}.{part}" for n in linears for part in _PARTS}
        if i == 0 or not share:
            names |= {_TABLES[name] for name in config.table_specs(1)}
        kinds = ("param.", "grad.")
        known |= {kind + prefix + name for kind in kinds for name in names}
        known |= {prefix + name for name in _LAYER}
    return known


_PARTS = ("weight", "bias")


def _run_bag(case: Case) -> None:
    settings, data = case.settings, case.data
    case.expect_arrays(
        {"in.indices", "in.weight", "in.per_sample_weights", "grad_out", "out"}
        | {"grad.weight", "grad.per_sample_weights", "touched_rows"}
    )
    ids, table = data["in.indices"], array(case, "in.weight")
    assert ids.shape == (settings.take("N"), settings.take("bag"))
    assert table.shape == (settings.take("rows"), settings.take("dim"))
    touched = np.unique(ids)
    assert len(touched) <= settings.take("distinct_rows_at_most")

    @jax.jit
    def graded(table: jax.Array, weights: jax.Array, bar: jax.Array) -> Any:
        out, pull = jax.vjp(
            lambda *given: embedding_bag(given[0], ids, given[1]), table, weights
        )
        return out, pull(bar)

    out, (table_bar, weights_bar) = graded(
        table, array(case, "in.per_sample_weights"), array(case, "grad_out")
    )
    case.close("out", out)
    case.close("grad.weight", table_bar)
    case.close("grad.per_sample_weights", weights_bar)
    case.equal("touched_rows", touched)
    untouched = np.delete(np.asarray(table_bar), touched, axis=0)
    assert not untouched.any(), "rows that were not read have a gradient"
