"""Some rows of a table's initial values, without the table.

What: `init_rows` calls an initialiser for rows a .. a + n - 1 of a table and gets the
    bits that the whole table would have there.
Why: a table larger than a device's memory must begin like one that fits.
When not: tables that fit; their initialiser is called once.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl, threefry_2x32

from memjax.errors import ConfigError

Init = Callable[[jax.Array, tuple[int, int], Any], jax.Array]


def init_rows(
    init: Init, key_2: Any, width: int, dtype: Any
) -> Callable[[int, int], jax.Array]:
    """A function (first, n) -> rows first .. first + n - 1 of `init(key, (R, width),
    dtype)`, for any R; compiled once for every n.

    The bits of entry i come from the key and i alone, so a generator that counts from
    the first entry of the block gives the same ones.

    Args:
        init: draws once, entry by entry, as `jax.random.normal`, `uniform` and
            `truncated_normal` do, and scales by what does not depend on the shape.
        key_2: uint32 [2], data of a threefry key.
        width: W.
        dtype: of the values.

    Raises:
        ConfigError: the key is of another generator, or generators are set to give
            bits that depend on the shape (`jax_threefry_partitionable` off).
    """
    if not jax.config.jax_threefry_partitionable or jnp.shape(key_2) != (2,):  # pyright: ignore
        raise ConfigError(
            "jax_default_prng_impl",
            jax.config.jax_default_prng_impl,  # pyright: ignore
            "threefry2x32 with jax_threefry_partitionable, for tables on the host",
        )
    key_2 = np.asarray(key_2, np.uint32)

    @partial(jax.jit, static_argnums=1)
    def block(data_4: jax.Array, n_rows: int) -> jax.Array:
        key = jax.random.wrap_key_data(data_4, impl=_counting())
        return init(key, (n_rows, width), dtype)

    def rows(first: int, n_rows: int) -> jax.Array:
        at = first * width
        start_2 = np.array([at >> 32, at & 0xFFFFFFFF], np.uint32)
        return block(np.concatenate([key_2, start_2]), n_rows)

    return rows


def counting_key(key_2: jax.Array, start_2: jax.Array) -> jax.Array:
    """A threefry key whose first draw begins with entry start_2 (high and low word, as
    uint32) of what key data key_2 would draw; traceable. It cannot be split."""
    data_4 = jnp.concatenate([key_2, start_2])
    return jax.random.wrap_key_data(data_4, impl=_counting())


@functools.cache
def _counting() -> Any:
    """A generator whose key says where its counter begins."""
    return define_prng_impl(
        key_shape=(4,),
        seed=_refused,
        split=_refused,
        random_bits=_bits,
        fold_in=_refused,
        name="memjax_counting",
        tag="mxc",
    )


def _refused(*_: Any) -> Any:
    raise ConfigError("init", "splits its key", "an initialiser that draws once")


def _bits(data_4: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    n = 1
    for size in shape:
        n *= size
    count_n = jax.lax.iota(jnp.uint32, n)
    low_n = data_4[3] + count_n
    high_n = data_4[2] + (low_n < count_n).astype(jnp.uint32)
    both_2n = threefry_2x32(data_4[:2], jnp.concatenate([high_n, low_n]))
    high_n, low_n = both_2n[:n], both_2n[n:]
    if bit_width == 64:
        wide_n = (high_n.astype(jnp.uint64) << 32) | low_n.astype(jnp.uint64)
        return wide_n.reshape(shape)
    return (high_n ^ low_n).astype(f"uint{bit_width}").reshape(shape)
