"""Our product-key memories, as `product_keys` and `memory_plus` time them.

What: `contender`: the real Linen layers with the real optimizers.
Why: what is timed is what a model trains.
When not: PyTorch's side; see `product_keys_torch`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from memjax.benchmarks.contender import Contender, Ready
from memjax.benchmarks.product_keys import (
    ADAM_EPS,
    BATCH,
    LEARNING_RATE,
    ProductKeyCase,
    arrays,
)
from memjax.layers.memory import MemoryInputs
from memjax.layers.memory_plus import MemoryPlus, MemoryPlusConfig
from memjax.layers.precision import Dtypes, PrecisionConfig
from memjax.layers.product_key import ProductKeyMemory
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.layers.row_grad import value_and_row_grad
from memjax.ops.row_gradient import dense_gradient, unique_rows
from memjax.optim.table_optimizer import rowwise
from memjax.optim.tables import apply_updates, table_optimizer


def contender(**arguments: Any) -> Contender:
    """Our side."""
    case = ProductKeyCase(**arguments)
    return Contender("jax", lambda: _ready(case))


def _ready(case: ProductKeyCase) -> Ready:
    given = arrays(case)
    weights = given["weights"]
    given = {name: jnp.array(given[name]) for name in ("x", "aim", "probe")}
    variables = _variables(case, weights)
    del weights
    if case.part == "read":
        return _read(case, variables, given)
    if case.part == "read_backward":
        return _read_backward(case, variables, given)
    return _step(case, variables, given)


def _variables(case: ProductKeyCase, weights: dict[str, Any]) -> dict[str, Any]:
    """The layer's variables; the table in the collection of its form."""
    w = {name: jnp.array(values) for name, values in weights.items()}
    query = {"kernel": w["kernel"], "bias": w["bias"]}
    if case.layer == "xlm":
        query = {f"{name}_0": values for name, values in query.items()}
    params = {"query": query, "keys": w["keys"]}
    if case.layer == "memory_plus":
        params["swilu"] = {"kernel": w["gate_kernel"], "bias": w["gate_bias"]}
        params["value"] = {"kernel": w["value_kernel"], "bias": w["value_bias"]}
    if case.form == "rows":
        return {"params": params, "tables": {"table": w["table"]}}
    return {"params": params | {"table": w["table"]}}


