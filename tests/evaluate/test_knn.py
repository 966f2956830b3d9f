"""kNN-LM over a small model: keys, entries by corpus, scores, on a text that repeats.

What: keys are the states that they are said to be; scores equal a plain loop over all
    pairs; the share of each corpus; what a config refuses.
Why: an entry that is off by one position still gives plausible figures.
When not: files and their refusals (test_knn_datastore), search (test_knn_search), the
    command (test_knn_run).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.data.config import CorpusConfig, DataConfig
from memjax.data.pipeline import eval_batches
from memjax.data.prepare import prepare_text
from memjax.errors import ConfigError
from memjax.evaluate.bits_per_byte import token_nats
from memjax.evaluate.datastore import open_datastore
from memjax.evaluate.knn import (
    KnnConfig,
    build_datastore,
    entries_by_part,
    params_sha256,
    score_knn,
)
from memjax.evaluate.knn_keys import key_module, make_key_forward
from memjax.layers.engram import EngramConfig
from memjax.layers.peer import PeerConfig
from memjax.layers.precision import PrecisionConfig
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel
from memjax.models.parameters import merge_variables
from tests.oracles import knn as oracle

SIZES = {"d_model": 8, "n_heads": 2, "n_kv_heads": 2, "d_ff": 8}
EXPERTS = PeerConfig(layers=(1,), n_sub_keys=3, n_heads=1, k=2, gate="none")
NGRAMS = EngramConfig(layers=(1,), n_heads=1, rows_per_head=7, row_width=4)
INSTEAD = "instead_of_feed_forward"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two corpora, one twice as large as the other."""
    folder = tmp_path_factory.mktemp("text")
    for name, n_lines in (("one", 60), ("two", 30)):
        text = folder / f"{name}.txt"
        lines = (f"{name} {n} {'abcde' * (n % 7)}\n" for n in range(n_lines))
        text.write_text("".join(lines))
        prepare_text([text], folder / name)
    corpora = tuple(CorpusConfig(name=str(folder / name)) for name in ("one", "two"))
    return DataConfig(
        corpora=corpora, context=16, eval_stride=8, eval_batch_size=8, n_threads=0
    )


@pytest.fixture(scope="module")
def model():
    """Two scanned blocks, and parameters large enough that states differ."""
    model = LanguageModel(ModelConfig(n_layers=2, **SIZES))
    params = merge_variables(model.init(jax.random.key(0), jnp.zeros((1, 1), int)))
    return model, jax.tree.map(lambda x: 3 * x, params)


@pytest.fixture(scope="module")
def forward(model):
    return make_key_forward(model[0], "feed_forward")


def entries(forward, params, batches):
    """[(key, target, nats)] of every scored target, in order."""
    found = []
    for batch in batches:
        keys, nats = forward(params, batch)
        for row, t in np.argwhere(batch["weights"] > 0):
            found.append((keys[row, t], batch["targets"][row, t], nats[row, t]))
    keys, targets, nats = zip(*found, strict=True)
    return np.array(keys), np.array(targets), np.array(nats)


def test_the_key_is_the_normed_input_of_the_last_feed_forward(model):
    """In scanned blocks as in blocks of their own, which flax can look into."""
    scanned, params = model
    assert scanned.config.scan_layers
    plain = LanguageModel(dataclasses.replace(scanned.config, scan_layers=False))
    stacked = params["blocks_0_1"]
    unstacked = {name: x for name, x in params.items() if name != "blocks_0_1"}
    for i in range(2):
        unstacked[f"block_{i}"] = jax.tree.map(lambda x, i=i: x[i], stacked)
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, 256, (2, 6)).astype(np.int32),
        "targets": rng.integers(0, 256, (2, 6)).astype(np.int32),
        "segments": np.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0]], np.int32),
        "positions": np.array([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 0]], np.int32),
    }
    logits, state = plain.apply(
        {"params": unstacked},
        *(batch[name] for name in ("tokens", "segments", "positions")),
        capture_intermediates=True,
    )
    seen = state["intermediates"]
    wanted = {
        "feed_forward": seen["block_1"]["feed_forward_norm"]["__call__"][0],
        "final": seen["final_norm"]["__call__"][0],
    }
    assert np.abs(wanted["feed_forward"] - wanted["final"]).max() > 0.1
    for key, want in wanted.items():
        keys, nats = make_key_forward(scanned, key)(params, batch)
        np.testing.assert_allclose(keys, want, atol=1e-5)
        np.testing.assert_allclose(
            nats, token_nats(logits, batch["targets"]), rtol=1e-5
        )


