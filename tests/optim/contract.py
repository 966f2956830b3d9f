"""What every transform of ours must do, as functions a test calls one by one."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def toy_params(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """A matrix of sixteen rows; eight devices can share them."""
    rng = np.random.default_rng(0)
    return {"rows": jnp.asarray(rng.standard_normal((16, 4)), dtype)}


def toy_gradients(params: Any, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), params
    )


def kinds(tree: Any) -> list[Any]:
    """Path, shape and dtype of every leaf."""
    return [
        (jax.tree_util.keystr(path), jnp.shape(leaf), jnp.asarray(leaf).dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def step_of(transform: optax.GradientTransformation) -> Callable[..., Any]:
    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any, Any]:
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    return step


def check_dtypes_and_compiles(
    transform: optax.GradientTransformation, dtype: Any
) -> None:
    """Updates, parameters and state keep their types; one compile serves all steps."""
    params = toy_params(dtype)
    state = transform.init(params)
    step = step_of(transform)
    before = (kinds(params), kinds(state), jax.tree.structure(state))
    for seed in range(3):
        params, state, updates = step(params, state, toy_gradients(params, seed))
        assert (kinds(params), kinds(state), jax.tree.structure(state)) == before
        assert kinds(updates) == before[0]
    assert step._cache_size() == 1
    for leaf in jax.tree.leaves((params, state)):
        assert np.isfinite(np.asarray(leaf, np.float64)).all()


def check_jit(transform: optax.GradientTransformation) -> None:
    """Under jit the numbers are those without it."""
    params = toy_params()
    grads = toy_gradients(params)
    state = transform.init(params)
    eager, _ = transform.update(grads, state, params)
    _, _, jitted = step_of(transform)(params, state, grads)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def check_state_is_arrays(transform: optax.GradientTransformation) -> None:
    for leaf in jax.tree.leaves(transform.init(toy_params())):
        assert isinstance(leaf, jax.Array)


def check_in_chain_and_accumulation(transform: optax.GradientTransformation) -> None:
    """In a chain under MultiSteps the updates are those of the transform alone."""
    params = toy_params()
    grads = toy_gradients(params)
    alone, _ = transform.update(grads, transform.init(params), params)
    wrapped = optax.MultiSteps(
        optax.chain(optax.identity(), transform), every_k_schedule=2
    )
    state = wrapped.init(params)
    update = jax.jit(wrapped.update)
    first, state = update(grads, state, params)
    second, state = update(grads, state, params)
    np.testing.assert_array_equal(first["rows"], 0.0)
    np.testing.assert_allclose(second["rows"], alone["rows"], rtol=2e-5, atol=1e-6)


def check_in_partition(transform: optax.GradientTransformation) -> None:
    """With a leaf of another group beside it the updates are the same."""
    params = {**toy_params(), "other": jnp.ones(3)}
    grads = toy_gradients(params)
    rows = {"rows": params["rows"]}
    alone, _ = transform.update({"rows": grads["rows"]}, transform.init(rows), rows)
    wrapped = optax.partition(
        {"ours": transform, "sgd": optax.sgd(1.0)}, {"rows": "ours", "other": "sgd"}
    )
    got, _ = jax.jit(wrapped.update)(grads, wrapped.init(params), params)
    np.testing.assert_allclose(got["rows"], alone["rows"], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(got["other"], -grads["other"], rtol=1e-6)


def check_inject_hyperparams(
    factory: Callable[..., optax.GradientTransformation],
    arguments: dict[str, Any],
    static: tuple[str, ...],
) -> None:
    """Same updates with injected numbers; a changed one takes effect, no recompile."""
    assert set(static) <= set(inspect.signature(factory).parameters)
    plain = factory(**arguments)
    injected = optax.inject_hyperparams(factory, static_args=static)(**arguments)
    params = toy_params()
    grads = toy_gradients(params)
    step = step_of(injected)
    state = injected.init(params)
    assert not set(static) & set(state.hyperparams)
    _, after, updates = step(params, state, grads)
    wanted, _ = plain.update(grads, plain.init(params), params)
    np.testing.assert_allclose(updates["rows"], wanted["rows"], rtol=1e-5, atol=1e-7)
    for name in state.hyperparams:
        changed = {**after.hyperparams, name: after.hyperparams[name] * 0.5}
        step(params, after._replace(hyperparams=changed), grads)
    assert step._cache_size() == 1


def check_sharding_is_kept(transform: optax.GradientTransformation) -> None:
    """Row-sharded parameters give a state whose shardings an update does not change."""
    mesh = jax.make_mesh((8,), ("table",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("table", None))
    whole = NamedSharding(mesh, P())
    params = {"rows": jax.device_put(toy_params()["rows"], rows)}
    abstract = jax.eval_shape(transform.init, params)
    shardings = jax.tree.map(
        lambda leaf: rows if leaf.shape == (16, 4) else whole, abstract
    )
    state = jax.jit(transform.init, out_shardings=shardings)(params)
    grads = jax.tree.map(lambda g: jax.device_put(g, rows), toy_gradients(toy_params()))
    moved, new_state, _ = step_of(transform)(params, state, grads)

    def check(new: jax.Array, old: jax.Array) -> None:
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim)

    jax.tree.map(check, new_state, state)
    jax.tree.map(check, moved, params)
    alone = toy_params()
    wanted, _, _ = step_of(transform)(
        alone, transform.init(alone), toy_gradients(alone)
    )
    np.testing.assert_allclose(moved["rows"], wanted["rows"], rtol=2e-5, atol=1e-6)


def check_descends(
    transform: optax.GradientTransformation, n_steps: int, part: float
) -> None:
    """A small least-squares problem falls to `part` of its loss in `n_steps`."""
    target = toy_params()["rows"]

    def loss(params: Any) -> jax.Array:
        return jnp.mean(jnp.square(params["rows"] - target))

    @jax.jit
    def run(params: Any) -> Any:
        def body(_: int, carry: Any) -> Any:
            params, state = carry
            updates, state = transform.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(0, n_steps, body, (params, transform.init(params)))

    start = {"rows": jnp.zeros((16, 4))}
    end, _ = run(start)
    assert loss(end) < part * loss(start)
