"""One optimizer step as one jitted function.

What: gradient of the summed loss over the summed weight, accumulation, norms, update.
Why: sums instead of means make micro-batches, devices and padding add up exactly.
When not: what the loss is, and what the optimizer does, is handed in.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memjax.errors import ConfigError, TrainingError
from memjax.ops.order import wait_for
from memjax.parallel.logical_axes import batch_axes
from memjax.parallel.mesh import replicated
from memjax.train.model_state import ModelState
from memjax.train.state import TrainState, state_leaves
from memjax.train.tables import TableTraining

LossFn = Callable[[Any, Any, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
GroupNorms = Callable[[Any], dict[str, jax.Array]]
Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


def _micro_batches(batch: Any, n: int, mesh: Mesh | None) -> Any:
    """Rows i, n + i, 2n + i, ... become micro-batch i, so no row changes its device."""

    def cut(x: jax.Array) -> jax.Array:
        if x.shape[0] % n:
            raise ConfigError(
                "train.accumulate_steps",
                n,
                f"a divisor of the {x.shape[0]} rows of a batch",
            )
        x = jnp.moveaxis(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 1, 0)
        if mesh is None:
            return x
        axes = batch_axes(mesh.shape, x.shape[1])
        if not axes:
            raise ConfigError(
                "train.accumulate_steps",
                n,
                f"{x.shape[1]} rows a micro-batch do not divide into the "
                f"{mesh.shape['data'] * mesh.shape['fsdp']} parts of mesh.data * "
                "mesh.fsdp",
            )
        spec = NamedSharding(mesh, PartitionSpec(None, axes))
        return jax.lax.with_sharding_constraint(x, spec)

    return jax.tree.map(cut, batch)


def _in_batch_order(x: jax.Array) -> jax.Array:
    """The inverse of the cut of `_micro_batches`; no row changes its device."""
    return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])


def _dense_gradients(
    loss_fn: LossFn, model_state: ModelState | None
) -> Callable[..., Any]:
    """As `TableTraining.gradients`, of a model whose parameters are all dense."""

    def gradients(params: Any, batch: Any, key: jax.Array) -> Any:
        merge, (trained, held) = _first, (params, None)
        if model_state is not None:
            merge, (trained, held) = model_state.merge, model_state.split(params)

        def loss(trained: Any) -> Any:
            return loss_fn(merge(trained, held), batch, key)

        found, grads = jax.value_and_grad(loss, has_aux=True)(trained)
        return found, (grads, None)

    return gradients


def _first(params: Any, _: Any) -> Any:
    return params


class _Found(NamedTuple):
    """Of a batch: gradient of the nats, sums, row gradients, the model's new state."""

    grads: Any
    sums: Any
    rows: Any
    held: Any


def _sums(
    gradients: Callable[..., Any],
    params: Any,
    batch: Any,
    key: jax.Array,
    model_state: ModelState | None,
) -> _Found:
    """Sums are {"nats", "weight", ...}, in float32."""
    (nats, aux), (grads, rows) = gradients(params, batch, key)
    aux, held = (aux, None) if model_state is None else aux
    sums = {name: jnp.asarray(x, jnp.float32) for name, x in aux.items()}
    if "weight" not in sums:
        raise TrainingError(f"loss_fn returned {sorted(sums)}, 'weight' is missing")
    return _Found(grads, {"nats": nats.astype(jnp.float32), **sums}, rows, held)


def _check_types(new: TrainState, old: TrainState) -> None:
    was = state_leaves(old)
    for path, leaf in state_leaves(new).items():
        before = was.get(path)
        want = None if before is None else f"{before.dtype}{before.shape}"
        if f"{leaf.dtype}{leaf.shape}" != want:
            raise TrainingError(
                f"a step turns {path} into {leaf.dtype}{leaf.shape}; "
                f"the transform must keep {want}"
            )


