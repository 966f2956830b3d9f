"""What a table optimizer takes, and what it names when it is given something else."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from memjax.errors import ConfigError
from memjax.ops.row_gradient import RowGradient, unique_rows
from memjax.optim.table_optimizer import rowwise
from memjax.optim.tables import TableGroup, table_optimizer


def test_what_is_no_table_optimizer_or_gradient_is_named() -> None:
    message = "optimizer = 'GradientTransformation.*memjax.rowwise"
    with pytest.raises(ConfigError, match=message):
        table_optimizer(optax.sgd(0.1))
    with pytest.raises(ConfigError, match=message):
        TableGroup("", optax.sgd(0.1))
    optimizer = table_optimizer(rowwise(optax.sgd(0.1)))
    tables = {"t": jnp.zeros((3, 2))}
    one = RowGradient(jnp.array([[1]]), None, jnp.ones((1, 2)))
    moved, _, _ = optimizer.apply({"t": one}, optimizer.init(tables), tables)
    np.testing.assert_allclose(moved["t"][:, 0], [0, -0.1, 0], rtol=1e-6)
    with pytest.raises(ConfigError, match="gradients = 'tuple'.*Grads.tables"):
        optimizer.apply((one,), optimizer.init(tables), tables)
    np.testing.assert_array_equal(unique_rows(one, 3, 2).ids_U, [1])
