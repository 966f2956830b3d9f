"""Runs with mixtures of experts: what is counted, logged and fingerprinted."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from memjax.build import parts as parts_module
from memjax.build.parts import Parts
from memjax.build.sizes import describe
from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.prepare import prepare_text
from memjax.experiment import Experiment
from memjax.layers.experts import ExpertsConfig
from memjax.models.config import ModelConfig
from memjax.parallel.mesh import MeshConfig
from memjax.run import evaluate, train
from memjax.train.config import TrainConfig

TEXT = "".join(f"line {n} of the notes\n" for n in range(60))
EXPERTS = ExpertsConfig(n_experts=4, top_k=2, d_ff=8)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "notes.txt").write_text(TEXT)
    prepare_text([folder / "notes.txt"], folder / "store")
    return Experiment(
        name="tiny",
        model=ModelConfig(
            n_layers=2, d_model=16, n_heads=2, n_kv_heads=2, d_ff=16, experts=EXPERTS
        ),
        data=DataConfig(
            corpora=(CorpusConfig(name=str(folder / "store")),),
            context=16,
            batch_size=16,
            eval_batch_size=8,
            eval_stride=16,
        ),
        mesh=MeshConfig(data=8),
        train=TrainConfig(n_steps=2, accumulate_steps=2, log_every=1),
    )


def with_experts(experiment, **changes):
    experts = dataclasses.replace(EXPERTS, **changes)
    model = dataclasses.replace(experiment.model, experts=experts)
    return dataclasses.replace(experiment, model=model)


def test_a_plan_of_balanced_routing_needs_no_text(experiment, monkeypatch):
    def refuse(*_):
        raise AssertionError("the text is prepared")

    monkeypatch.setattr(parts_module, "prepare", refuse)
    balanced = with_experts(experiment, routing="balanced")
    assert describe(balanced)["params_dense"] == describe(experiment)["params_dense"]


def test_checkpoints_share_the_table_of_their_routing(experiment):
    lines = TEXT.encode().splitlines()  # a document each, behind its separator
    counts_V = np.bincount([*b"".join(lines), *[256] * len(lines)], minlength=257)
    parts = Parts(with_experts(experiment, routing="balanced"))
    found = np.array(parts.token_counts)
    assert found.shape == (257,) and found[256] >= 1
    assert (found <= counts_V).all() and found.sum() > 0.5 * counts_V.sum()
    digest = hashlib.sha256(found.tobytes()).hexdigest()
    assert parts.fingerprint()["token_counts"] == digest
    assert parts.model.counts == parts.token_counts
    marks = set()
    for seed in (0, 1):
        drawn = Parts(with_experts(experiment, routing="random", hash_seed=seed))
        assert drawn.token_counts is None
        marks.add(drawn.fingerprint()["expert_table"])
    assert len(marks) == 2
    assert not {"expert_table", "token_counts"} & set(Parts(experiment).fingerprint())


@pytest.mark.parametrize("routing", ["learned", "balanced"])
def test_a_run_logs_the_balance_loss_apart(experiment, tmp_path, routing):
    """Over two scanned blocks, two micro-batches and eight devices."""
    experiment = with_experts(experiment, routing=routing)
    n_blocks = experiment.model.n_layers
    done = train(experiment, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [x for x in map(json.loads, lines) if "loss_hex" in x]
    assert len(steps) == 2
    for step in steps:
        if routing == "learned":
            # The loss of one block is 1 where all experts are used alike, 4 at most.
            assert 0.01 * n_blocks * 0.99 < step["auxiliary_loss"] < 0.04 * n_blocks
        else:
            assert "auxiliary_loss" not in step
    assert evaluate(tmp_path / "run")["valid_bpb"] == pytest.approx(done["valid_bpb"])
