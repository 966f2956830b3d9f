"""A small model that reads tables in every way, and its training step.

What: `Model`, with a shared and an own table; `dense_step` and `rows_step`.
Why: mode "rows" is right when it does what mode "dense" does, however it is called.
When not: one read of one table; `ops.embedding_bag` has those.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from memjax.layers.table import READS, TABLES, TAPS, Table, ValueTable, declare_table

N_ROWS, WIDTH, D = 11, 4, 6


class Reader(nn.Module):
    """Reads a table that it was given: two gathers and a bag with learned weights."""

    @nn.compact
    def __call__(self, h_BTD: jax.Array, table: Table, ids_BTK: jax.Array) -> jax.Array:
        weights_BTK = nn.softmax(nn.Dense(ids_BTK.shape[-1])(h_BTD))
        read = table.bag(self, ids_BTK, weights_BTK)
        read += table.gather(self, ids_BTK[..., 0]) * table.gather(
            self, ids_BTK[..., 1]
        )
        return jnp.tanh(h_BTD + nn.Dense(D)(read))


class Owner(nn.Module):
    """Reads a table of its own."""

    mode: str

    @nn.compact
    def __call__(self, h_BTD: jax.Array, ids_BTK: jax.Array) -> jax.Array:
        table = declare_table(
            self, "own", N_ROWS, WIDTH, init=nn.initializers.normal(1.0), mode=self.mode
        )
        return h_BTD + nn.Dense(D)(table.gather(self, ids_BTK[..., 0]))


class Model(nn.Module):
    """`layout` says who calls whom:

    "one": one reader. "three": three readers of a shared table. "scan": the same in a
    scan. "remat": the same, rematerialised, after a rematerialised owner. "twice": one
    reader called twice. "module": a shared ValueTable, called three times by name.
    "unread": "one", beside a table that nobody reads. "stats": "one", and a counter in
    another collection.
    """

    mode: str
    layout: str

    @nn.compact
    def __call__(self, h_BTD: jax.Array, ids_BTK: jax.Array) -> jax.Array:
        shared = ValueTable(N_ROWS, WIDTH, mode=self.mode, table_std=1.0, name="shared")
        h_BTD = nn.Dense(D)(h_BTD)
        if self.layout == "module":
            for _ in range(3):
                read = shared(ids_BTK, nn.softmax(nn.Dense(ids_BTK.shape[-1])(h_BTD)))
                h_BTD = jnp.tanh(h_BTD + nn.Dense(D)(read + shared(ids_BTK[..., 0])))
            return h_BTD
        table = shared.handle()
        if self.layout == "scan":

            def layer(reader: Reader, h_BTD: jax.Array, _: None) -> Any:
                return reader(h_BTD, table, ids_BTK), None

            return nn.scan(
                layer,
                variable_axes={"params": 0, READS: 0, TAPS: 0},
                variable_broadcast=[TABLES],
                split_rngs={"params": True},
                length=3,
            )(Reader(), h_BTD, None)[0]
        reader, owner = Reader, Owner
        if self.layout == "remat":
            reader, owner = nn.remat(Reader), nn.remat(Owner)
            h_BTD = owner(self.mode, name="owner")(h_BTD, ids_BTK)
        if self.layout == "unread":
            ValueTable(N_ROWS, WIDTH, mode=self.mode, name="alone").handle()
        if self.layout == "stats":
            calls = self.variable("stats", "calls", lambda: jnp.zeros((), jnp.int32))
            calls.value += 1
        if self.layout == "twice":
            both = reader()
            return both(both(h_BTD, table, ids_BTK), table, ids_BTK[..., ::-1])
        for i in range(3 if self.layout in ("three", "remat") else 1):
            h_BTD = reader(name=f"reader_{i}")(h_BTD, table, ids_BTK)
        return h_BTD


def batch() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    h_BTD = rng.standard_normal((2, 3, D)).astype(np.float32)
    ids_BTK = rng.integers(0, N_ROWS, (2, 3, 3)).astype(np.int32)
    return jnp.asarray(h_BTD), jnp.asarray(ids_BTK)
