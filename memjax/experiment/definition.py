"""The experiment: model, data, optimizer, training and mesh in one frozen config.

What: `Experiment`, with `validate` for what no part can check alone, and `save`.
Why: the one place where all parts meet; what it holds reproduces a run.
When not: making the model or running it; `memjax.build` and `memjax.run` do that.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from memjax.data.config import DataConfig
from memjax.errors import ConfigError, DataError
from memjax.experiment import paths
from memjax.models.config import ModelConfig
from memjax.models.hash_columns import hash_columns
from memjax.models.parameter_axes import parameter_axes
from memjax.models.parameters import abstract_params
from memjax.optim.config import OptimConfig
from memjax.optim.labels import path_name
from memjax.parallel.logical_axes import AXES, LogicalRules
from memjax.parallel.mesh import MeshConfig
from memjax.train.config import TrainConfig

CONFIG_FILE = "config.json"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides a run; plain data, so it prints, compares and saves.

    Attributes:
        name: names the default run folder.
        model: the language model and its memories.
        data: corpora, tokenizer, context, batch.
        optim: optimizers by group, schedule, clipping.
        train: steps, and the periods of saving and evaluating.
        mesh: how devices are laid out.
        seed: of initial weights and dropout. The order of the data is `data.seed`.
        notes: one line for people.
    """

    name: str
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    seed: int = 0
    notes: str = ""

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) and self.name
        if not named or any(c in self.name for c in "/\\\0") or self.name[0] == ".":
            raise ConfigError(
                "name", self.name, "a text without / that can be a folder"
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise ConfigError("seed", self.seed, f"0 <= seed < {2**31}")

    def validate(self, n_devices: int | None = None) -> "Experiment":
        """Check every field's type and what joins two parts; returns itself.

        Args:
          n_devices: also check the mesh and the batch against this many devices; None
            leaves out what only a machine decides.

        Raises:
          ConfigError: the dotted field, its value, what is allowed.
          MissingExtraError: the tokenizer needs a package that is not installed.
          DataError: the tokenizer file is missing or broken.
        """
        paths.to_dict(self)
        sizes = {name: getattr(self.mesh, name) for name in AXES}
        if n_devices is not None:
            sizes = self.mesh.sizes(n_devices)
        self._check_batch(max(sizes["data"], 1) * max(sizes["fsdp"], 1))
        self._check_model_axes({name: max(size, 1) for name, size in sizes.items()})
        self._check_host_tables(sizes["table"])
        self._check_table_axis(n_devices)
        self._check_vocabulary()
        return self

    def _check_batch(self, shards: int) -> None:
        rows, parts = self.data.batch_size, self.train.accumulate_steps
        if rows % parts:
            allowed = f"a divisor of data.batch_size = {rows}"
            raise ConfigError("train.accumulate_steps", parts, allowed)
        product = "mesh.data * mesh.fsdp"
        if rows % (shards * parts):
            product = f"{product} * train.accumulate_steps = {shards * parts}"
            raise ConfigError("data.batch_size", rows, f"a multiple of {product}")
        rows = self.data.eval_batch_size
        if rows % shards:
            allowed = f"a multiple of {product} = {shards}"
            raise ConfigError("data.eval_batch_size", rows, allowed)

    def _check_model_axes(self, sizes: dict[str, int]) -> None:
        """What is split must divide; no array may have two axes on one mesh axis."""
        model, rules = self.model, LogicalRules(tuple(sizes.items()), self.mesh.rules)
        wanted = {
            "embed": ("model.d_model", model.d_model),
            "heads": ("model.n_heads", model.n_heads),
            "kv_heads": ("model.n_kv_heads", model.n_kv_heads),
        }
        if not all(model.has_experts(layer) for layer in range(model.n_layers)):
            wanted["mlp"] = ("model.d_ff", model.d_ff)
        if "vocab" in dict(self.mesh.rules):  # else one that does not divide is whole
            wanted["vocab"] = ("model.vocab_size", model.vocab_size)
        rules.check_sizes(wanted)
        if self.mesh.rules:
            leaves = jax.tree_util.tree_leaves_with_path(abstract_params(model))
            for path, leaf in leaves:
                name = path_name(path)
                rules.spec(name, parameter_axes(name, leaf.shape), leaf.shape)

    def _check_host_tables(self, parts: int) -> None:
        """What tables on the host do not have; what nothing but they would read."""
        on_host = any(memory.table_mode == "host" for memory in self.model.memories)
        optim, train = self.optim, self.train
        for name, value, only in (
            ("mesh.table", parts, 1),
            ("optim.table_ema_decay", optim.table_ema_decay, None),
            ("optim.table_stochastic_rounding", optim.table_stochastic_rounding, False),
        ):
            if on_host and value != only:
                raise ConfigError(name, value, f"{only} with tables on the host")
        for name, value, only in (
            ("train.host_tables", train.host_tables, "memory"),
            ("train.host_slots", train.host_slots, None),
        ):
            if not on_host and value != only:
                want = f"{only!r} without a memory in table_mode 'host'"
                raise ConfigError(name, value, want)

    def _check_table_axis(self, n_devices: int | None) -> None:
        parts = self.mesh.table
        if n_devices is not None:
            parts = self.mesh.sizes(n_devices)["table"]
        if parts == 1:
            return
        divided = [
            (i, memory)
            for i, memory in enumerate(self.model.memories)
            if memory.table_mode == "rows"
        ]
        if not divided:
            raise ConfigError(
                "mesh.table", self.mesh.table, "1 without a memory in table_mode 'rows'"
            )
        columns = hash_columns(self.model)
        for path, rows in columns if self.mesh.table_by == "hash_columns" else ():
            if len(rows) % max(parts, 1):
                allowed = f"a divisor of the {len(rows)} hash columns of {path}"
                raise ConfigError("mesh.table", parts, allowed)
        if self.mesh.table_by == "hash_columns" and not columns:
            raise ConfigError(
                "mesh.table_by",
                "hash_columns",
                "another without a table in mode 'rows' that is read by hash column",
            )
        for i, memory in divided:
            widths = memory.table_widths(self.model.d_model)
            for table, width in widths.items():
                if self.mesh.table_by == "columns" and parts > 1 and width % parts:
                    own = [
                        f for f in ("row_width", "value_width") if hasattr(memory, f)
                    ]
                    raise ConfigError(
                        f"model.memories.{i}.{own[0] if own else table}",
                        width,
                        f"a multiple of the {parts} parts of mesh.table by columns",
                    )

    def _check_vocabulary(self) -> None:
        from memjax.data.compressed_vocab import load_classes
        from memjax.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.data.tokenizer)
        if self.model.vocab_size != tokenizer.vocab_size:
            raise ConfigError(
                "model.vocab_size",
                self.model.vocab_size,
                f"{tokenizer.vocab_size}, the size of the tokenizer "
                f"{self.data.tokenizer!r}",
            )
        for i, memory in enumerate(self.model.memories):
            wanted = getattr(memory, "n_token_classes", None)
            if wanted is not None and wanted != load_classes(self.data.tokenizer).size:
                raise ConfigError(
                    f"model.memories.{i}.n_token_classes",
                    wanted,
                    f"None or {load_classes(self.data.tokenizer).size}, the classes of "
                    f"the tokenizer {self.data.tokenizer!r}",
                )


def config_hash(experiment: Experiment) -> str:
    """Twelve hex digits that change with every field but `name` and `notes`."""
    plain = paths.to_dict(experiment)
    del plain["name"], plain["notes"]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def save(experiment: Experiment, path: str | os.PathLike[str]) -> Path:
    """Write the experiment as JSON, whole or not at all; returns the path.

    `load_experiment` of that file gives an equal experiment. Raises DataError when the
    folder cannot be written.
    """
    return write_json(path, paths.to_dict(experiment))


def write_json(path: str | os.PathLike[str], plain: Any) -> Path:
    """Write plain data to `path` through a temporary file beside it."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"cannot write {target}: {error.strerror}") from error
    return target
