"""The device mesh and how a host batch lands on it.

What: axis sizes as a plain config, `make_mesh`, and `global_batch` for any processes.
Why: axis types are pinned to Auto in this one place, and batches are placed explicitly.
When not: shardings of parameters and tables are decided by whoever owns those arrays.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from memjax.errors import ConfigError, DataError

AXES = ("data", "fsdp", "tensor", "table")
DIVISIONS = ("rows", "columns")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices.

    Attributes:
        data: the batch is split over this axis; -1 takes the devices left over.
        fsdp: dense parameters may be split over this axis.
        tensor: single weight matrices may be split over this axis.
        table: value tables in mode "rows" are split over this axis.
        table_by: "rows", padded up to equal parts, or "columns", equal parts.

    At most one axis may be -1; the others are at least 1.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    table: int = 1
    table_by: str = "rows"

    def __post_init__(self) -> None:
        if self.table_by not in DIVISIONS:
            raise ConfigError("mesh.table_by", self.table_by, f"one of {DIVISIONS}")
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
        fixed = int(np.prod([size for size in sizes.values() if size != -1]))
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


def data_reader(mesh: Mesh) -> tuple[int, int]:
    """Which reader of the training data this process is: (reader, n_readers).

    Processes that hold the same rows of the "data" axis are the same reader and must
    feed the same rows. With one process this is (0, 1).

    Raises:
        ConfigError: the rows this process holds are not one of equal consecutive
            blocks, so that no reader number describes them.
    """
    grid = np.asarray(mesh.devices).reshape(mesh.shape["data"], -1)
    here = jax.process_index()
    rows = [
        i for i, row in enumerate(grid) if any(d.process_index == here for d in row)
    ]
    n_rows = len(grid)
    block = len(rows)
    aligned = rows == list(range(rows[0], rows[0] + block)) and rows[0] % block == 0
    if not aligned or n_rows % block:
        raise ConfigError(
            "mesh.data", n_rows, f"equal blocks of rows a process; this one has {rows}"
        )
    return rows[0] // block, n_rows // block


def global_batch(mesh: Mesh, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Place this process's rows of a batch on the mesh, split over the "data" axis.

    Args:
        mesh: the mesh.
        batch: numpy arrays whose axis 0 is the rows of this process's reader; int32,
            float32 or narrower.

    Returns:
        Global arrays sharded over "data" on axis 0, replicated over the other axes.

    Raises:
        DataError: an array of 64-bit numbers (it would wrap silently).
        ConfigError: the rows do not divide over the devices of the "data" axis.
    """
    _, n_readers = data_reader(mesh)
    shards = mesh.shape["data"] // n_readers
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    placed = {}
    for name, array in batch.items():
        array = np.asarray(array)
        if array.dtype.itemsize > 4:
            raise DataError(
                f"batch field {name} has dtype {array.dtype}, allowed: 32 bits or fewer"
            )
        if array.shape[0] % shards:
            raise ConfigError(
                "data.batch_size",
                array.shape[0] * n_readers,
                f"a multiple of the data axis of the mesh ({mesh.shape['data']})",
            )
        # With several processes jax counts this placement as an implicit transfer.
        with jax.transfer_guard("allow"):
            placed[name] = jax.make_array_from_process_local_data(sharding, array)
    return placed
