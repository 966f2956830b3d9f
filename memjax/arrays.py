"""Axis letters, dtype names and shape checks.

What: the one legend for array suffixes (`q_BTHC`) and the few checks every floor uses.
Why: a reader checks an einsum by eye, and a wrong shape fails with a sentence.
When not: shapes that are free (any leading axes) are documented where they occur.

Legend (one capital letter per axis, `1` is a literal broadcast axis):

    B batch          T tokens            D model width        V vocabulary
    A heads of attention                 F feed-forward width L layers
    M branches of the residual stream    E width of a read    W width of a table row
    R table rows     G n-gram orders     H hash heads         C hash columns (G * H)
    K taps of a short convolution        N look-back tokens of an n-gram (max order)

in product keys:

    H heads          X the two halves    C width of a half    N sub-keys of a half
    S slots (N * N)  K slots of a read

in kNN, in `ops.knn` and `evaluate`:

    N queries        K neighbours        S entries of the datastore

and where n-grams address them, r width of the code of a token

in fast weights, beside those:

    c tokens of a chunk                  M chunks of a row    R tokens of a line
    P pairs of a token and its target; in an overlay, places  N reads of a chunk

in mixtures of experts, beside those (E is there the experts):

    N tokens of a batch  K experts of a token  P pairs of both (N * K)  G groups of rows

and where tables are trained by rows, in `ops` and `optim`:

    N reads          K rows of a read    P (read, row) pairs  U unique rows
    B rows or pairs of one block         A slots of the buffer of active rows

and in tables of 8-bit floats: B blocks of a row that share a scale
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from memjax.errors import ConfigError, ShapeError

DTYPES: Mapping[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def dtype_of(name: str, field: str = "dtype") -> Any:
    """The jax dtype called `name`; ConfigError naming `field` when it is unknown."""
    if name not in DTYPES:
        raise ConfigError(field, name, f"one of {sorted(DTYPES)}")
    return DTYPES[name]


def check_shape(name: str, array: Any, shape: tuple[int | None, ...]) -> None:
    """Raise ShapeError unless `array.shape` matches `shape` (None matches any size)."""
    got = tuple(array.shape)
    if len(got) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, got, strict=True)
    ):
        raise ShapeError(name, got, shape)
