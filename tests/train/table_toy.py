"""The toy model with its bigram table trained by rows.

The dense toy (`toy.py`) is the oracle: the same loss, the table a parameter.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from memjax.ops.embedding_bag import gather_rows
from memjax.ops.row_gradient import RowGradient
from memjax.optim.row_write import RowWriter
from memjax.optim.sinkhorn_rows import sinkhorn_rows
from memjax.optim.table_optimizer import rowwise
from memjax.optim.tables import table_optimizer
from memjax.parallel.mesh import MeshConfig, make_mesh, replicated
from memjax.parallel.row_sharding import Division, RowSharding
from memjax.train.tables import TableTraining
from tests.train import toy

N_ROWS = {"table": toy.V}


def rows_mesh(n_parts, n_data=1, by="rows"):
    mesh = make_mesh(
        MeshConfig(data=n_data, table=n_parts, table_by=by),
        jax.devices()[: n_parts * n_data],
    )
    return mesh, None if n_parts == 1 else RowSharding(mesh, by=by)


def optimizers(decay=None):
    writer = RowWriter(ema_decay=decay)
    return {
        "sgd": rowwise(optax.sgd(0.1), writer=writer),
        "sinkhorn": sinkhorn_rows(0.1, capacity=16, writer=writer),
    }


def init_params(sharding):
    def init(key):
        params = toy.init_params(key)
        if sharding is not None:
            shape = sharding.shape(toy.V, toy.V)
            padding = [(0, want - toy.V) for want in shape]
            params["table"] = jnp.pad(params["table"], padding)
        return params

    return init


def table_training(optimizer, mesh, sharding=None, keeps_mean=False, loss=None):
    loss = toy.quiet_loss_fn if loss is None else loss
    joined = table_optimizer(optimizer, sharding=sharding, n_rows=N_ROWS)

    def split(params):
        return {"bias": params["bias"]}, {"table": params["table"]}

    def gradients(params, batch, key):
        ids = batch["tokens"]
        if sharding is None:
            read = gather_rows(params["table"], ids)
        else:
            read = sharding.gather(params["table"], ids, toy.V)

        def of(dense, tap):
            return loss({"logits": read + tap, **dense}, batch, key)

        found, (grads, bar) = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(
            {"bias": params["bias"]}, jnp.zeros_like(read)
        )
        return found, (grads, {"table": (RowGradient(ids[..., None], None, bar),)})

    def shardings(tables, state):
        if sharding is None:
            return jax.tree.map(lambda _: replicated(mesh), (tables, state))

        def place(spec):
            return NamedSharding(mesh, spec)

        specs = joined.state_specs(tables)
        return (
            jax.tree.map(lambda _: place(sharding.spec), tables),
            jax.tree.map(place, specs, is_leaf=lambda x: isinstance(x, jax.P)),
        )

    parts = 1 if sharding is None else sharding.n_parts
    return TableTraining(
        split=split,
        merge=lambda dense, tables: {**dense, **tables},
        gradients=gradients,
        init=joined.init,
        apply=joined.apply,
        mean=joined.mean,
        shardings=shardings,
        layout={
            "rows": N_ROWS,
            "parts": parts,
            "by": "rows" if sharding is None else sharding.by,
        },
        repartition=lambda tables, state, old: joined.repartition(
            tables, state, Division(old["parts"], old["by"])
        ),
        keeps_mean=keeps_mean,
    )


def row_loss(params, batch, key):
    """The quiet loss of the toy, from the table's reads."""
    del key
    return toy._nats(params["logits"] + params["bias"], batch)


def eval_fn(params, max_batches):
    table = params["table"][: toy.V, : toy.V]
    return toy.eval_fn({**params, "table": table}, max_batches)


def fit(run_dir, *, parts=1, n_data=1, by="rows", kind="sinkhorn", decay=None, **how):
    mesh, sharding = rows_mesh(parts, n_data, by)
    tables = table_training(
        optimizers(decay)[kind], mesh, sharding, decay is not None, row_loss
    )
    return toy.toy_fit(
        run_dir,
        mesh=mesh,
        init_params=init_params(sharding),
        transform=optax.sgd(0.1),
        tables=tables,
        eval_fn=eval_fn,
        **how,
    )
