"""Runs with their table on the host: equal to the device, resumed, scored, refused."""

import json
import re
import shutil
import tempfile

import numpy as np
import pytest

from memjax.build.host_plan import host_plans
from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.prepare import prepare_text
from memjax.errors import ConfigError
from memjax.experiment import Experiment, override
from memjax.layers.engram import EngramConfig
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.models.config import ModelConfig
from memjax.optim.config import OptimConfig, SinkhornConfig
from memjax.run import evaluate, load_run, sample, train
from memjax.train.config import TrainConfig
from memjax.train.slot_cache import SlotCache


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    letters = list("abcdefghijklmnopqrst")
    words = ["".join(rng.choice(letters, 5)) for _ in range(3000)]
    lines = [" ".join(rng.choice(words, 9)) for _ in range(80)]
    (folder / "notes.txt").write_text("\n\n".join(lines))
    prepare_text([folder / "notes.txt"], folder / "store")
    return folder / "store"


def experiment(store, mode, optimizer="lazy_adam", **how):
    """40 steps of 64 reads of 2000 rows, 897 of them at hand with Sinkhorn."""
    memory = EngramConfig(
        layers=(0,),
        orders=(3,),
        n_heads=1,
        rows_per_head=2000,
        row_width=256,
        kernel_size=0,
        table_mode=mode,
    )
    capacity = 320 if optimizer == "sinkhorn_momentum" else None
    return Experiment(
        name="tiny",
        model=ModelConfig(
            n_layers=1,
            d_model=16,
            n_heads=2,
            n_kv_heads=2,
            d_ff=16,
            scan_layers=False,
            memories=(memory,),
        ),
        data=DataConfig(
            corpora=(CorpusConfig(name=str(store)),),
            context=4,
            batch_size=16,
            eval_stride=4,
            eval_batch_size=8,
        ),
        optim=OptimConfig(
            table_optimizer=optimizer,
            table_capacity=capacity,
            table_clip_norm=0.1,
            ema_decay=0.9,
            sinkhorn=SinkhornConfig(beta=0.3, tau=0.5, n_iterations=3),
        ),
        train=TrainConfig(
            n_steps=40,
            accumulate_steps=2,
            save_every=12,
            eval_every=20,
            log_every=1,
            keep_best=False,
            keep_last=3,
            **how,
        ),
    )


def where(optimizer):
    """In files and with few slots, or in memory and with those that Sinkhorn needs."""
    if optimizer == "sinkhorn_momentum":
        return {}
    return dict(host_tables="run", host_slots=3 * 64)


def outcome(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    timeless = [
        {k: v for k, v in record.items() if not k.endswith(("_s", "time"))}
        for record in records
    ]
    _, params, _ = load_run(run_dir)
    return timeless, np.asarray(params["block_0"]["memory"]["table"])


@pytest.fixture(scope="module", params=["lazy_adam", "sinkhorn_momentum"])
def runs(request, store, tmp_path_factory):
    """(optimizer, run on the device, run on the host, rows that left)."""
    folder, left = tmp_path_factory.mktemp("runs"), []
    plan = SlotCache.plan
    file, places = tempfile.TemporaryFile, []

    def noted(*args, dir=None, **how):
        places.append(dir)
        return file(*args, dir=dir, **how)

    def counted(*args):
        found = plan(*args)
        left.append(len(found.out_rows))
        return found

    how = dict(optimizer=request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotCache, "plan", counted)
        train(experiment(store, "rows", **how), folder / "device")
        patch.setattr(tempfile, "TemporaryFile", noted)
        train(experiment(store, "host", **how, **where(request.param)), folder / "host")
    assert (folder / "host" in places) == (request.param == "lazy_adam")
    return request.param, folder / "device", folder / "host", sum(left)


def test_the_host_gives_the_bits_of_the_device(runs):
    _, device, host, n_left = runs
    records, table = outcome(host)
    wanted, device_table = outcome(device)
    assert records == wanted
    np.testing.assert_array_equal(table, device_table)
    assert n_left > 100
    assert not list(host.glob("tmp*"))


def test_a_torn_checkpoint_is_passed_over_and_the_run_goes_on(runs, store, tmp_path):
    optimizer, _, host, _ = runs
    if optimizer != "sinkhorn_momentum":
        return  # whose state is the larger part
    folder = tmp_path / "resumed"
    shutil.copytree(host, folder)
    checkpoints = folder / "checkpoints"
    shutil.rmtree(checkpoints / "40")
    (torn,) = (checkpoints / "36" / "host").glob("*/params*.npy")
    torn.write_bytes(torn.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="36 is torn and passed over"):
        train(experiment(store, "host", optimizer, **where(optimizer)), folder)
    records, table = outcome(folder)
    wanted, uninterrupted = outcome(host)
    assert records == wanted
    np.testing.assert_array_equal(table, uninterrupted)


def test_a_finished_run_is_scored_and_sampled(runs):
    optimizer, device, host, _ = runs
    if optimizer != "lazy_adam":
        return  # the optimizer plays no part
    assert evaluate(host) == evaluate(device)
    assert sample(host, b"ab", n_tokens=5) == sample(device, b"ab", n_tokens=5)
    assert load_run(host)[0].experiment.model.memories[0].table_mode == "rows"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mesh.table": 2}, "mesh.table = 2 is not allowed: 1 with tables"),
        (
            {"optim.table_ema_decay": 0.9},
            "optim.table_ema_decay = 0.9 is not allowed: None",
        ),
        (
            {"train.host_slots": 9},
            "train.host_slots = 9 is not allowed: None, or at least",
        ),
    ],
)
def test_what_tables_on_the_host_do_not_have_is_refused(store, changes, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        found = override(experiment(store, "host"), list(changes.items()))
        host_plans(found.validate())


def test_settings_of_tables_on_the_host_are_refused_without_one(store):
    with pytest.raises(ConfigError, match=re.escape("train.host_slots = 999")):
        experiment(store, "rows", host_slots=999).validate()


def test_memories_that_find_rows_inside_the_model_are_refused():
    with pytest.raises(ConfigError, match="a memory that finds its rows inside"):
        ProductKeyConfig(table_mode="host")
