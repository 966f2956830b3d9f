"""Tables trained by rows inside the loop: equal to dense, resumed, divided."""

import json
import shutil

import jax
import numpy as np
import optax
import pytest

from memjax.errors import CheckpointError, ConfigError
from memjax.parallel.mesh import MeshConfig, make_mesh
from memjax.train.restore_params import restore_params
from memjax.train.run_folder import CHECKPOINT_FOLDER
from memjax.train.state import abstract_state
from tests.train import table_toy, toy

TOLERANCE = dict(rtol=2e-6, atol=2e-7)


def table_of(result):
    return np.asarray(result.state.params["table"])[: toy.V, : toy.V]


def dense_fit(run_dir, **how):
    return toy.toy_fit(
        run_dir, loss_fn=toy.quiet_loss_fn, transform=optax.sgd(0.1), **how
    )


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return dense_fit(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def sinkhorn(tmp_path_factory):
    """Six steps with one part, uninterrupted."""
    return table_toy.fit(tmp_path_factory.mktemp("sinkhorn"), decay=0.9, save_every=3)


def test_rows_equal_dense(dense, tmp_path):
    rows = table_toy.fit(tmp_path, kind="sgd")
    np.testing.assert_allclose(table_of(rows), table_of(dense), **TOLERANCE)
    np.testing.assert_allclose(
        rows.state.params["bias"], dense.state.params["bias"], **TOLERANCE
    )
    assert rows.final == pytest.approx(dense.final, rel=1e-6)


def test_micro_batches_equal_the_large_batch(dense, tmp_path):
    rows = table_toy.fit(tmp_path, kind="sgd", accumulate_steps=4)
    np.testing.assert_allclose(table_of(rows), table_of(dense), **TOLERANCE)


def test_micro_batches_over_devices(dense, tmp_path):
    rows = table_toy.fit(tmp_path, kind="sgd", accumulate_steps=2, n_data=2, parts=2)
    np.testing.assert_allclose(table_of(rows), table_of(dense), **TOLERANCE)


@pytest.mark.parametrize(("parts", "n_data", "by"), [(4, 2, "rows"), (7, 1, "columns")])
def test_divided_tables_equal_one_part(sinkhorn, tmp_path, parts, n_data, by):
    found = table_toy.fit(tmp_path, parts=parts, n_data=n_data, by=by, decay=0.9)
    np.testing.assert_allclose(
        table_of(found), table_of(sinkhorn), rtol=2e-5, atol=2e-6
    )
    padding = np.asarray(found.state.params["table"])[toy.V :]
    assert not padding.any()
    assert found.final == pytest.approx(sinkhorn.final, rel=1e-5)
    table = found.state.params["table"]
    assert table.sharding.shard_shape(table.shape)[by == "columns"] < toy.V


@pytest.mark.parametrize("parts", [1, 4])
def test_resumed_equals_uninterrupted_bit_for_bit(sinkhorn, tmp_path, parts):
    whole = sinkhorn
    if parts > 1:
        whole = table_toy.fit(tmp_path / "whole", parts=parts, decay=0.9)
    first = table_toy.fit(
        tmp_path / "cut", parts=parts, decay=0.9, save_every=3, n_steps=3
    )
    assert first.step == 3
    again = table_toy.fit(tmp_path / "cut", parts=parts, decay=0.9, save_every=3)
    assert toy.tree_hash(again.state) == toy.tree_hash(whole.state)


def test_p19_a_checkpoint_of_four_parts_goes_on_on_others(sinkhorn, tmp_path):
    """P19: 7 rows on 4 devices are stored as 8; they restore on 1, 2, 3 and 4."""
    table_toy.fit(tmp_path / "4", parts=4, decay=0.9, save_every=3, n_steps=3)
    for parts in (1, 2, 3, 4):
        folder = tmp_path / str(parts)
        if parts < 4:
            shutil.copytree(tmp_path / "4", folder)
        found = table_toy.fit(folder, parts=parts, decay=0.9, save_every=3)
        assert found.step == 6
        np.testing.assert_allclose(
            table_of(found), table_of(sinkhorn), rtol=2e-5, atol=2e-6
        )
        assert len(found.state.params["table"]) == -(-toy.V // parts) * parts


def test_evaluation_reads_the_running_mean_in_other_parts(tmp_path):
    found = table_toy.fit(tmp_path, parts=4, decay=0.9, save_every=3)
    for parts in (4, 3, 1):
        mesh, sharding = table_toy.rows_mesh(parts)
        tables = table_toy.table_training(
            table_toy.optimizers(0.9)["sinkhorn"], mesh, sharding, True
        )
        abstract = abstract_state(
            table_toy.init_params(sharding), optax.identity(), mesh, tables=tables
        )
        params, step = restore_params(
            tmp_path / CHECKPOINT_FOLDER, abstract, toy.FINGERPRINT, tables=tables
        )
        assert step == 6
        assert table_toy.eval_fn(params, None)["bpb"] == pytest.approx(
            found.final["bpb"], rel=1e-6
        )
    differs = np.abs(np.asarray(params["table"])[: toy.V] - table_of(found))
    assert differs.max() > 1e-4


def test_a_checkpoint_of_another_table_is_refused(tmp_path, monkeypatch):
    """Padded to four parts, 7 and 8 rows have the same shape."""
    table_toy.fit(tmp_path, parts=4, save_every=3, n_steps=3)
    monkeypatch.setattr(table_toy, "N_ROWS", {"table": 8})
    with pytest.raises(CheckpointError, match="'table': 7.*wanted.*'table': 8"):
        table_toy.fit(tmp_path, parts=4, save_every=3)


def test_a_checkpoint_of_a_dense_table_is_refused(tmp_path):
    dense_fit(tmp_path, n_steps=3, save_every=3)
    with pytest.raises(CheckpointError, match="saved None, wanted.*'table': 7"):
        table_toy.fit(tmp_path, save_every=3)


def test_a_table_axis_needs_a_table_by_rows(tmp_path):
    mesh = make_mesh(MeshConfig(data=1, table=2), jax.devices()[:2])
    with pytest.raises(ConfigError, match="mesh.table = 2.*no table in mode 'rows'"):
        dense_fit(tmp_path, mesh=mesh)


def test_metrics_tell_of_rows_and_norms(tmp_path):
    table_toy.fit(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    train = [json.loads(line) for line in lines if json.loads(line)["kind"] == "train"]
    last = train[-1]
    assert last["active_rows/table"] == toy.V
    assert last["dense_steps/table"] == last["overflow_steps/table"] == 0
    assert last["grad_norm"] == pytest.approx(
        np.hypot(last["grad_norm/table"], last["grad_norm/dense"]), rel=1e-5
    )
    assert last["update_norm/table"] > 0