@pytest.mark.parametrize(
    ("memories", "options", "want"),
    [
        ((), {}, ("blocks_0_1", "feed_forward_norm")),
        ((), {"scan_layers": False}, ("block_1", "feed_forward_norm")),
        ((), {"remat": True}, ("blocks_0_1", "feed_forward_norm")),
        (
            (),
            {"precision": PrecisionConfig(compute="bfloat16")},
            ("blocks_0_1", "feed_forward_norm"),
        ),
        (
            (EXPERTS,),
            {"arrangement": "three_branch"},
            ("block_1", "feed_forward_norm"),
        ),
        ((EXPERTS,), {}, ("block_1", "feed_forward_norm")),
        (
            (dataclasses.replace(EXPERTS, place=INSTEAD),),
            {},
            ("block_1", "memory_input_norm"),
        ),
        (
            (NGRAMS, dataclasses.replace(EXPERTS, place=INSTEAD)),
            {},
            ("block_1", "memory_1_input_norm"),
        ),
    ],
)
def test_where_the_key_stands(memories, options, want):
    config = ModelConfig(n_layers=2, memories=memories, **SIZES, **options)
    assert key_module(config, "feed_forward") == want
    assert key_module(config, "final") == ("final_norm",)
    model = LanguageModel(config)
    batch = {
        name: jax.ShapeDtypeStruct((1, 4), jnp.int32)
        for name in ("tokens", "targets", "segments", "positions")
    }
    params = jax.eval_shape(
        lambda: merge_variables(model.init(jax.random.key(0), jnp.zeros((1, 1), int)))
    )
    keys, _ = jax.eval_shape(make_key_forward(model, "feed_forward"), params, batch)
    assert keys.shape == (1, 4, 8) and keys.dtype == jnp.float32


def test_a_key_that_is_not_there_is_refused():
    config = ModelConfig(
        n_layers=2, memories=(dataclasses.replace(NGRAMS, place=INSTEAD),), **SIZES
    )
    with pytest.raises(ConfigError, match="knn.key = 'feed_forward' .*'final' here"):
        key_module(config, "feed_forward")
    with pytest.raises(ConfigError, match="knn.key = 'logits'"):
        key_module(config, "logits")


def test_each_corpus_gives_its_share(data):
    train = eval_batches(data, "train")
    sizes = {name: train.part(name).n_targets for name in train.names}
    assert entries_by_part(train, None) == sizes == entries_by_part(train, 10**9)
    some = entries_by_part(train, 101)
    assert sum(some.values()) == 101
    for name, n in some.items():
        assert abs(n - 101 * sizes[name] / sum(sizes.values())) <= 1
    assert sum(entries_by_part(train, 1).values()) == 1


