"""The device mesh and how a host batch lands on it.

What: axis sizes as a plain config, `make_mesh`, and `global_batch` for any processes.
Why: axis types are pinned to Auto in this one place, and batches are placed explicitly.
When not: how parameters are divided is `logical_axes`, how tables are `row_sharding`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from memjax.errors import ConfigError, DataError
from memjax.parallel.division import DIVISIONS
from memjax.parallel.logical_axes import (
    AXES,
    BATCH_AXES,
    Rules,
    batch_axes,
    check_rules,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices.

    Attributes:
        data: copies of the dense parameters; -1 takes the devices left over.
        fsdp: one axis of each large dense parameter, of its average and of its
            optimizer's state is split over this axis, and gathered where it is used.
        tensor: heads, the inner width of the feed-forward and, where it divides, the
            vocabulary are split over this axis.
        table: value tables in mode "rows" are split over this axis.
        table_by: how; see `row_sharding.Division`. "rows", padded up to equal parts;
            "columns", equal parts of each row; or "hash_columns", equally many whole
            hash columns (tables that are not read by hash column: by rows).
        rules: pairs (logical axis, mesh axis or None) that take precedence over
            `logical_axes.DEFAULT_RULES`.

    At most one axis may be -1; the others are at least 1. The rows of a batch are split
    over data, fsdp and table together, see `logical_axes.batch_axes`.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    table: int = 1
    table_by: str = "rows"
    rules: Rules = ()

    def __post_init__(self) -> None:
        if self.table_by not in DIVISIONS:
            raise ConfigError("mesh.table_by", self.table_by, f"one of {DIVISIONS}")
        check_rules(self.rules)
        free = [name for name in AXES if getattr(self, name) == -1]
        for name in AXES:
            size = getattr(self, name)
            if size != -1 and size < 1:
                raise ConfigError(
                    f"mesh.{name}", size, "at least 1, or -1 for the rest"
                )
        if len(free) > 1:
            raise ConfigError(f"mesh.{free[1]}", -1, f"only mesh.{free[0]} may be -1")

    def sizes(self, n_devices: int) -> dict[str, int]:
        """Axis sizes for `n_devices`; ConfigError when the product does not fit."""
        sizes = {name: getattr(self, name) for name in AXES}
        fixed = math.prod(size for size in sizes.values() if size != -1)
        for name, size in sizes.items():
            if size == -1:
                if n_devices % fixed:
                    others = {k: v for k, v in sizes.items() if k != name}
                    raise ConfigError(
                        f"mesh.{name}",
                        -1,
                        f"{n_devices} devices are not a multiple of {fixed} "
                        f"(the product of {others})",
                    )
                sizes[name] = n_devices // fixed
                return sizes
        if fixed != n_devices:
            raise ConfigError(
                "mesh", tuple(sizes.values()), f"a product of {n_devices} devices"
            )
        return sizes


def mesh_for_reading(config: MeshConfig, n_devices: int) -> MeshConfig:
    """The mesh to read a run with that was trained on `config`: the same where its
    product is n_devices, else one whose devices all have copies."""
    try:
        config.sizes(n_devices)
    except ConfigError:
        return MeshConfig()
    return config


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes data, fsdp, tensor and table, all of type Auto.

    Args:
        config: axis sizes.
        devices: which devices to use; all devices of all processes by default.

    Raises:
        ConfigError: the product of the sizes is not the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = config.sizes(len(devices))
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices,
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_shards(sizes: Mapping[str, int]) -> int:
    """Into how many parts axis sizes (`mesh.shape`) split the rows of a batch."""
    return math.prod(sizes[name] for name in BATCH_AXES)


def data_reader(mesh: Mesh) -> tuple[int, int]:
    """Which reader of the training data this process is: (reader, n_readers).

    Processes that hold the same parts of a batch are the same reader and must feed the
    same rows. With one process this is (0, 1).

    Raises:
        ConfigError: the parts this process holds are not one of equal consecutive
            blocks, so that no reader number describes them.
    """
    order = [mesh.axis_names.index(name) for name in (*BATCH_AXES, "tensor")]
    n_parts = batch_shards(mesh.shape)
    grid = np.asarray(mesh.devices).transpose(order).reshape(n_parts, -1)
    here = jax.process_index()
    parts = [
        i for i, part in enumerate(grid) if any(d.process_index == here for d in part)
    ]
    block = len(parts)
    aligned = parts == list(range(parts[0], parts[0] + block)) and not parts[0] % block
    if not aligned or n_parts % block:
        raise ConfigError(
            "mesh",
            dict(mesh.shape),
            f"equal blocks of the {n_parts} parts of a batch for every process; this "
            f"one has {parts}",
        )
    return parts[0] // block, n_parts // block


def global_batch(mesh: Mesh, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Place this process's rows of a batch on the mesh, split over `batch_axes`.

    Args:
        mesh: the mesh.
        batch: numpy arrays whose axis 0 is the rows of this process's reader; int32,
            float32 or narrower.

    Returns:
        Global arrays, axis 0 split over data, fsdp and table, whole over tensor. In
        one process, rows that do not divide over table are whole over it, too.

    Raises:
        DataError: an array of 64-bit numbers (it would wrap silently).
        ConfigError: the rows do not divide into the parts of the mesh.
    """
    _, n_readers = data_reader(mesh)
    n_parts = batch_shards(mesh.shape)
    placed = {}
    for name, array in batch.items():
        array = np.asarray(array)
        if array.dtype.itemsize > 4:
            raise DataError(
                f"batch field {name} has dtype {array.dtype}, allowed: 32 bits or fewer"
            )
        n_rows = array.shape[0] * n_readers
        axes = batch_axes(mesh.shape, n_rows)
        if axes != BATCH_AXES and (n_readers > 1 or not axes):
            product = "mesh.data * mesh.fsdp"
            if n_readers > 1:
                product += f" * mesh.table = {n_parts}"
            else:
                product += f" = {n_parts // mesh.shape['table']}"
            raise ConfigError("data.batch_size", n_rows, f"a multiple of {product}")
        sharding = NamedSharding(mesh, PartitionSpec(axes))
        # With several processes jax counts this placement as an implicit transfer.
        with jax.transfer_guard("allow"):
            placed[name] = jax.make_array_from_process_local_data(sharding, array)
    return placed