def make_train_step(
    loss_fn: LossFn,
    transform: optax.GradientTransformation,
    *,
    accumulate_steps: int = 1,
    update_ema: Callable[[Any, Any, jax.Array], Any] | None = None,
    group_norms: GroupNorms | None = None,
    tables: TableTraining | None = None,
    model_state: ModelState | None = None,
    mesh: Mesh | None = None,
    shardings: Any = None,
) -> Step:
    """A jitted step(state, batch) -> (state, metrics); the state is donated.

    Args:
        loss_fn: (params, batch, key) -> (nats, aux): the summed loss in nats, float32,
            and a dict of sums with at least "weight", the sum of the weights. Where
            more is minimised than the nats, aux has the nats alone as "nats".
        transform: an optax transformation, called with the parameters.
        accumulate_steps: micro-batches a step. The batch is cut, gradients are summed
            in float32, so the step equals the step of the whole batch. Keys differ per
            micro-batch, so dropout masks are not those of the whole batch.
        update_ema: (ema, new params, step) -> ema; None leaves it alone.
        group_norms: tree -> {group: norm} over groups that part the tree, applied to
            gradients and updates of the dense weights.
        tables: how tables are trained by rows; `transform` and `group_norms` then see
            the dense weights alone. The row gradients of micro-batches are joined, and
            summed by row once.
        model_state: how the state that the forward pass changes is parted; `loss_fn`
            then returns (nats, (sums, new state)). Micro-batches hand it on.
        mesh: batches are split over its axes data, fsdp and table.
        shardings: of the new state, a tree like it; None lets the compiler decide
            without a mesh, and replicates everything with one. Gradients of dense
            weights are divided like the weights.

    Returns:
        The step. Its metrics are float32 scalars: "loss" (nats a token),
        "bits_per_token", "weight", "grad_norm", "update_norm", both also as
        "grad_norm/GROUP" ("table" for tables by rows), the counts of the tables'
        optimizers as "NAME/PATH", every other sum of `aux` divided by the weight, and
        the bool "finite": loss, gradient and update are finite. A batch of weight 0 has
        loss 0 and gradient 0.

    Raises:
        ConfigError: accumulate_steps does not divide the batch (when traced).
        TrainingError: the transform changes a dtype or shape of the state (traced).
    """

    gradients = (
        _dense_gradients(loss_fn, model_state) if tables is None else tables.gradients
    )
    divided = None
    if shardings is not None:
        divided = shardings.params
        if tables is not None:
            divided, _ = tables.split(divided)
        if model_state is not None:
            divided, _ = model_state.split(divided)

    def found_of(params: Any, batch: Any, key: jax.Array) -> _Found:
        found = _sums(gradients, params, batch, key, model_state)
        if divided is None:
            return found
        grads = jax.lax.with_sharding_constraint(found.grads, divided)
        return found._replace(grads=grads)

    def accumulate(params: Any, batch: Any, key: jax.Array) -> _Found:
        """What `_sums` finds, of the whole batch."""
        if accumulate_steps == 1:
            return found_of(params, batch, key)
        kept, held = (params, None)
        if model_state is not None:
            kept, held = model_state.split(params)

        def of_micro(held: Any, number: Any, micro: Any) -> _Found:
            whole = kept if model_state is None else model_state.merge(kept, held)
            micro_key = jax.random.fold_in(key, number)
            return found_of(whole, micro, micro_key)

        def body(carry: Any, x: Any) -> tuple[Any, Any]:
            before, held = carry
            found = of_micro(held, *x)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), found.grads)
            summed = jax.tree.map(jnp.add, before, (grads, found.sums))
            return (summed, found.held), found.rows

        micros = _micro_batches(batch, accumulate_steps, mesh)
        numbers = jnp.arange(accumulate_steps)
        first = jax.tree.map(lambda x: x[0], micros)
        shapes = jax.eval_shape(lambda: of_micro(held, 0, first)[:2])
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), shapes)
        ((grads, sums), held), rows = jax.lax.scan(
            body, (zeros, held), (numbers, micros)
        )
        joined = jax.tree.map(_in_batch_order, rows)
        return _Found(grads, sums, joined, held)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        dense, values, seen = state.params, None, state.params
        if tables is not None:
            dense, values = tables.split(state.params)
            seen = tables.merge(dense, tables.read(values, state.table_state))
        grads, sums, rows, held = accumulate(seen, batch, key)
        if model_state is not None:
            dense, _ = model_state.split(dense)
        weight = sums["weight"]
        scale = jnp.where(weight > 0, 1.0 / jnp.where(weight > 0, weight, 1.0), 0.0)
        grads = jax.tree.map(
            lambda g, p: (g.astype(jnp.float32) * scale).astype(p.dtype),
            grads,
            dense,
        )
        updates, opt_state = transform.update(grads, state.opt_state, dense)
        params = optax.apply_updates(dense, updates)
        table_state, of_tables = state.table_state, {}
        if tables is not None:
            # Reads that only dense updates need come before the tables are written.
            values, table_state, of_tables = tables.apply(
                rows, state.table_state, values, wait_for(scale, updates)
            )
            params = tables.merge(params, values)
        if model_state is not None:
            params = model_state.merge(params, held)
        ema = state.ema
        if update_ema is not None:
            ema = update_ema(state.ema, params, state.step)

        means = {name: x * scale for name, x in sums.items() if name != "weight"}
        loss = means.pop("nats")
        metrics = {
            **means,
            "loss": loss,
            "bits_per_token": loss / math.log(2.0),
            "weight": weight,
            **_norms("grad_norm", grads, group_norms, of_tables),
            **_norms("update_norm", updates, group_norms, of_tables),
        }
        metrics |= {
            name: jnp.asarray(value, jnp.float32)
            for name, value in of_tables.items()
            if not name.split("/")[0].endswith("_norm")
        }
        metrics["finite"] = (
            jnp.isfinite(loss)
            & jnp.isfinite(metrics["grad_norm"])
            & jnp.isfinite(metrics["update_norm"])
        )
        new = TrainState(state.step + 1, params, opt_state, ema, state.key, table_state)
        new = jax.tree.map(lambda x: jnp.asarray(x, jnp.asarray(x).dtype), new)
        _check_types(new, state)
        return new, metrics

    out = None if mesh is None else replicated(mesh)
    if mesh is not None and shardings is not None:
        out = (shardings, replicated(mesh))
    return jax.jit(step, donate_argnums=0, out_shardings=out)


def _norms(
    name: str,
    tree: Any,
    group_norms: GroupNorms | None,
    of_tables: dict[str, jax.Array],
) -> dict[str, Any]:
    """The norm of everything and of its groups; each leaf is read once."""
    groups = {"dense": _norm(tree)} if group_norms is None else group_norms(tree)
    by_rows = [v for k, v in of_tables.items() if k.startswith(f"{name}/")]
    if by_rows:
        joined = [groups["table"]] if "table" in groups else []
        groups = groups | {"table": _norm([*joined, *by_rows])}
    if group_norms is None and not by_rows:
        return {name: groups["dense"]}
    total = {name: _norm(list(groups.values()))}
    return total | {f"{name}/{group}": norm for group, norm in groups.items()}


def _norm(tree: Any) -> jax.Array:
    squares = [
        jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))
