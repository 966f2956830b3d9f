"""Gradients by rows of Linen models equal those of dense tables."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.errors import ConfigError
from memjax.layers.row_grad import Grads, value_and_row_grad
from memjax.layers.table import READS, TAPS, ValueTable, declare_table
from memjax.ops.row_gradient import dense_gradient, unique_rows
from memjax.optim.table_optimizer import rowwise
from memjax.optim.tables import apply_updates, flat_tables, table_optimizer
from tests.layers.table_models import N_ROWS, WIDTH, Model, batch

RATE = 0.05


def as_dense(variables: Any) -> Any:
    """The parameters of mode "dense" that variables of mode "rows" stand for."""

    def merged(params: Any, tables: Any) -> Any:
        new = dict(params)
        for name, value in tables.items():
            new[name] = (
                merged(params.get(name, {}), value)
                if isinstance(value, dict)
                else value
            )
        return new

    return merged(variables["params"], variables["tables"])


def loss_of(read: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(read) ** 2)


def rows_loss(model: Model, variables: Any, *args: Any) -> Any:
    read, state = model.apply(variables, *args, mutable=[READS])
    return loss_of(read), state


def assert_trees_close(got: Any, want: Any, rtol: float = 1e-4) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5)


LAYOUTS = ["one", "three", "scan", "remat", "twice", "module", "unread"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_equals_dense(layout: str) -> None:
    """Initial values, losses, gradients and three steps, with donated state."""
    args = batch()
    rows, dense = Model("rows", layout), Model("dense", layout)
    variables = jax.jit(rows.init)(jax.random.key(0), *args)
    params = jax.jit(dense.init)(jax.random.key(0), *args)["params"]
    assert set(variables) == {"params", "tables"}
    jax.tree.map(np.testing.assert_array_equal, as_dense(variables), params)

    optimizer = table_optimizer(rowwise(optax.sgd(RATE)))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(variables: Any, state: Any) -> Any:
        loss, grads = value_and_row_grad(partial(rows_loss, rows))(variables, *args)
        updates = jax.tree.map(lambda g: -RATE * g, grads.params)
        summed = {
            path: dense_gradient(unique_rows(found, N_ROWS, WIDTH), N_ROWS)
            for path, found in grads.tables.items()
        }
        params, tables, state, _ = apply_updates(
            variables["params"],
            updates,
            variables["tables"],
            grads.tables,
            state,
            optimizer,
        )
        return loss, grads.params, summed, {"params": params, "tables": tables}, state

    @jax.jit
    def dense_step(params: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return loss_of(dense.apply({"params": params}, *args))

        value, grads = jax.value_and_grad(loss)(params)
        return value, grads, jax.tree.map(lambda p, g: p - RATE * g, params, grads)

    state = optimizer.init(variables["tables"])
    for _ in range(3):
        structure = jax.tree.structure(variables)
        value, grads, of_tables, variables, state = step(variables, state)
        want, want_grads, params = dense_step(params)
        assert jax.tree.structure(variables) == structure  # nothing grows
        np.testing.assert_allclose(value, want, rtol=1e-5)
        wanted = flat_tables(want_grads)
        for path in flat_tables(variables["tables"]):
            if path == "alone/table":
                assert path not in of_tables
                np.testing.assert_array_equal(wanted.pop(path), 0.0)
                continue
            np.testing.assert_allclose(
                of_tables[path], wanted.pop(path), rtol=1e-4, atol=1e-5
            )
        assert_trees_close(flat_tables(grads), wanted)
        assert_trees_close(as_dense(variables), params)
    assert step._cache_size() == 1
    # Generation and evaluation apply the model as it is.
    read = rows.apply(variables, *args)
    np.testing.assert_allclose(
        read, dense.apply({"params": params}, *args), rtol=1e-4, atol=1e-5
    )


def test_every_call_has_a_gradient_of_its_own() -> None:
    args = batch()
    for layout, n_reads in (("one", 3), ("three", 9), ("scan", 3), ("twice", 6)):
        model = Model("rows", layout)
        variables = jax.eval_shape(model.init, jax.random.key(0), *args)
        grads: Grads = jax.eval_shape(
            value_and_row_grad(partial(rows_loss, model)), variables, *args
        )[1]
        assert {path: len(g) for path, g in grads.tables.items()} == {
            "shared/table": n_reads
        }
        bag = grads.tables["shared/table"][0]
        lead = (3, 2, 3) if layout == "scan" else (2, 3)
        assert bag.ids.shape == (*lead, 3) and bag.cotangent.shape == (*lead, WIDTH)


def test_aux_carries_other_collections() -> None:
    args, model = batch(), Model("rows", "stats")
    variables = model.init(jax.random.key(0), *args)
    assert set(variables) == {"params", "tables", "stats"}

    def loss(variables: Any, *args: Any) -> Any:
        read, state = model.apply(variables, *args, mutable=[READS, "stats"])
        return loss_of(read), (state, {"stats": state["stats"], "read": read})

    function = jax.jit(value_and_row_grad(loss, has_aux=True))
    for n_calls in (2, 3):  # init called once
        (_, aux), grads = function(variables, *args)
        variables = {**variables, "stats": aux["stats"]}
        assert int(aux["stats"]["calls"]) == n_calls
        assert set(aux) == {"stats", "read"} and set(grads.tables) == {"shared/table"}
    with pytest.raises(ConfigError, match=r"loss_fn = 'tuple' .*\(state, aux\)"):
        value_and_row_grad(loss)(variables, *args)


def test_dense_models_need_nothing_else() -> None:
    args, model = batch(), Model("dense", "one")
    variables = model.init(jax.random.key(0), *args)
    loss, grads = value_and_row_grad(partial(rows_loss, model))(variables, *args)
    want = jax.grad(lambda v: loss_of(model.apply(v, *args)))(variables)
    assert grads.tables == {} and np.isfinite(loss)
    assert_trees_close({"params": grads.params}, want)


@pytest.mark.parametrize("name", [READS, TAPS])
def test_reads_and_taps_of_another_step_are_refused(name: str) -> None:
    """They would be counted once more at every step."""
    args, model = batch(), Model("rows", "one")
    variables = model.init(jax.random.key(0), *args)
    _, state = model.apply(variables, *args, mutable=[READS])
    with pytest.raises(ConfigError, match=f"variables = '{name}'"):
        fed = {**variables, name: state[READS]}
        value_and_row_grad(partial(rows_loss, model))(fed, *args)


def test_a_loss_that_forgets_the_reads_is_an_error() -> None:
    args, model = batch(), Model("rows", "one")
    variables = model.init(jax.random.key(0), *args)

    def forgets_all(variables: Any) -> Any:
        return loss_of(model.apply(variables, *args)), {}

    def forgets_to_return(variables: Any) -> Any:
        return rows_loss(model, variables, *args)[0], {}

    def bare(variables: Any) -> Any:
        return loss_of(model.apply(variables, *args))

    for loss in (forgets_all, forgets_to_return):
        with pytest.raises(ConfigError, match=r"no reads.*mutable=\['reads'\]"):
            value_and_row_grad(loss)(variables)
    with pytest.raises(ConfigError, match="loss_fn .* to return"):
        value_and_row_grad(bare)(variables)


class Outside(nn.Module):
    """Reads row 0, and a row outside."""

    @nn.compact
    def __call__(self, ids: jax.Array, weights: jax.Array) -> jax.Array:
        table = declare_table(
            self, "t", 3, 2, init=nn.initializers.ones, dtype=jnp.bfloat16, mode="rows"
        )
        return table.bag(self, ids, weights)


def test_reads_of_no_rows_and_of_bfloat16() -> None:
    """K = 0 reads nothing; a bfloat16 table gives float32 bags and sums."""
    model = Outside()
    for n_read in (0, 2):
        ids, weights = jnp.zeros((5, n_read), jnp.int32), jnp.ones((5, n_read))
        variables = model.init(jax.random.key(0), ids, weights)
        assert variables["tables"]["t"].dtype == jnp.uint16

        def loss(variables: Any, ids: Any, weights: Any) -> Any:
            read, state = model.apply(variables, ids, weights, mutable=[READS])
            return jnp.sum(read), state

        value, grads = value_and_row_grad(loss)(variables, ids, weights)
        assert value == 10.0 * n_read
        rows = dense_gradient(unique_rows(grads.tables["t"], 3, 2), 3)
        np.testing.assert_array_equal(rows, [[5.0 * n_read] * 2, [0, 0], [0, 0]])


def test_a_module_read_by_name_keeps_its_path() -> None:
    class Deep(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            return nn.remat(ValueTable)(5, 2, mode="rows", name="memory")(ids)

    model, ids = Deep(name="block"), jnp.arange(4)
    variables = model.init(jax.random.key(0), ids)

    def loss(variables: Any) -> Any:
        read, state = model.apply(variables, ids, mutable=[READS])
        return jnp.sum(read), state

    grads = value_and_row_grad(loss)(variables)[1]
    assert set(grads.tables) == set(flat_tables(variables["tables"]))


class ScannedReader(nn.Module):
    """Reads a table of its parent in scanned layers that declare the given axes."""

    axes: tuple[str, ...]

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        table = declare_table(
            self, "table", 5, 2, init=nn.initializers.ones, mode="rows"
        )

        def body(layer: nn.Module, carry: jax.Array, _: None) -> Any:
            return carry + table.gather(layer, ids), None

        scanned = nn.scan(body, variable_axes=dict.fromkeys(self.axes, 0), length=3)
        value = table.gather(self, ids)
        return scanned(nn.Dense(2, name="layer"), value, None)[0]


def test_scanned_layers_that_lose_the_reads_are_an_error() -> None:
    """Otherwise the table would silently train on the read outside the scan alone."""
    ids = jnp.array([0, 3])

    def loss(axes: tuple[str, ...]) -> Any:
        def loss_fn(variables: Any) -> Any:
            out, state = ScannedReader(axes).apply(variables, ids, mutable=[READS])
            return jnp.sum(out), state

        return loss_fn

    variables = {"tables": {"table": jnp.ones((5, 2))}}
    _, grads = value_and_row_grad(loss((READS, TAPS)))(variables)
    rows = unique_rows(grads.tables["table"], 5, 2)
    np.testing.assert_array_equal(dense_gradient(rows, 5)[:, 0], [4, 0, 0, 4, 0])
    with pytest.raises(ConfigError, match="variable_axes.*'reads': 0, 'taps': 0"):
        value_and_row_grad(loss(()))(variables)
    # Without gradients nothing has to be recorded.
    out = ScannedReader(()).apply(variables, ids)
    np.testing.assert_array_equal(out, 4 * np.ones((2, 2)))


def test_scanned_layers_without_taps_are_an_error() -> None:
    def loss_fn(variables: Any) -> Any:
        out, state = ScannedReader((READS,)).apply(
            variables, jnp.array([0, 3]), mutable=[READS]
        )
        return jnp.sum(out), state

    with pytest.raises(ConfigError, match=r"reads of \['table'\] without taps"):
        value_and_row_grad(loss_fn)({"tables": {"table": jnp.ones((5, 2))}})


def test_a_loss_that_applies_only_some_collections_is_an_error() -> None:
    """Without the taps every gradient of the table would silently be zero."""
    model = ValueTable(5, 2, mode="rows")
    variables = model.init(jax.random.key(0), jnp.array([1]))

    def loss_fn(variables: Any) -> Any:
        picked = {"tables": variables["tables"]}
        out, state = model.apply(picked, jnp.array([1]), mutable=[READS])
        return jnp.sum(out), state

    with pytest.raises(ConfigError, match=r"reads of \['table'\] without taps"):
        value_and_row_grad(loss_fn)(variables)


def test_apply_under_vmap_is_an_error() -> None:
    model = ValueTable(5, 2, mode="rows")
    variables = model.init(jax.random.key(0), jnp.array([1]))
    ids = jnp.array([[1, 2], [3, 4]])

    def loss_fn(variables: Any) -> Any:
        out, state = jax.vmap(lambda i: model.apply(variables, i, mutable=[READS]))(ids)
        return jnp.sum(out), state

    with pytest.raises(ConfigError, match="read of table.*tap of shape.*nn.vmap"):
        value_and_row_grad(loss_fn)(variables)


def test_a_second_apply_goes_on_from_the_first() -> None:
    model = ValueTable(5, 2, mode="rows")
    variables = model.init(jax.random.key(0), jnp.array([1]))

    def loss_fn(variables: Any) -> Any:
        one, state = model.apply(variables, jnp.array([1]), mutable=[READS])
        chained = {**variables, **state}
        two, state = model.apply(chained, jnp.array([2]), mutable=[READS])
        return jnp.sum(one) + 3 * jnp.sum(two), state

    _, grads = value_and_row_grad(loss_fn)(variables)
    rows = unique_rows(grads.tables["table"], 5, 2)
    np.testing.assert_array_equal(dense_gradient(rows, 5)[:, 0], [0, 1, 3, 0, 0])
