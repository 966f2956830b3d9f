"""Reading and writing single rows of a table, whatever its dtype.

What: `get_rows` and `set_rows`, a gather and a scatter that leave the rest alone,
    `store` / `load` for the integers that carry bfloat16, and `check_table`.
Why: XLA on a CPU widens a whole bfloat16 table to write a few of its rows, whereas
    integers are written in place; a table of uint16 here holds the bits of bfloat16.
When not: weighted sums of rows; see `embedding_bag`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memjax.errors import ConfigError, ShapeError

_CARRIERS = {jnp.dtype(jnp.bfloat16): jnp.dtype(jnp.uint16)}
_CARRIED = {carrier: dtype for dtype, carrier in _CARRIERS.items()}


def carrier_of(dtype: Any) -> jnp.dtype:
    """The dtype a table of `dtype` is stored in: uint16 for bfloat16, else itself."""
    return _CARRIERS.get(jnp.dtype(dtype), jnp.dtype(dtype))


def value_dtype(stored: Any) -> jnp.dtype:
    """The dtype of the numbers in a stored table: bfloat16 for uint16, or its own."""
    return _CARRIED.get(jnp.dtype(stored.dtype), jnp.dtype(stored.dtype))


def store(values: jax.Array) -> jax.Array:
    """A table of numbers as it is stored; bfloat16 becomes uint16, bit by bit."""
    carrier = carrier_of(values.dtype)
    if carrier == values.dtype:
        return values
    return lax.bitcast_convert_type(values, carrier)


def load(stored: jax.Array) -> jax.Array:
    """The numbers of a stored table, or of some of its rows."""
    dtype = value_dtype(stored)
    return stored if dtype == stored.dtype else lax.bitcast_convert_type(stored, dtype)


def get_rows(table_RW: jax.Array, ids_B: jax.Array) -> jax.Array:
    """Rows (entries of a vector) as numbers; zeros for ids outside [0, R)."""
    rows_BW = table_RW.at[ids_B].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )
    return load(rows_BW)


def set_rows(table_RW: jax.Array, ids_B: jax.Array, rows_BW: Any) -> jax.Array:
    """The table with rows (numbers) written; ids outside [0, R) are left out.

    In place when the table is donated and not read afterwards. An id that occurs twice
    gets one of its rows.
    """
    rows_BW = jnp.asarray(rows_BW).astype(value_dtype(table_RW))
    if rows_BW.dtype != table_RW.dtype:
        rows_BW = store(rows_BW)
    return table_RW.at[ids_B].set(rows_BW, mode="drop", wrap_negative_indices=False)


def check_table(table_RW: Any) -> None:
    """Raise unless `table_RW` is a table as it is stored.

    Raises:
        ShapeError: it has not two axes. Stacked tables are tables of their own.
        ConfigError: its dtype is neither float32 (or wider) nor uint16 for bfloat16.
    """
    if jnp.ndim(table_RW) != 2:
        raise ShapeError("table", tuple(jnp.shape(table_RW)), "two axes (rows, width)")
    dtype = jnp.dtype(table_RW.dtype)
    wide = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 32
    if not wide and dtype not in _CARRIED:
        raise ConfigError(
            "table.dtype", dtype.name, "float32, or uint16 from `store` for bfloat16"
        )
