"""Single rows of a table: what is read, written and left alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.ops.rows import (
    carrier_of,
    check_table,
    get_rows,
    load,
    set_rows,
    store,
    value_dtype,
)

VALUES = np.array([[1.0, -2.0], [0.5, 3.0], [np.inf, -0.0], [1e-3, 1e30]], np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_store_and_load_keep_every_bit(dtype):
    values = jnp.asarray(VALUES, dtype)
    table = store(values)
    assert table.dtype == carrier_of(dtype)
    assert value_dtype(table) == values.dtype == load(table).dtype
    np.testing.assert_array_equal(
        np.asarray(load(table)).view(np.uint8), np.asarray(values).view(np.uint8)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_p06_ids_outside_read_zeros_and_write_nothing(dtype):
    """Table of 4 rows: ids 10, -1 and -9 never mean row 3 or row 0."""
    table = store(jnp.asarray(VALUES, dtype))
    ids = jnp.array([10, -1, -9, 4, 1])
    got = get_rows(table, ids)
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(got[:4].astype(np.float32), 0.0)
    np.testing.assert_array_equal(got[4], jnp.asarray(VALUES[1], dtype))
    written = set_rows(table, ids, jnp.full((5, 2), 7.0))
    assert written.dtype == table.dtype
    want = np.asarray(table).copy()
    want[1] = np.asarray(store(jnp.asarray([7.0, 7.0], dtype)))
    np.testing.assert_array_equal(written, want)


def test_vectors_and_plain_bfloat16():
    vector = set_rows(jnp.arange(4), jnp.array([2, 9]), 7)
    np.testing.assert_array_equal(vector, [0, 1, 7, 3])
    np.testing.assert_array_equal(get_rows(vector, jnp.array([2, 4, -1])), [7, 0, 0])
    plain = set_rows(jnp.zeros((3, 2), jnp.bfloat16), jnp.array([1]), jnp.ones((1, 2)))
    np.testing.assert_array_equal(plain, [[0, 0], [1, 1], [0, 0]])


def test_check_table():
    for dtype in (jnp.float32, jnp.uint16):
        check_table(jnp.zeros((3, 2), dtype))
    for shape in ((3,), (2, 3, 4)):
        with pytest.raises(ShapeError, match="table has shape"):
            check_table(jnp.zeros(shape))
    for dtype in (jnp.bfloat16, jnp.float16, jnp.int32):
        with pytest.raises(ConfigError, match=r"table\.dtype"):
            check_table(jnp.zeros((3, 2), dtype))
