"""Runs of models whose forward pass has state: batch statistics, carried fast weights.

What: training, resuming, evaluating and measuring them on a few lines of own text.
Why: that state lives in the checkpoint beside the parameters, and nothing may lose it.
When not: memories without state; see test_run and tests/models.
"""

import json
import shutil

import jax
import numpy as np
import pytest

from memjax.build.sizes import describe
from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.prepare import prepare_text
from memjax.experiment import Experiment
from memjax.layers.fast_weight_config import FastWeightConfig
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.models.config import ModelConfig
from memjax.models.parameters import split_variables
from memjax.optim.config import OptimConfig
from memjax.run import evaluate, load_run, train
from memjax.train.config import TrainConfig
from memjax.train.run_folder import CHECKPOINT_FOLDER

KEYS = {"n_sub_keys": 8, "key_width": 4, "n_heads": 2, "k": 3}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """Both kinds of state, an average, two micro-batches, a table by rows."""
    folder = tmp_path_factory.mktemp("text")
    text = folder / "notes.txt"
    text.write_text("".join(f"line {n} of the notes\n" for n in range(60)))
    prepare_text([text], folder / "store")
    memories = (
        ProductKeyConfig(
            **KEYS,
            layers=(1,),
            place="instead_of_feed_forward",
            query_norm="batch",
            table_mode="rows",
        ),
        FastWeightConfig(
            **KEYS, layers=(0,), value_width=4, chunk=4, state="shared", initial="fixed"
        ),
    )
    return Experiment(
        name="stateful",
        model=ModelConfig(
            n_layers=2,
            d_model=16,
            n_heads=2,
            n_kv_heads=2,
            d_ff=16,
            scan_layers=False,
            memories=memories,
        ),
        data=DataConfig(
            corpora=(CorpusConfig(name=str(folder / "store")),),
            context=16,
            batch_size=16,
            eval_stride=16,
            eval_batch_size=8,
        ),
        optim=OptimConfig(ema_decay=0.9, schedule="constant"),
        train=TrainConfig(
            n_steps=4, eval_every=2, save_every=2, accumulate_steps=2, health_every=2
        ),
    )


@pytest.fixture(scope="module")
def trained(experiment, tmp_path_factory):
    """A finished run of four steps."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    return folder, train(experiment, folder)


def state_of(folder, step=None):
    parts, params, _ = load_run(folder, step)
    variables = split_variables(params, parts.experiment.model)
    return {name: variables[name] for name in ("batch_stats", "fast_weights")}


def test_the_state_moves_and_is_what_is_scored(experiment, trained):
    folder, result = trained
    early, late = state_of(folder, 2), state_of(folder, 4)
    for a, b in zip(jax.tree.leaves(early), jax.tree.leaves(late), strict=True):
        assert np.isfinite(b).all()
        assert np.abs(a - b).max() > 0
    again = [evaluate(folder)["valid_bpb"] for _ in range(2)]
    assert again[0] == again[1] == result["valid_bpb"]
    described = describe(experiment)
    shapes = described["shapes"]
    assert "block_1/memory/query/norm_0/scale" in shapes
    assert not any("mean" in path or "values" in path for path in shapes)


def test_resumed_equals_uninterrupted(experiment, trained, tmp_path, capsys):
    """Statistics and carried memory too; the log of the start says it is carried."""
    folder = tmp_path / "resumed"
    shutil.copytree(trained[0], folder)
    shutil.rmtree(folder / CHECKPOINT_FOLDER / "4")
    train(experiment, folder)
    said = capsys.readouterr().out
    assert said.count("model.memories.1.state = 'shared'") == 1
    assert "resumed at step 2 of 4" in said
    whole, resumed = (load_run(path)[1] for path in (trained[0], folder))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_health_of_memories_that_select_slots(trained):
    lines = (trained[0] / "metrics.jsonl").read_text().splitlines()
    health = [x for x in map(json.loads, lines) if "memory_share" in x]
    assert len(health) == 2
    for name in ("non_finite_scores/layer_1", "memory_rms/layer_0"):
        assert np.isfinite(health[-1][name])
    assert health[-1]["non_finite_scores/layer_1"] == 0
