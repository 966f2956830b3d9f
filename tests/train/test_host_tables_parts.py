"""What tables on the host are made of: slots, arrays, initial rows, streamed steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import CheckpointError, ConfigError, TrainingError
from memjax.ops.init_rows import init_rows
from memjax.ops.row_gradient import UniqueRows
from memjax.ops.split import Split
from memjax.optim.sinkhorn_rows import sinkhorn_rows
from memjax.train.host_store import HostLeaf, HostStore
from memjax.train.host_tables import find_rows
from memjax.train.slot_cache import SlotCache


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blocks_of_initial_rows_are_those_of_the_whole_table(dtype):
    init = jax.nn.initializers.normal(0.02)
    key = jax.random.key(3)
    whole = np.asarray(jax.jit(lambda: init(key, (301, 5), dtype))())
    rows = init_rows(init, jax.random.key_data(key), 5, dtype)
    parts = [(0, 100), (100, 100), (200, 101)]
    found = np.concatenate([np.asarray(rows(*part)) for part in parts])
    np.testing.assert_array_equal(found.view(np.uint8), whole.view(np.uint8))


def test_rows_beyond_the_32nd_bit_of_the_counter_are_others():
    init = jax.nn.initializers.normal(1.0)
    rows = init_rows(init, jax.random.key_data(jax.random.key(0)), 4, jnp.float32)
    first, far = np.asarray(rows(0, 8)), np.asarray(rows(2**30, 8))
    assert not np.array_equal(first, far)
    across = np.asarray(rows(2**30 - 4, 8))
    np.testing.assert_array_equal(across[4:], far[:4])


def test_initial_rows_refuse_what_they_cannot_give():
    with pytest.raises(ConfigError, match="threefry2x32"):
        init_rows(jax.nn.initializers.ones, np.zeros(4, np.uint32), 2, jnp.float32)


def test_every_row_of_a_step_has_a_slot_of_its_own():
    rng = np.random.default_rng(0)
    n_rows, n_slots, lag = 200, 60, 2
    cache = SlotCache(n_rows, n_slots, lag)
    steps = [np.unique(rng.integers(0, n_rows, 12)) for _ in range(60)]
    held = np.full(n_slots, n_rows)  # what the device has
    n_left = 0
    for step, (rows, after) in enumerate(zip(steps, steps[1:], strict=False)):
        busy = np.concatenate(steps[max(0, step - lag) : step + 2])
        idle = rng.random(n_slots) < 0.9
        found = cache.plan(step, rows, after, idle)
        np.testing.assert_array_equal(held[found.out_slots], found.out_rows)
        assert not np.isin(found.out_rows, busy).any()
        assert idle[found.out_slots].all()
        held[found.out_slots] = n_rows
        assert (held[found.in_slots] == n_rows).all()
        held[found.in_slots] = found.in_rows
        np.testing.assert_array_equal(held[found.slots_U], rows)
        real = held[held < n_rows]
        assert len(real) == len(set(real.tolist()))
        n_left += len(found.out_rows)
    assert n_left > 50


def test_rows_that_were_not_needed_for_longest_leave():
    cache = SlotCache(10, 3)
    none = np.zeros(0, np.int64)
    for step, row in enumerate([4, 5, 6, 4]):
        cache.plan(step, np.array([row]), none)
    assert cache.plan(4, np.array([7]), none).out_rows.tolist() == [5]
    with pytest.raises(TrainingError, match="only 1 can; allowed: more slots"):
        cache.plan(5, np.array([0, 1]), np.array([4, 7]))


def test_places_count_the_distinct_rows_of_all_fields():
    batch = {"a": np.array([[7, 3], [7, 9]]), "b": np.array([3, 1]), "c": np.ones(2)}
    found, (rows,) = find_rows(batch, [("a", "b")])
    assert rows.tolist() == [1, 3, 7, 9]
    np.testing.assert_array_equal(rows[found["a"]], batch["a"])
    np.testing.assert_array_equal(rows[found["b"]], batch["b"])
    assert found["a"].dtype == np.int32
    assert found["c"] is batch["c"]


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_store_gathers_writes_saves_and_restores(tmp_path, on_disk, monkeypatch):
    monkeypatch.setattr("memjax.train.host_store.BLOCK_BYTES", 40)
    leaves = {
        "a/table": HostLeaf((3,), np.dtype(np.float32), None),
        "place": HostLeaf((), np.dtype(np.int32), -1),
    }
    store = HostStore(7, leaves, tmp_path / "live" if on_disk else None)
    store.fill("a/table", lambda first, n: np.full((n, 3), first, np.float32))
    assert store["a/table"][:, 0].tolist() == [0, 0, 0, 3, 3, 3, 6]
    assert store["place"].tolist() == [-1] * 7
    rows = np.array([5, 2])
    table, place = store.gather(rows, 4)
    assert table[:, 0].tolist() == [3, 0, 0, 0] and place.tolist() == [-1, -1, 0, 0]
    store.write(rows, [table + 1, np.array([8, 9, 0, 0], np.int32)])
    store.save(tmp_path / "saved")
    other = HostStore(7, leaves, tmp_path / "live" if on_disk else None)
    other.restore(tmp_path / "saved")
    assert other["place"].tolist() == [-1, -1, 9, -1, -1, 8, -1]
    np.testing.assert_array_equal(other["a/table"], store["a/table"])
    with pytest.raises(CheckpointError, match=r"holds float32\[7, 3\], wanted"):
        HostStore(8, leaves).restore(tmp_path / "saved")
    assert not on_disk or not list((tmp_path / "live").iterdir())
    (tmp_path / "saved" / "place.npy").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        other.restore(tmp_path / "saved")


def test_a_folder_without_room_or_rights_is_refused(tmp_path):
    (tmp_path / "file").touch()
    leaves = {"table": HostLeaf((3,), np.dtype(np.float32), None)}
    with pytest.raises(TrainingError, match="12 bytes cannot be kept in .*file"):
        HostStore(1, leaves, tmp_path / "file")
    with pytest.raises(TrainingError, match="allowed .train.host_tables.: a folder"):
        HostStore(2**55, leaves, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_streamed_step_is_the_dense_one():
    n_rows, width, n_reads = 500, 16, 24
    rng = np.random.default_rng(0)
    whole = sinkhorn_rows(0.1, capacity=40, n_iterations=5)
    held = sinkhorn_rows(0.1, capacity=40, n_iterations=5, held_reads=n_reads)
    table = jnp.asarray(rng.normal(size=(n_rows, width)), jnp.float32)
    state, slots = whole.init(table), held.init(table)
    step, held_step = jax.jit(whole.apply), jax.jit(held.apply, static_argnums=3)
    host = np.array(table)
    for number in range(3):
        ids = np.sort(rng.choice(n_rows, n_reads, replace=False)).astype(np.int32)
        grads = jnp.asarray(rng.normal(size=(n_reads, width)), jnp.float32)
        rows = UniqueRows(jnp.asarray(ids), grads, jnp.int32(n_reads))
        table, state, metrics = step(rows, state, table)
        new, slots, found = held_step(rows, slots, jnp.asarray(host), Split(n_rows))
        host = np.array(new)
        assert bool(slots.held.due) == (number > 0)
        assert int(metrics["overflow_steps"]) == int(found["overflow_steps"]) == number
        if number == 0:
            np.testing.assert_array_equal(host, np.asarray(table))
            continue
        momentum, place = np.array(slots.momentum_RW), np.array(slots.place_R)
        done = held.streamed(
            jax.tree.map(np.array, slots),
            np.arange(n_rows, dtype=np.int32),
            host,
            momentum,
            place,
            [slice(i, min(i + 77, n_rows)) for i in range(0, n_rows, 77)],
        )
        np.testing.assert_allclose(host, table, rtol=2e-5, atol=2e-6)
        assert done.square**0.5 == pytest.approx(float(metrics["update_norm"]), 1e-5)
        active = np.asarray(state.ids_A)
        np.testing.assert_array_equal(done.row_S[: len(active)], active)
        np.testing.assert_allclose(done.state.outside_2, state.outside_2, rtol=1e-5)
        np.testing.assert_allclose(
            done.state.active_AW, state.active_AW, rtol=1e-4, atol=1e-6
        )
        # The next step has all rows at hand again, each in its own slot.
        back = np.arange(n_rows)
        full = np.array(momentum)
        slots = jax.tree.map(jnp.asarray, done.state)._replace(
            momentum_RW=jnp.asarray(full),
            place_R=jnp.asarray(place[back]),
            ids_A=jnp.asarray(active),
        )
