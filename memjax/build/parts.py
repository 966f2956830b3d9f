"""The functions of an experiment: model, loss, labels, fingerprint.

What: `Parts`, which makes each of them when it is first asked for.
Why: the floors below are handed functions and do not know each other.
When not: starting a run is `memjax.run`; notebooks call ops, layers and transforms.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from memjax.build.host_plan import (
    HostPlan,
    SlotTraining,
    given_tables,
    host_plans,
    slots_of_tables,
)
from memjax.build.placement import (
    activation_sharding,
    placement,
    table_layout,
    table_sharding,
    table_shardings,
)
from memjax.data.compressed_vocab import CompressedVocab, load_classes
from memjax.data.document_pieces import document_pieces
from memjax.data.pipeline import prepare
from memjax.data.row_ids import PREFIX, RowIds, given_rows
from memjax.data.tokenizer import load_tokenizer
from memjax.evaluate.bits_per_byte import token_nats
from memjax.experiment import Experiment
from memjax.layers.record import LOSSES
from memjax.layers.row_grad import value_and_row_grad
from memjax.layers.table import READS, TABLES
from memjax.models.language_model import LanguageModel
from memjax.models.layouts import layouts, table_reads
from memjax.models.parameters import (
    STATE,
    abstract_params,
    labels,
    merge_variables,
    row_tables,
    split_variables,
    state_collections,
)
from memjax.optim.build_tables import build_table_optimizer, check_table_settings
from memjax.optim.ema import ema_params, init_ema, update_ema
from memjax.optim.labels import apply_label_rules, path_name
from memjax.optim.tables import TablesOptimizer
from memjax.parallel.division import divisions_of
from memjax.parallel.logical_axes import ActivationSharding
from memjax.parallel.row_sharding import RowSharding
from memjax.train.model_state import ModelState
from memjax.train.state import Ema, Placement, TrainState
from memjax.train.tables import TableTraining


@dataclass(frozen=True)
class Parts:
    """The functions of an experiment; cheap to make, nothing is allocated."""

    experiment: Experiment
    mesh: Any = None

    @cached_property
    def model(self) -> LanguageModel:
        """The Linen module."""
        return LanguageModel(
            self.experiment.model,
            self.table_sharding,
            self.classes,
            self.token_counts,
            activations=self.activations,
        )

    @cached_property
    def activations(self) -> ActivationSharding | None:
        """How activations are divided over the mesh."""
        return activation_sharding(self.experiment, self.mesh)

    @cached_property
    def placement(self) -> Placement | None:
        """The shardings of a state; None where every device has all dense weights."""
        dense, _ = self.split(self.abstract)
        return placement(self.experiment, self.mesh, dense)

    @cached_property
    def classes(self) -> CompressedVocab | None:
        """The classes of the tokenizer's ids; None when no memory wants them."""
        if not self.experiment.model.wants_classes:
            return None
        return load_classes(self.experiment.data.tokenizer)

    @cached_property
    def row_ids(self) -> RowIds | None:
        """What adds rows of tables to the batches; None when the model hashes."""
        found = layouts(self.experiment.model)
        if self.experiment.data.hash_on == "device":
            on_host = {
                name for plan in self.host_plans.values() for name in plan.fields
            }
            found = {k: x for k, x in found.items() if f"{PREFIX}{k}" in on_host}
            if not found:
                return None
        classes = None if self.classes is None else self.classes.table
        return RowIds(found, classes)

    @cached_property
    def host_plans(self) -> dict[str, HostPlan]:
        """{path: what the device holds of it} of the tables in mode "host"."""
        return host_plans(self.experiment)

    @cached_property
    def token_counts(self) -> tuple[int, ...] | None:
        """How often each id occurs in train; None when no routing is balanced by it."""
        experts = self.experiment.model.experts
        if experts is None or experts.routing != "balanced":
            return None
        prepared, counts = prepare(self.experiment.data), 0
        for part in prepared.parts:
            for ids, _ in document_pieces(prepared.store(part.name, "train")):
                counts = counts + np.bincount(
                    ids.ravel(), minlength=self.experiment.model.vocab_size
                )
        return tuple(np.atleast_1d(counts).tolist())

    @cached_property
    def table_sharding(self) -> RowSharding | None:
        """How tables in mode "rows" lie on several devices, divided or in copies."""
        return table_sharding(self.experiment, self.mesh)

    @cached_property
    def row_tables(self) -> dict[str, int]:
        """{path: rows} of the tables in mode "rows"."""
        return row_tables(self.experiment.model)

    @cached_property
    def abstract(self) -> Any:
        """Shapes and dtypes of the parameters, tables among them, without padding."""
        return abstract_params(self.experiment.model)

    @cached_property
    def labels(self) -> Any:
        """The optimizer's label of every parameter, after the user's rules."""
        found = apply_label_rules(
            labels(self.abstract), self.abstract, self.experiment.optim.label_rules
        )
        of_rows, dense = {}, []
        for path, label in jax.tree_util.tree_leaves_with_path(found):
            name = path_name(path)
            if name in self.row_tables:
                of_rows[name] = label
            elif label == "table":
                dense.append(name)
        precision = self.experiment.model.precision.tables
        check_table_settings(self.experiment.optim, dense, of_rows, precision)
        return found

    @cached_property
    def dense_labels(self) -> Any:
        """The labels of the parameters that are not tables in mode "rows"."""
        return self.split(self.labels)[0]

    def split(self, params: Any) -> tuple[Any, Any]:
        """(the rest, tables in mode "rows") of a tree of both."""
        variables = split_variables(params, self.experiment.model)
        tables = variables.pop(TABLES, {})
        return merge_variables(variables), tables

    @staticmethod
    def merge(dense: Any, tables: Any) -> Any:
        """The inverse of `split`."""
        return merge_variables({"params": dense, TABLES: tables})

    @cached_property
    def model_state(self) -> ModelState | None:
        """How the state of the model is parted; None when it has none."""

        def split(tree: Any) -> tuple[Any, Any]:
            variables = split_variables(tree, self.experiment.model)
            held = {name: variables.pop(name) for name in STATE if name in variables}
            return merge_variables(variables), held

        def merge(params: Any, held: Any) -> Any:
            return merge_variables({"params": params, **held})

        return ModelState(split, merge) if self.state_collections else None

    @cached_property
    def state_collections(self) -> tuple[str, ...]:
        """The collections that the forward pass changes."""
        return state_collections(self.experiment.model)

    @cached_property
    def ema(self) -> Ema | None:
        """The running average of the dense weights; None when the run keeps none."""
        decay = self.experiment.optim.ema_decay
        if decay is None:
            return None
        return Ema(
            init=self._init_ema,
            update=lambda ema, params, step: update_ema(ema, params, decay, step),
            merge=ema_params,
        )

    def _init_ema(self, params: Any) -> Any:
        labelled = self.labels
        if self.model_state is not None:
            _, held = self.model_state.split(params)
            held = jax.tree.map(lambda _: "state", held)
            labelled = self.model_state.merge(labelled, held)
        return init_ema(params, labelled)

    def init_params(self, key: Array) -> Any:
        """Parameters from a typed key; traceable. Tables on the host: empty slots."""
        tokens_11 = jnp.zeros((1, 1), jnp.int32)
        params = merge_variables(self.model.init(key, tokens_11))
        return slots_of_tables(params, self.host_plans) if self.host_plans else params

    def logits(
        self,
        params: Any,
        batch: dict[str, Array],
        *,
        key: Array | None = None,
        drop_memory: bool = False,
    ) -> Array:
        """[B, T, V]; a key turns dropout on."""
        variables = split_variables(params, self.experiment.model)
        variables = given_tables(variables, batch)
        return self._apply(variables, batch, key, drop_memory=drop_memory)

    def _apply(
        self, variables: Any, batch: dict[str, Array], key: Array | None, **options: Any
    ) -> Any:
        return self.model.apply(
            variables,
            batch["tokens"],
            batch["segments"],
            batch["positions"],
            rows=given_rows(batch),
            train=key is not None,
            rngs=None if key is None else {"dropout": key},
            **options,
        )

    def loss(
        self, params: Any, batch: dict[str, Array], key: Array, **options: Any
    ) -> tuple[Array, dict[str, Array]]:
        """Summed nats of the weighted targets, and their summed weight."""
        return _summed_nats(self.logits(params, batch, key=key, **options), batch)

    def training_loss(
        self, params: Any, batch: dict[str, Array], key: Array
    ) -> tuple[Array, Any]:
        """(objective, sums), or (objective, (sums, new state)) where there is state.

        The objective is the summed nats and, times the summed weight, the losses that
        layers add. Then sums has both apart, as "nats" and "auxiliary_loss".
        """
        variables = split_variables(params, self.experiment.model)
        objective, (_, aux) = self._objective(variables, batch, key)
        return objective, aux

    def _objective(self, variables: Any, batch: Any, key: Array) -> Any:
        """(objective, (what the forward pass returned beside the logits, aux))."""
        logits_BTV, found = self._apply(
            variables, batch, key, mutable=[READS, LOSSES, *self.state_collections]
        )
        nats, sums = _summed_nats(logits_BTV, batch)
        added = jax.tree.leaves(found.get(LOSSES, {}))
        if added:
            auxiliary = sums["weight"] * sum(jnp.sum(loss) for loss in added)
            sums |= {"nats": nats, "auxiliary_loss": auxiliary}
            nats = nats + auxiliary
        if self.model_state is None:
            return nats, (found, sums)
        held = {name: found[name] for name in self.state_collections}
        return nats, (found, (sums, jax.lax.stop_gradient(held)))

    def gradients(self, params: Any, batch: dict[str, Array], key: Array) -> Any:
        """((objective, aux), (gradients of dense parameters, row gradients))."""
        variables = split_variables(params, self.experiment.model)
        found, grads = value_and_row_grad(
            lambda variables: self._objective(variables, batch, key), has_aux=True
        )(variables)
        return found, (grads.params, grads.tables)

    def seen(self, state: TrainState) -> Any:
        """The parameters of a state as its batch reads them."""
        if not self.host_plans or self.tables is None:
            return state.params
        dense, values = self.split(state.params)
        return self.merge(dense, self.tables.read(values, state.table_state))

    @cached_property
    def table_optimizers(self) -> TablesOptimizer:
        """The optimizer of the tables by rows."""
        named = {
            path_name(path): label
            for path, label in jax.tree_util.tree_leaves_with_path(self.labels)
        }
        return build_table_optimizer(
            self.experiment.optim,
            {path: named[path] for path in self.row_tables},
            self.experiment.train.n_steps,
            reads=self._reads(),
            n_rows=self.row_tables,
            sharding=self.table_sharding,
            seed=self.experiment.seed,
            kernels={
                path: found.kernel
                for path, found in table_reads(self.experiment.model).items()
            },
            on_host={path: plan.n_reads for path, plan in self.host_plans.items()},
        )

    @cached_property
    def tables(self) -> TableTraining | None:
        """How the tables in mode "rows" are trained; None without any."""
        if not self.row_tables:
            return None
        sharding, optimizer = self.table_sharding, self.table_optimizers
        training = SlotTraining(optimizer, self.host_plans)

        return TableTraining(
            split=self.split,
            merge=self.merge,
            gradients=self.gradients,
            init=training.init,
            apply=training.apply,
            mean=training.mean,
            shardings=table_shardings(self.mesh, sharding, optimizer),
            layout=table_layout(self.row_tables, sharding),
            repartition=lambda tables, state, old: optimizer.repartition(
                tables, state, divisions_of(old)
            ),
            keeps_mean=self.experiment.optim.table_ema_decay is not None,
            read=training.read,
        )

    def _reads(self) -> dict[str, int]:
        """Rows that a step reads from each table in mode "rows"."""
        tokens = self.experiment.data.batch_size * self.experiment.data.context
        reads = table_reads(self.experiment.model)
        return {path: tokens * reads[path].rows for path in self.row_tables}

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must share beside the shapes: tokens and addressing."""
        model = self.experiment.model
        addressing = {}
        if self.classes is not None:
            addressing["classes"] = self.classes.sha256
        if self.token_counts is not None:
            counts = np.asarray(self.token_counts, np.int64)
            addressing["token_counts"] = hashlib.sha256(counts.tobytes()).hexdigest()
        experts = model.experts
        if experts is not None and experts.routing in ("random", "sliced"):
            # numpy does not promise its random stream for ever.
            table = experts.table(model.vocab_size)
            addressing["expert_table"] = hashlib.sha256(table.tobytes()).hexdigest()
        return addressing | {
            "tokenizer": load_tokenizer(self.experiment.data.tokenizer).fingerprint,
            "ngram_layouts": {
                str(layer): layout.fingerprint()
                for layer, layout in layouts(model).items()
            },
        }


def _summed_nats(
    logits_BTV: Array, batch: dict[str, Array]
) -> tuple[Array, dict[str, Array]]:
    nats_BT = token_nats(logits_BTV, batch["targets"]) * batch["weights"]
    return jnp.sum(nats_BT), {"weight": jnp.sum(batch["weights"])}