@pytest.mark.parametrize("key_dtype", ["float16", "float32"])
def test_scores_are_those_of_a_loop_over_all_pairs(
    model, forward, data, tmp_path, key_dtype
):
    _, params = model
    config = KnnConfig(
        k=4, lambdas=(0.0, 0.25, 0.5), temperature=2.0, n_tokens=150,
        key_dtype=key_dtype,
    )  # fmt: skip
    train, held_out = eval_batches(data, "train"), eval_batches(data, "valid")
    build_datastore(
        tmp_path / "store", {}, forward, params, train,
        config=config, width=8, vocab_size=257,
    )  # fmt: skip
    datastore = open_datastore(tmp_path / "store", {})
    quotas = entries_by_part(train, 150)
    keys, values = [], []
    for name, quota in quotas.items():
        found = entries(forward, params, train.part(name))
        keys.append(found[0][:quota].astype(key_dtype))
        values.append(found[1][:quota])
    keys, values = np.concatenate(keys), np.concatenate(values)
    np.testing.assert_array_equal(datastore.keys, keys)
    np.testing.assert_array_equal(datastore.values, values)
    assert datastore.keys.dtype == key_dtype and datastore.values.dtype == np.uint16

    said = []
    found = score_knn(
        datastore, forward, params, held_out, config=config, report=said.append
    )
    assert len(said) == 2 and "150 entries" in said[0]
    n_held, n_all = 0, 0
    for name in held_out.names:
        part = held_out.part(name)
        queries, targets, nats = entries(forward, params, part)
        distances, nearest = oracle.nearest(queries, keys, 4)
        probs = oracle.probs(distances, values[nearest], 257, 2.0)
        of_target = probs[np.arange(len(targets)), targets]
        n_held, n_all = n_held + np.sum(of_target > 0), n_all + len(targets)
        mixed = {
            lam: -np.sum(np.log(oracle.mixture(-nats, of_target, lam)))
            for lam in config.lambdas
        }
        for mixture in found["mixtures"]:
            want = mixed[mixture["lambda"]] / (math.log(2) * part.n_bytes)
            np.testing.assert_allclose(mixture["parts"][name], want, rtol=1e-4)
    assert 0 < n_held < n_all == found["n_targets"]
    assert found["in_neighbours"] == n_held / n_all
    # lambda 0 is the model, and alone the neighbours miss some targets.
    assert found["mixtures"][0]["bpb"] == found["lm"]["bpb"]
    assert found["mixtures"][0]["parts"] == found["lm"]["parts"]
    assert found["knn"]["bpb"] == math.inf


def test_a_datastore_of_the_text_itself_knows_every_token(
    model, forward, data, tmp_path
):
    """k = 1 finds the very entry, at distance 0, unless another state is the same."""
    _, params = model
    config = KnnConfig(k=1, lambdas=(1.0,), key_dtype="float32")
    text = eval_batches(data, "valid")
    build_datastore(
        tmp_path / "store", {}, forward, params, text,
        config=config, width=8, vocab_size=257,
    )  # fmt: skip
    datastore = open_datastore(tmp_path / "store", {})
    found = score_knn(datastore, forward, params, text, config=config)
    assert len(datastore) == text.n_targets == found["n_entries"]
    assert found["in_neighbours"] > 0.8


def test_the_hash_of_parameters_sees_every_bit():
    params = {"a": jnp.zeros(3), "b": {"c": jnp.ones((2, 2), jnp.bfloat16)}}
    want = params_sha256(params)
    assert params_sha256(jax.tree.map(jnp.array, params)) == want
    others = [
        {**params, "a": params["a"].at[1].set(-0.0)},
        {**params, "a": jnp.zeros(3, jnp.int32)},
        {"a": params["a"], "b": {"d": params["b"]["c"]}},
        {**params, "b": {"c": params["b"]["c"].reshape(4)}},
    ]
    assert want not in {params_sha256(other) for other in others}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("k", 0),
        ("probe", 0),
        ("n_tokens", 0),
        ("lambdas", ()),
        ("lambdas", (0.2, 1.5)),
        ("temperature", 0.0),
        ("temperature", math.nan),
        ("key", "input"),
        ("key_dtype", "bfloat16"),
        ("index", "hnsw"),
    ],
)
def test_a_config_names_the_field_that_is_wrong(field, value):
    with pytest.raises(ConfigError, match=f"knn.{field} = ") as caught:
        KnnConfig(**{field: value})
    assert caught.value.allowed
