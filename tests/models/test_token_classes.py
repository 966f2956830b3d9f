"""Models whose n-grams are made of classes of tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.build.parts import Parts
from memjax.data.compressed_vocab import CompressedVocab, load_classes
from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.store import write_store
from memjax.data.tokenizer import ByteTokenizer
from memjax.errors import ConfigError
from memjax.evaluate.collisions import collision_frac
from memjax.evaluate.memory_health import make_health
from memjax.evaluate.memory_measures import measure
from memjax.experiment import Experiment
from memjax.layers.engram import EngramConfig
from memjax.layers.record import METRICS
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel
from memjax.models.layouts import layouts
from tests.models.parameters import filled

MEMORY = EngramConfig(
    layers=(0,), n_heads=1, rows_per_head=53, row_width=4, n_token_classes=228
)
CONFIG = ModelConfig(
    n_layers=1, d_model=8, n_heads=1, n_kv_heads=1, d_ff=8, memories=(MEMORY,)
)
CLASSES = load_classes("bytes")


def text_ids(*texts: str) -> jax.Array:
    return jnp.stack([jnp.asarray(ByteTokenizer().encode(t.encode())) for t in texts])


def test_texts_that_differ_in_case_read_the_same_rows() -> None:
    model = LanguageModel(CONFIG, classes=CLASSES)
    plain = dataclasses.replace(MEMORY, n_token_classes=None)
    tokens = text_ids("In the\n beginning", "IN THE\t\tBEGINNINg")
    got = {}
    for classes, config in (
        (True, CONFIG),
        (False, dataclasses.replace(CONFIG, memories=(plain,))),
    ):
        model = LanguageModel(config, classes=CLASSES if classes else None)
        _, state = jax.jit(lambda p, x, m=model: m.apply(p, x, mutable=[METRICS]))(
            {"params": filled(config)}, tokens
        )
        rows = np.asarray(state[METRICS]["block_0"]["memory"]["rows"])
        assert np.isfinite(rows).all()
        got[classes] = (rows[0] == rows[1]).all(axis=-1)
    assert got[True].all()
    assert not got[False].all()


def test_as_many_classes_as_ids_change_nothing() -> None:
    """Classes are numbered by first id, so such a table is the identity."""
    memory = dataclasses.replace(MEMORY, n_token_classes=257)
    config = dataclasses.replace(CONFIG, memories=(memory,))
    plain = dataclasses.replace(MEMORY, n_token_classes=None)
    base = dataclasses.replace(CONFIG, memories=(plain,))
    assert layouts(config) == layouts(base)
    layout = layouts(config)[0]
    identity = LanguageModel(config, classes=CompressedVocab(np.arange(257)))
    tokens = np.arange(257)
    assert identity.hashed_ids(tokens, layout) is tokens


def test_health_counts_collisions_of_classes() -> None:
    model = LanguageModel(CONFIG, classes=CLASSES)
    tokens = np.asarray(text_ids("aAbBcC aA", "AaBbCc Aa"))
    batch = {
        "tokens": tokens,
        "segments": np.ones_like(tokens),
        "positions": np.tile(np.arange(9, dtype=np.int32), (2, 1)),
    }

    def loss(params, batch, key, drop_memory=False):
        del key, drop_memory
        return sum(jnp.sum(x) for x in jax.tree.leaves(params)), {"weight": 1.0}

    found = make_health(model, loss)(filled(CONFIG), batch)
    layout = layouts(CONFIG)[0]
    ids = CLASSES.table[tokens]
    want = collision_frac(ids, batch["segments"], layout)
    assert found["collision_frac/layer_0"] == want
    # Both texts are one text to the table: 9 windows of 2 orders, at most.
    assert found["rows_touched/layer_0"] <= 18


def test_a_measured_split_counts_ngrams_of_classes(tmp_path) -> None:
    """The training text "aAaA" is one letter four times."""
    store = write_store(tmp_path / "store", [b"aAaA"], ByteTokenizer())
    tokens = np.asarray(text_ids("aAbBcC aA"))
    ones = np.ones_like(tokens)
    batch = dict.fromkeys(("segments", "positions"), ones)
    batch |= {"tokens": tokens, "targets": tokens, "weights": ones.astype(np.float32)}

    def gradients(params, batch, key):
        del batch, key
        return (1.0, {"weight": 1.0}), (params, {})

    found = measure(
        LanguageModel(CONFIG, classes=CLASSES),
        filled(CONFIG),
        [batch],
        gradients=gradients,
        train_stores=[store],
        train_batch=batch,
    )
    columns = found["memories"]["layer_0"]["collisions"]
    # Windows of order 2, s the separator before and at the start: ss, sa, aa.
    assert [(c["order"], c["distinct_ngrams"]) for c in columns] == [(2, 3), (3, 4)]
    assert [c["n_tokens"] for c in columns] == [5, 5]


@pytest.mark.parametrize(
    "classes",
    [None, CompressedVocab(np.arange(228)), CompressedVocab(np.arange(257) % 227)],
)
def test_other_classes_than_the_config_says_are_refused(classes) -> None:
    model = LanguageModel(CONFIG, classes=classes)
    with pytest.raises(ConfigError, match="classes = .*: 257 ids in 228 classes"):
        model.hashed_ids(np.arange(3), layouts(CONFIG)[0])
    with pytest.raises(ConfigError, match="257 ids in 228 classes"):
        model.apply({"params": filled(CONFIG)}, text_ids("a"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_token_classes": 0}, r"n_token_classes = 0 .*None or an integer >= 1"),
        ({"n_token_classes": "228"}, r"n_token_classes = '228' .*an integer >= 1"),
        ({"n_token_classes": 258}, r"n_token_classes = 258 .*at most vocab_size = 257"),
        ({"pad_id": 228}, r"pad_id = 228 .*an id below 228"),
    ],
)
def test_numbers_of_classes_are_checked(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        memory = dataclasses.replace(MEMORY, **fields)
        dataclasses.replace(CONFIG, memories=(memory,))


def test_an_experiment_takes_the_classes_of_its_tokenizer() -> None:
    data = DataConfig(corpora=(CorpusConfig(name="kjv"),))
    experiment = Experiment(name="classes", model=CONFIG, data=data).validate()
    parts = Parts(experiment)
    assert parts.model.classes == CLASSES
    assert parts.fingerprint()["classes"] == CLASSES.sha256
    layout = layouts(CONFIG)[0]
    assert (layout.vocab_size, layout.pad_id) == (228, CLASSES.table[256])
    memory = dataclasses.replace(MEMORY, n_token_classes=None)
    model = dataclasses.replace(CONFIG, memories=(memory,))
    plain = Parts(dataclasses.replace(experiment, model=model))
    assert plain.model.classes is None
    assert "classes" not in plain.fingerprint()
    memory = dataclasses.replace(MEMORY, n_token_classes=200)
    model = dataclasses.replace(CONFIG, memories=(memory,))
    with pytest.raises(
        ConfigError,
        match=r"model\.memories\.0\.n_token_classes = 200 .*None or 228, the classes",
    ):
        dataclasses.replace(experiment, model=model).validate()
