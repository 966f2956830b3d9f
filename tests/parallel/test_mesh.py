"""The mesh: sizes, axis types, and how a batch lands on it."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from memjax.errors import ConfigError, DataError
from memjax.parallel.mesh import MeshConfig, data_reader, global_batch, make_mesh

pytestmark = pytest.mark.multidevice


def test_the_free_axis_takes_the_devices_left_over():
    mesh = make_mesh(MeshConfig(tensor=2))
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 2, "table": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    mesh = make_mesh(MeshConfig(data=1, table=-1), jax.devices()[:3])
    assert mesh.shape["table"] == 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 3}, r"mesh = \(3, 1, 1, 1\).*8 devices"),
        ({"tensor": 3}, "mesh.data = -1.*8 devices are not a multiple of 3"),
        ({"fsdp": 0}, "mesh.fsdp = 0.*at least 1"),
        ({"table": -2}, "mesh.table = -2"),
        ({"fsdp": -1}, "mesh.fsdp = -1.*only mesh.data may be -1"),
    ],
)
def test_impossible_sizes_name_field_and_value(sizes, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(MeshConfig(**sizes))


def test_a_batch_is_split_over_data_and_whole_on_the_other_axes():
    mesh = make_mesh(MeshConfig(tensor=2))
    rows = np.arange(24, dtype=np.int32).reshape(8, 3)
    placed = global_batch(mesh, {"tokens": rows})["tokens"]
    assert placed.sharding.spec == PartitionSpec(("data", "fsdp", "table"))
    np.testing.assert_array_equal(placed, rows)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3)}
    assert data_reader(mesh) == (0, 1)


def test_bad_batches_are_refused():
    mesh = make_mesh(MeshConfig())
    with pytest.raises(ConfigError, match="data.batch_size = 6.*multiple.*8"):
        global_batch(mesh, {"tokens": np.zeros((6, 2), np.int32)})
    with pytest.raises(DataError, match="ids has dtype int64"):
        global_batch(mesh, {"ids": np.array([2**32, 2**31] * 4)})


def test_rows_that_do_not_divide_over_the_table_axis_are_whole_over_it():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, table=4))
    placed = global_batch(mesh, {"ids": np.zeros((16, 3), np.int32)})["ids"]
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3)}
    placed = global_batch(mesh, {"ids": np.zeros((6, 3), np.int32)})["ids"]
    assert {shard.data.shape for shard in placed.addressable_shards} == {(3, 3)}
    with pytest.raises(ConfigError, match="data.batch_size = 5.*mesh.fsdp = 2"):
        global_batch(mesh, {"ids": np.zeros((5, 3), np.int32)})


@pytest.mark.parametrize(
    ("sizes", "process_of", "want"),
    [
        # Two processes of four devices: data, fsdp, tensor, table.
        ((2, 2, 2, 1), [0, 0, 0, 0, 1, 1, 1, 1], (1, 2)),
        ((1, 4, 1, 2), [0, 0, 0, 0, 1, 1, 1, 1], (1, 2)),
        # Tensor lies across the processes: both feed the same rows.
        ((1, 1, 2, 4), [0, 0, 0, 0, 1, 1, 1, 1], (0, 1)),
        ((4, 1, 1, 2), [1, 0, 0, 1, 1, 0, 0, 1], None),
    ],
)
def test_readers_follow_from_where_a_process_stands_on_the_mesh(
    sizes, process_of, want, monkeypatch
):
    devices = np.array([SimpleNamespace(process_index=p) for p in process_of])
    names = ("data", "fsdp", "tensor", "table")
    mesh = SimpleNamespace(
        devices=devices.reshape(sizes),
        axis_names=names,
        shape=dict(zip(names, sizes, strict=True)),
    )
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    if want is not None:
        assert data_reader(mesh) == want
    else:
        with pytest.raises(ConfigError, match=r"equal blocks of the 8 parts.*\[0, 3"):
            data_reader(mesh)
