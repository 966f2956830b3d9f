"""The training loop, from the mesh to the last checkpoint.

What: `fit` trains until `n_steps`, or until it is told to stop, and can be rerun.
Why: one place shows the order in which everything happens, and why that order.
When not: what is trained on what is decided by the caller, who hands in functions.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import optax
from jax.sharding import Mesh

from memjax.errors import ConfigError, TrainingError
from memjax.parallel.mesh import global_batch
from memjax.train.checkpoint import Checkpoints
from memjax.train.config import TrainConfig
from memjax.train.hooks.base import Every, Hook
from memjax.train.hooks.memory_health import HealthFn, MemoryHealth
from memjax.train.hooks.profiler import Profiler
from memjax.train.hooks.progress import Progress
from memjax.train.hooks.record import Recorder
from memjax.train.host_tables import HostTable, HostTables
from memjax.train.model_state import ModelState
from memjax.train.run import Rate, Run
from memjax.train.run_folder import CHECKPOINT_FOLDER
from memjax.train.state import (
    Ema,
    InitParams,
    Params,
    Placement,
    TrainState,
    abstract_state,
    init_state,
)
from memjax.train.step import GroupNorms, LossFn, make_train_step
from memjax.train.stop import StopSignal
from memjax.train.tables import TableTraining

EvalFn = Callable[[Params, int | None], Mapping[str, float]]


class Batches(Protocol):
    """An endless iterator of numpy batches that knows its position."""

    def __next__(self) -> Mapping[str, Any]: ...

    def state(self) -> Any:
        """A JSON value that `restore` brings back to exactly this position."""

    def restore(self, state: Any) -> None:
        """Go to a position; raises when it belongs to other data."""


@dataclasses.dataclass(frozen=True)
class FitResult:
    """How a run ended.

    Attributes:
        state: the last state.
        step: updates done.
        stopped_by: "SIGTERM" or "SIGINT" when the run was told to stop, else None.
        final: the evaluation after the last step, over everything; None when stopped.
        best_step: step of the best kept checkpoint, None without one.
        best_bpb: its bits per byte.
        tokens_seen: targets trained on, all starts of the run together.
        train_s: seconds spent in steps, all starts together, without compiling.
    """

    state: TrainState
    step: int
    stopped_by: str | None
    final: dict[str, float] | None
    best_step: int | None
    best_bpb: float | None
    tokens_seen: int
    train_s: float


# The order of things, and why nobody should change it:
#
#   mesh, data, functions    handed in by the caller
#   abstract state           shapes and shardings, before anything is allocated
#   restore, or init         the newest whole checkpoint if there is one
#   iterator                 AT the restored position, never read and thrown away
#   hooks                    after the restore: records are cut back to that step
#   for each step t:
#     settle                 when something is due below: a bad state is never saved
#     evaluate if due        the state BEFORE step t, tables on the host up to date
#     save if due            the same state, and the iterator before its next batch
#     leave if done          or told to; a told stop has just been saved
#     take a batch, its rows of tables on the host into their slots, dispatch step t
#     settle step t - 1      its metrics are read while step t runs
#   after: final evaluation, wait for the writer (the `with` block)
#
# Implicit transfers between host and device are errors inside the loop, except in
# evaluation, saving and hooks, which run functions that are not ours.
def fit(
    config: TrainConfig,
    *,
    run_dir: str | os.PathLike[str],
    mesh: Mesh,
    init_params: InitParams,
    loss_fn: LossFn,
    transform: optax.GradientTransformation,
    batches: Batches,
    eval_fn: EvalFn,
    learning_rate: Rate,
    fingerprint: Mapping[str, Any],
    seed: int = 0,
    bytes_per_token: float = 1.0,
    ema: Ema | None = None,
    tables: TableTraining | None = None,
    model_state: ModelState | None = None,
    placement: Placement | None = None,
    host_tables: Sequence[HostTable] = (),
    group_norms: GroupNorms | None = None,
    health_fn: HealthFn | None = None,
    hooks: Sequence[Hook] = (),
    notes: Sequence[str] = (),
) -> FitResult:
    """Train; resume when the run folder holds a checkpoint.

    Args:
        config: length and periods.
        run_dir: an existing run folder (see `open_run_folder`).
        mesh: batches are split over data, fsdp and table, tables by rows as `tables`
            says, all else as `placement`.
        init_params: key -> parameters, traceable.
        loss_fn: (params, batch, key) -> (summed nats, {"weight": ..., sums}); with a
            model_state (summed nats, (sums, new state)).
        transform: an optax transformation.
        batches: this reader's part of the training data.
        eval_fn: (params, max_batches or None for all) -> floats, among them "bpb".
            The parameters are live arrays: read them, do not keep or donate them.
        learning_rate: step (from 0) -> rate, or {group: rate}; for the records only.
        fingerprint: JSON mapping that a checkpoint must share (see `Checkpoints.save`).
        seed: of the parameters and of the keys of the steps.
        bytes_per_token: turns bits a token into bits a byte in the records.
        ema: a running average; evaluations then use it.
        tables: how tables are trained by rows, if any are.
        model_state: how the state that the forward pass changes is parted, if any is.
        placement: how parameters, averages and the optimizer's state are divided; None:
            they are replicated.
        host_tables: those that are on the host; `tables` trains their slots.
        group_norms: tree -> {group: norm}.
        health_fn: (state, batch) -> scalars, called every `health_every` steps.
        hooks: further hooks, after the built-in ones.
        notes: lines that the log of every start begins with.

    Raises:
        ConfigError: a mesh axis over which nothing is divided is larger than 1;
            health_every without a health_fn, or n_steps below the checkpoint's step.
        CheckpointError: the run folder's checkpoint is of another configuration.
        TrainingError: a loss, gradient or update that is not finite (names the step and
            the last good checkpoint), or data that ended.
    """
    _check(config, mesh, health_fn, tables, placement)
    primary = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(
            Checkpoints(
                Path(run_dir) / CHECKPOINT_FOLDER,
                keep_last=config.keep_last,
                keep_best=config.keep_best,
                tables=tables,
            )
        )
        abstract = abstract_state(
            init_params,
            transform,
            mesh,
            ema=ema,
            tables=tables,
            model_state=model_state,
            placement=placement,
            seed=seed,
        )
        step_fn = make_train_step(
            loss_fn,
            transform,
            accumulate_steps=config.accumulate_steps,
            update_ema=None if ema is None else ema.update,
            group_norms=group_norms,
            tables=tables,
            model_state=model_state,
            mesh=mesh,
            shardings=jax.tree.map(lambda x: x.sharding, abstract),
        )
        host = None
        if host_tables:
            host = HostTables(host_tables, mesh, batches)
            stack.callback(host.close)
        restored = checkpoints.restore_newest(
            abstract, fingerprint, None if host is None else host.restore
        )
        if restored is None:
            if host is not None:
                host.fill()
            state = init_state(
                init_params,
                transform,
                mesh,
                ema=ema,
                tables=tables,
                model_state=model_state,
                placement=placement,
                seed=seed,
            )
            progress: dict[str, Any] = {}
        else:
            state, progress = restored.state, restored.progress
            batches.restore(restored.data)
        step = int(jax.device_get(state.step))
        if step > config.n_steps:
            raise ConfigError(
                "train.n_steps", config.n_steps, f"the run is at step {step} already"
            )

        if host is not None:
            host.start(state)
        source = batches if host is None else host

        run = Run(config, step, progress, learning_rate, bytes_per_token)
        if primary:
            run.add(
                stack, Every(config.log_every, Recorder(run_dir, restored_step=step))
            )
            run.add(stack, Progress(config.log_every))
        if config.profile_steps is not None and primary:
            run.add(stack, Profiler(run_dir, *config.profile_steps))
        if config.health_every is not None and health_fn is not None:
            run.add(stack, MemoryHealth(health_fn, config.health_every, run.emit))
        for hook in hooks:
            run.add(stack, hook)
        for note in notes:
            run.message(note)
        if restored is not None:
            run.message(f"resumed at step {step} of {config.n_steps}")

        def evaluate(max_batches: int | None) -> dict[str, float]:
            params = state.params if ema is None else ema.merge(state.ema, state.params)
            if tables is not None:
                dense, values = tables.split(params)
                params = tables.merge(dense, tables.mean(values, state.table_state))
            values = eval_fn(params, max_batches)
            return {name: float(value) for name, value in values.items()}

        stop = stack.enter_context(StopSignal())
        stack.enter_context(jax.transfer_guard("disallow"))
        while True:
            if host is not None:
                state, squares = host.settle(state)
                run.streamed(squares)
            stopped_by = stop.requested()
            done = step >= config.n_steps
            eval_due = run.eval_due(step, done)
            save_due = run.save_due(step, done or stopped_by is not None)
            if done or stopped_by or eval_due or save_due:
                run.settle(checkpoints)
            if host is not None and (done or eval_due or save_due):
                with run.aside():
                    host.refresh(state)
            if eval_due:
                with run.aside():
                    run.evaluated(step, evaluate(config.max_eval_batches))
                save_due |= step > run.saved_step and checkpoints.is_best(
                    run.bpb_at(step)
                )
            if save_due:
                with run.aside():
                    checkpoints.save(
                        state,
                        host=None if host is None else host.save,
                        data=source.state(),
                        fingerprint=fingerprint,
                        progress=run.progress(),
                        bpb=run.bpb_at(step),
                    )
                run.saved_step = step
            if done or stopped_by:
                break
            batch, state = _next(batches, host, state, mesh, step)
            run.before_step(step, state, batch)
            state, metrics = step_fn(state, batch)
            if host is not None:
                host.started()
            run.settle(checkpoints)
            step += 1
            run.pending = (step, metrics)

        final = None
        with jax.transfer_guard("allow"):
            if done:
                final = run.last_eval
                if config.max_eval_batches is not None or final is None:
                    final = evaluate(None)
                run.emit("final", step, final)
            checkpoints.wait()
            result = FitResult(
                state=state,
                step=step,
                stopped_by=None if done else stopped_by,
                final=final,
                best_step=checkpoints.best_step,
                best_bpb=checkpoints.best_bpb,
                tokens_seen=run.tokens_seen,
                train_s=run.clock.train_s,
            )
            if not done:
                run.message(f"{stopped_by}: {_saved_text(step)}; rerun to go on")
        return result


def _check(
    config: TrainConfig,
    mesh: Mesh,
    health_fn: HealthFn | None,
    tables: TableTraining | None,
    placement: Placement | None,
) -> None:
    for name, nothing, why in (
        ("table", tables is None, "no table in mode 'rows'"),
        ("tensor", placement is None, "no placement, so nothing is divided over it"),
    ):
        if nothing and mesh.shape[name] != 1:
            raise ConfigError(f"mesh.{name}", mesh.shape[name], f"1: {why}")
    if config.health_every is not None and health_fn is None:
        raise ConfigError("train.health_every", config.health_every, "None: no memory")


def _next(
    batches: Batches, host: HostTables | None, state: TrainState, mesh: Mesh, step: int
) -> tuple[Any, TrainState]:
    """The next batch on the devices, and the state with its rows in place."""
    try:
        if host is not None:
            return host.next(state)
        return global_batch(mesh, next(batches)), state
    except StopIteration:
        raise TrainingError(f"the training data ended at step {step}") from None


def _saved_text(step: int) -> str:
    return f"saved at step {step}" if step else "nothing was trained yet"
