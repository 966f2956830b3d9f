"""The state of a run: step, parameters, optimizer state, average, key.

What: `TrainState`, its abstract form with shardings, and its one jitted initialisation.
Why: nothing large is ever built on the host, and types are fixed from step 0 on.
When not: the position in the data is not here; it travels beside the state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from memjax.parallel.mesh import replicated
from memjax.train.model_state import ModelState
from memjax.train.tables import TableTraining

_PRNG_OPTION = "jax_default_prng_impl"

Params = Any
InitParams = Callable[[jax.Array], Params]
Placement = Callable[[Any], Any]


class Ema(NamedTuple):
    """A running average of some parameters, as three functions.

    Attributes:
        init: params -> average; traceable.
        update: (average, params, steps done before) -> average, after each step;
            traceable.
        merge: (average, params) -> the parameters to evaluate with.
    """

    init: Callable[[Params], Any]
    update: Callable[[Any, Params, jax.Array], Any]
    merge: Callable[[Any, Params], Params]


class TrainState(NamedTuple):
    """All arrays that a step reads and returns.

    Attributes:
        step: int32 scalar, the number of updates done; our own, never the optimizer's.
        params: the parameters, with tables and the model's state in their places.
        opt_state: state of the optax transform.
        table_state: state of the tables' optimizer, None without one.
        ema: running average of some parameters, None where there is none.
        key: raw uint32 data of the key that steps fold their number into.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    ema: Any
    key: jax.Array
    table_state: Any = None


def _builder(
    init_params: InitParams,
    transform: Any,
    ema: Ema | None,
    tables: TableTraining | None,
    model_state: ModelState | None,
) -> Callable:
    def build(key: jax.Array) -> TrainState:
        params = init_params(jax.random.fold_in(key, 0))
        dense, values = (params, None) if tables is None else tables.split(params)
        if model_state is not None:
            dense, _ = model_state.split(dense)
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=transform.init(dense),
            ema=None if ema is None else ema.init(params),
            key=jax.random.key_data(jax.random.fold_in(key, 1)),
            table_state=None if tables is None else tables.init(values),
        )
        # A weakly typed leaf would make the second step compile again.
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.asarray(x).dtype), state)

    return build


def abstract_state(
    init_params: InitParams,
    transform: Any,
    mesh: Mesh,
    *,
    ema: Ema | None = None,
    tables: TableTraining | None = None,
    model_state: ModelState | None = None,
    placement: Placement | None = None,
    seed: int = 0,
) -> TrainState:
    """Shapes, dtypes and shardings of the state; allocates nothing.

    Args:
        init_params: key -> parameters, traceable.
        transform: an optax gradient transformation.
        mesh: the mesh.
        ema: the running average, if any.
        tables: how tables are trained by rows, if any are.
        model_state: how the model's state is parted, if it has any.
        placement: the state's shapes -> shardings of everything but tables by rows and
            their state; None: replicated.
        seed: as in `init_state`; only its key's shape matters here.
    """
    build = _builder(init_params, transform, ema, tables, model_state)
    # A key of its own would start a backend.
    shapes = jax.eval_shape(build, jax.eval_shape(lambda: jax.random.key(seed)))
    if placement is None:
        shardings = jax.tree.map(lambda _: replicated(mesh), shapes)
    else:
        shardings = placement(shapes)
    if tables is not None:
        dense, _ = tables.split(shardings.params)
        of_tables, of_state = tables.shardings(
            tables.split(shapes.params)[1], shapes.table_state
        )
        shardings = shardings._replace(
            params=tables.merge(dense, of_tables), table_state=of_state
        )
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def init_state(
    init_params: InitParams,
    transform: Any,
    mesh: Mesh,
    *,
    ema: Ema | None = None,
    tables: TableTraining | None = None,
    model_state: ModelState | None = None,
    placement: Placement | None = None,
    seed: int = 0,
) -> TrainState:
    """The state at step 0, built on the devices by one jitted function.

    The key of `seed` is split by fold_in: 0 for the parameters, 1 for the steps. The
    same seed gives the same state on any number of devices.
    """
    build = _builder(init_params, transform, ema, tables, model_state)
    abstract = abstract_state(
        init_params,
        transform,
        mesh,
        ema=ema,
        tables=tables,
        model_state=model_state,
        placement=placement,
    )
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(build, out_shardings=shardings)(jax.random.key(seed))


def prng_implementation() -> str:
    """Name of the random number generator that keys use, such as threefry2x32."""
    return str(getattr(jax.config, _PRNG_OPTION))


def state_leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Path -> leaf, with paths such as `params/block_0/kernel`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        prefix + jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in paths
    }
