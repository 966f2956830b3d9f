"""A RowGradient is a tree for jax and refuses arithmetic.

What: it crosses jit, scan, grad and shard_map; optax transforms raise on it.
Why: `optax.scale` on a tree that holds row ids would scale the ids, silently.
When not: the sums by row; see test_row_gradient.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from memjax.errors import ConfigError, DataError
from memjax.ops.row_gradient import RowGradient, unique_rows
from memjax.parallel.mesh import MeshConfig, make_mesh

TABLE_RW = jnp.zeros((8, 4))
GRADIENT = RowGradient(jnp.array([[3], [5]]), None, jnp.ones((2, 4)))
RIGHT_CALL = r"memjax\.apply_updates or memjax\.table_optimizer"


@pytest.mark.parametrize(
    "transform",
    [
        optax.scale(-0.1),
        optax.scale(jnp.float32(-0.1)),
        optax.sgd(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.adam(0.1),
    ],
)
@pytest.mark.parametrize("wrap", [lambda g: g, lambda g: {"a/table": (g,)}])
def test_optax_transforms_are_refused(transform, wrap) -> None:
    grads = wrap(GRADIENT)
    with pytest.raises(ConfigError, match=RIGHT_CALL):
        transform.update(grads, transform.init(grads), None)
    with pytest.raises(ConfigError, match=RIGHT_CALL):
        jax.jit(transform.update)(grads, transform.init(grads), None)


def test_apply_updates_of_optax_is_refused() -> None:
    with pytest.raises(ConfigError, match=RIGHT_CALL):
        optax.apply_updates(TABLE_RW, GRADIENT)
    with pytest.raises(ConfigError, match=RIGHT_CALL):
        optax.apply_updates({"a": TABLE_RW}, {"a": GRADIENT})


@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.adam(0.1)])
def test_accumulation_of_optax_is_refused(inner) -> None:
    """jax compares the trees first, and its message names the two types."""
    steps = optax.MultiSteps(inner, 2)
    with pytest.raises(ValueError, match=r"RowGradient"):
        steps.update(GRADIENT, steps.init(TABLE_RW), TABLE_RW)
    with pytest.raises(ConfigError, match=RIGHT_CALL):
        steps.update(GRADIENT, steps.init(GRADIENT), GRADIENT)


@pytest.mark.parametrize(
    "operation",
    [
        lambda g: g + g,
        lambda g: 2 * g,
        lambda g: g * 0.5,
        lambda g: -g,
        lambda g: g / 2,
        lambda g: jnp.float32(2) * g,
        lambda g: TABLE_RW - g,
        lambda g: g**2,
        lambda g: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), g),
    ],
)
def test_arithmetic_is_refused(operation) -> None:
    with pytest.raises(ConfigError, match=RIGHT_CALL):
        operation(GRADIENT)


def test_ids_that_are_not_integers_are_refused() -> None:
    wrong = RowGradient(jnp.array([[3.0]]), None, jnp.ones((1, 4)))
    with pytest.raises(DataError, match="float32"):
        unique_rows([wrong], 8, 4)


def test_it_crosses_the_transforms_of_jax() -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])

    def of(x_NW: jax.Array) -> RowGradient:
        return GRADIENT._replace(cotangent=x_NW)

    @jax.jit
    def all_of_them(x_NW: jax.Array) -> dict[str, RowGradient]:
        (_, aux), _ = jax.value_and_grad(lambda x: (x.sum(), of(x)), has_aux=True)(x_NW)
        _, stacked = jax.lax.scan(lambda c, x: (c, of(x)), 0, x_NW[None])
        divided = jax.shard_map(
            lambda g: g,
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec("data"),
        )
        return {
            "aux": aux,
            "scan": jax.tree.map(lambda leaf: leaf[0], stacked),
            "vmap": jax.tree.map(lambda leaf: leaf[0], jax.vmap(of)(x_NW[None])),
            "jvp": jax.jvp(of, (x_NW,), (x_NW,))[0],
            "vjp": jax.vjp(of, x_NW)[0],
            "remat": jax.checkpoint(of)(x_NW),
            "barrier": jax.lax.optimization_barrier(of(x_NW)),
            "shard_map": divided(of(x_NW)),
        }

    for name, gradient in all_of_them(GRADIENT.cotangent).items():
        assert isinstance(gradient, RowGradient), name
        jax.tree.map(np.testing.assert_array_equal, gradient, GRADIENT)
    assert jax.eval_shape(of, GRADIENT.cotangent).ids.dtype == jnp.int32


def test_gradients_of_and_through_it() -> None:
    """Its ids have tangents of type float0, which are no fractions."""

    def square(gradient: RowGradient) -> jax.Array:
        return jnp.sum(gradient.cotangent**2)

    bar = jax.grad(square, allow_int=True)(GRADIENT)
    assert bar.ids.dtype == jax.dtypes.float0
    twice = jax.linearize(lambda x: GRADIENT._replace(cotangent=2 * x), jnp.ones(4))[1]
    assert twice(jnp.ones(4)).ids.dtype == jax.dtypes.float0


def test_paths_name_the_fields() -> None:
    leaves = jax.tree_util.tree_leaves_with_path(GRADIENT)
    assert [jax.tree_util.keystr(path) for path, _ in leaves] == [".ids", ".cotangent"]
