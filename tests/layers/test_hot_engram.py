"""Engram with a hot tier: without hot rows it is Engram; a hot row has one n-gram."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.evaluate.memory_records import hashed_layouts
from memjax.layers.engram import Engram, EngramConfig
from memjax.layers.hot_engram import HotEngram, HotEngramConfig
from memjax.layers.memory import MemoryInputs
from memjax.layers.record import METRICS
from memjax.layers.row_grad import value_and_row_grad
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel
from memjax.models.layouts import layouts, table_reads
from memjax.models.parameters import labels, split_variables
from memjax.ops.hot_tier import HotIndex
from memjax.ops.row_gradient import dense_gradient, unique_rows
from tests.layers.memory_calls import FLOAT32
from tests.models.parameters import filled

SIZES = {"n_heads": 2, "rows_per_head": 53, "row_width": 4, "orders": (2, 3)}
PLAIN = EngramConfig(**SIZES)
VOCAB = 9
# 2-grams (newest first) (2, 1), (3, 2); 3-grams (3, 2, 1), (4, 3, 2), (0, 0, 0).
INDEX = HotIndex(
    VOCAB,
    {
        2: np.array([2 + 1 * 9, 3 + 2 * 9], np.uint64),
        3: np.array([3 + 2 * 9 + 81, 4 + 3 * 9 + 2 * 81, 0], np.uint64),
    },
)
TOKENS = jnp.array([[1, 2, 3, 4, 5, 1, 2, 3], [6, 1, 2, 7, 1, 2, 3, 0]])
HOT = np.array(  # rows in the hot table: 2-grams 0, 1; 3-grams 2, 3, 4
    [
        [[-1, 0, 1, -1, -1, -1, 0, 1], [-1, -1, 2, 3, -1, -1, -1, 2]],
        [[-1, -1, 0, -1, -1, 0, 1, -1], [-1, -1, -1, -1, -1, -1, 2, -1]],
    ]
).swapaxes(1, 2)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("hot") / "hot.npz"
    INDEX.save(path)
    return HotEngramConfig(**SIZES, hot_rows=(2, 3), hot_file=str(path))


def model_of(memory):
    return ModelConfig(
        vocab_size=VOCAB,
        n_layers=2,
        d_model=8,
        n_heads=2,
        n_kv_heads=2,
        d_ff=8,
        memories=(memory,),
    )


def test_no_hot_rows_is_engram_bit_for_bit():
    none = HotEngramConfig(**SIZES)
    assert layouts(model_of(none)) == layouts(model_of(PLAIN))
    x_BTD = jax.random.normal(jax.random.key(0), (2, 8, 8))
    segments = jnp.ones((2, 8), jnp.int32)
    rows = jax.random.randint(jax.random.key(1), (2, 8, 4), 0, 200)
    inputs = MemoryInputs(segments, segments, rows)
    found = []
    for module in (Engram(PLAIN, 240, FLOAT32), HotEngram(none, 240, FLOAT32)):
        variables = module.init(jax.random.key(2), x_BTD, inputs, method="read")
        out = module.apply(variables, x_BTD, inputs, method="read")
        found.append((variables, out))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.fixture(scope="module")
def run(config):
    model = model_of(config)
    params = filled(model)

    @jax.jit
    def apply(params, tokens):
        return LanguageModel(model).apply({"params": params}, tokens, mutable=[METRICS])

    return params, apply


def memory_of(metrics):
    return metrics["block_1"]["memory"]


def test_a_hot_ngram_reads_its_own_row_and_nothing_else(run):
    params, apply = run
    _, state = apply(params, TOKENS)
    table = params["block_1"]["memory"]["hot_table"]
    assert table.shape == (6, 8)
    got = memory_of(state[METRICS])["rows"].reshape(2, 8, 2, 8)
    is_hot = HOT >= 0
    np.testing.assert_array_equal(got[is_hot], table[HOT[is_hot]])
    assert memory_of(state[METRICS])["hot_frac"] == pytest.approx(is_hot.mean())
    # The cold read of everything that is not hot is that of Engram.
    memory = dict(params["block_1"]["memory"])
    memory.pop("hot_table")
    plain = params | {"block_1": params["block_1"] | {"memory": memory}}
    _, state = LanguageModel(model_of(PLAIN)).apply(
        {"params": plain}, TOKENS, mutable=[METRICS]
    )
    cold = memory_of(state[METRICS])["rows"].reshape(2, 8, 2, 8)
    np.testing.assert_array_equal(got[~is_hot], cold[~is_hot])
    assert (np.asarray(got != cold).any(-1) == is_hot).all()


def test_gradients_by_rows_are_the_dense_ones_and_spare_what_is_not_read(config, run):
    params, _ = run
    model = model_of(config)
    rows = model_of(dataclasses.replace(config, table_mode="rows"))

    def loss(variables, model):
        out, state = LanguageModel(model).apply(variables, TOKENS, mutable=["reads"])
        return jnp.sum(jnp.sin(out)), state

    want = jax.jit(jax.grad(lambda p: loss({"params": p}, model)[0]))(params)
    want = want["block_1"]["memory"]
    assert not np.asarray(want["hot_table"])[[4, 5]].any()  # (0, 0, 0), and no row
    assert np.abs(want["hot_table"][:4]).min(axis=0).max() > 0
    _, grads = jax.jit(value_and_row_grad(lambda v: loss(v, rows)))(
        split_variables(params, rows)
    )
    assert sorted(grads.tables) == [
        f"block_1/memory/{name}" for name in ("hot_table", "table")
    ]
    for path, reads in grads.tables.items():
        leaf = want[path.rsplit("/")[-1]]
        got = dense_gradient(unique_rows(reads, *leaf.shape), leaf.shape[0])
        np.testing.assert_allclose(got, leaf, rtol=1e-4, atol=1e-5)


def test_what_follows_for_the_model(config):
    model = model_of(config)
    reads = table_reads(model)
    assert reads["block_1/memory/table"][:2] == (4, 4)
    assert reads["block_1/memory/hot_table"][:2] == (2, 8)
    assert config.table_widths(8) == {"table": 4, "hot_table": 8}
    found = labels(jax.eval_shape(lambda: filled(model)))["block_1"]["memory"]
    assert found["hot_table"] == found["table"] == "table"
    (cold,) = hashed_layouts(model).values()
    assert cold == layouts(model_of(PLAIN))[1]
    hot = layouts(model)[1]
    assert hot.fingerprint() != cold.fingerprint()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hot_rows": (1,)}, r"memories\.hot_rows = \(1,\)"),
        ({"hot_rows": -1}, r"memories\.hot_rows = -1"),
        ({"hot_rows": True}, r"memories\.hot_rows = True"),
        ({"hot_rows": 5}, r"memories\.hot_file = None"),
        ({"hot_rows": 5, "hot_file": 7}, r"memories\.hot_file = 7"),
        ({"hot_file": "a.npz"}, r"memories\.hot_file = 'a\.npz' .* hot_rows = 0"),
        ({"hot_sha256": "00"}, r"memories\.hot_sha256 = '00' .* hot_rows = 0"),
    ],
    ids=str,
)
def test_what_is_not_allowed(change, text):
    with pytest.raises(ConfigError, match=text):
        HotEngramConfig(**SIZES, **change)


def test_the_file_must_fit_the_model(config):
    for change, text in (
        ({"hot_rows": (3, 3)}, r"model\.memories\.0\.hot_rows = 3 .* at most 2"),
        ({"hot_sha256": "00"}, r"model\.memories\.0\.hot_sha256 = '00'"),
        ({"orders": (2, 4)}, r"model\.memories\.0\.hot_rows = 3 .* at most 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            layouts(model_of(dataclasses.replace(config, **change)))
    named = dataclasses.replace(config, hot_sha256=INDEX.sha256)
    assert layouts(model_of(named))[1].fingerprint()
    other = dataclasses.replace(model_of(config), vocab_size=10)
    with pytest.raises(ConfigError, match=r"model\.memories\.0\.hot_file"):
        layouts(other)