def _layer(case: ProductKeyCase) -> Callable[..., Any]:
    """(variables, x [T, D], **options of apply) -> (y [T, D], state)."""
    settings: dict[str, Any] = dict(
        n_sub_keys=case.n_sub_keys,
        key_width=2 * case.half_width,
        n_heads=case.n_heads,
        k=case.k,
        table_mode=case.form,
    )
    dtypes = Dtypes.of(PrecisionConfig())
    if case.layer == "xlm":
        memory = ProductKeyMemory(ProductKeyConfig(**settings), dtypes)
    else:
        memory = MemoryPlus(MemoryPlusConfig(**settings), dtypes)
    shape = (BATCH, case.n_tokens // BATCH)
    ones_BT = jnp.ones(shape, jnp.int32)
    inputs = MemoryInputs(ones_BT, jnp.broadcast_to(jnp.arange(shape[1]), shape))

    def apply(variables: Any, x_TD: Any) -> tuple[Any, Any]:
        x_BTD = x_TD.reshape(*shape, -1)
        y_BTD, state = memory.apply(
            variables, x_BTD, inputs, method="read", mutable=["reads"]
        )
        return y_BTD.reshape(x_TD.shape), state

    return apply


def _loss(case: ProductKeyCase) -> Callable[..., Any]:
    layer = _layer(case)

    def loss(variables: Any, x_TD: Any, aim_TD: Any) -> tuple[Any, Any]:
        y_TD, state = layer(variables, x_TD)
        return 0.5 * jnp.sum((y_TD - aim_TD) ** 2) / len(x_TD), state

    return loss


def _read(case: ProductKeyCase, variables: Any, given: Any) -> Ready:
    layer = _layer(case)
    read = jax.jit(lambda variables, x_TD: layer(variables, x_TD)[0])

    def run() -> Any:
        return jax.block_until_ready(read(variables, given["x"]))

    return Ready(variants={"layer": run}, outputs=lambda: {"y": run()})


def _read_backward(case: ProductKeyCase, variables: Any, given: Any) -> Ready:
    loss = _loss(case)
    shape = (case.n_rows, case.width)

    def of_weights(variables: Any, aim_TD: Any) -> Any:
        params = variables["params"]
        return loss(variables | {"params": params["layer"]}, params["x"], aim_TD)

    @jax.jit
    def gradients(variables: Any, x_TD: Any, aim_TD: Any) -> tuple[Any, Any]:
        params = {"layer": variables["params"], "x": x_TD}
        value_and_grads = value_and_row_grad(of_weights)
        _, grads = value_and_grads(variables | {"params": params}, aim_TD)
        if case.form == "dense":
            return grads.params, None
        return grads.params, unique_rows(grads.tables["table"], *shape)

    def run() -> Any:
        return jax.block_until_ready(gradients(variables, given["x"], given["aim"]))

    def outputs() -> dict[str, Any]:
        params, rows = run()
        found = {"x": params["x"]} | _named(case, params["layer"])
        table_RW = found.pop("table", None)
        if rows is None:
            probed_R = table_RW @ given["probe"]
        else:
            sums_U1 = (rows.sums_UW @ given["probe"])[:, None]
            probed_R = dense_gradient(rows._replace(sums_UW=sums_U1), shape[0])[:, 0]
        return found | {"table": probed_R}

    return Ready(variants={"layer": run}, outputs=outputs)


def _step(case: ProductKeyCase, variables: Any, given: Any) -> Ready:
    loss = _loss(case)
    adam = optax.adam(LEARNING_RATE, eps=ADAM_EPS)
    by_rows = table_optimizer(rowwise(adam))
    params, tables = variables["params"], variables.get("tables", {})
    state = [params, jax.jit(adam.init)(params), tables, jax.jit(by_rows.init)(tables)]

    def step(
        params: Any, moments: Any, tables: Any, rows: Any, x_TD: Any, aim_TD: Any
    ) -> Any:
        variables = {"params": params} | ({"tables": tables} if tables else {})
        value, grads = value_and_row_grad(loss)(variables, x_TD, aim_TD)
        updates, moments = adam.update(grads.params, moments, params)
        if not tables:
            return value, optax.apply_updates(params, updates), moments, tables, rows
        params, tables, rows, _ = apply_updates(
            params, updates, tables, grads.tables, rows, by_rows
        )
        return value, params, moments, tables, rows

    jitted = jax.jit(step, donate_argnums=(0, 1, 2, 3))
    before_R = _table(state) @ given["probe"]
    kernel, keys = _named(case, params)["kernel"], params["keys"]
    before = {"kernel": jnp.array(kernel), "keys": jnp.array(keys)}
    del params, tables, variables, kernel, keys

    def run() -> Any:
        value, *state[:] = jitted(*state, given["x"], given["aim"])
        jax.block_until_ready(state)
        return value

    def outputs() -> dict[str, Any]:
        value, after = run(), _named(case, state[0])
        moved = {name: after[name] - before[name] for name in before}
        moved_R = _table(state) @ given["probe"] - before_R
        return moved | {"loss": value, "table": moved_R}

    return Ready(variants={"layer": run}, outputs=outputs)


def _table(state: list[Any]) -> Any:
    return state[2]["table"] if state[2] else state[0]["table"]


def _named(case: ProductKeyCase, params: Any) -> dict[str, Any]:
    """Parameters, or their gradients, by the names of `arrays`."""
    end = "_0" if case.layer == "xlm" else ""
    found = {name: params["query"][name + end] for name in ("kernel", "bias")}
    found |= {name: params[name] for name in ("keys", "table") if name in params}
    if case.layer == "memory_plus":
        for name, at in (("gate", "swilu"), ("value", "value")):
            found |= {f"{name}_{part}": params[at][part] for part in ("kernel", "bias")}
    return found
