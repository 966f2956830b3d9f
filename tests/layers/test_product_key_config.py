"""Options of a product-key memory: each has an effect, and each mistake an error."""

import dataclasses

import jax
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.layers.memory import MemoryConfig
from memjax.layers.product_key import ProductKeyMemory
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.layers.record import METRICS
from tests.layers.memory_calls import FLOAT32, D, inputs_of, own_fields, shapes, stream

BASE = ProductKeyConfig(layers=(0,), n_sub_keys=4, key_width=6, n_heads=2, k=3)
# Options whose effect are parameters of another name, shape or number.
SHAPES = {
    "n_sub_keys": 5,
    "key_width": 4,
    "n_heads": 1,
    "flat": True,
    "value_width": 5,
    "query": {"query": "identity"},
    "hidden_sizes": {"query": "mlp", "hidden_sizes": (3,)},
    "query_bias": False,
    "query_norm": "layer",
    "query_learned": False,
    "input_norm": True,
    "key_shared": True,
    "key_learned": False,
    "modulo_rows": 7,
    "slice_values": True,
    "output_norm": True,
    "gate": "sigmoid",
}
# Options whose effect are other initial values.
STARTS = {
    "query_init": "truncated_normal",
    "key_init": "gaussian",
    "key_normalized": True,
    "value_init": "zeros",
    "value_std": 0.1,
}
# Options whose effect is another read, outside training or in it.
READS = {
    "k": 2,
    "normalize_query": True,
    "activation": "relu",
    "over": "joint",
    "temperature": 0.5,
    "subtract": "mean",
    "normalize": {"activation": "relu", "normalize": True},
    "permutation_seed": 1,
}
TRAINS = {
    "input_dropout": 0.5,
    "query_dropout": 0.5,
    "weight_dropout": 0.5,
    "value_dropout": 0.5,
    "score_noise": 1.0,
}
# Tested below, or in test_product_key.py (a gradient).
ELSEWHERE = {"key_std", "value_fan", "init_scale", "detach_input"}


def changed(field, value):
    changes = value if isinstance(value, dict) else {field: value}
    return dataclasses.replace(BASE, **changes)


def layer(config):
    return ProductKeyMemory(config, FLOAT32)


def read(config, variables, **options):
    """Without jit: the operations of all options are compiled but once."""
    x_BTD = stream()
    out, _ = layer(config).apply(
        variables,
        x_BTD,
        inputs_of(x_BTD),
        method="read",
        mutable=[METRICS],
        rngs={"dropout": jax.random.key(1)},
        **options,
    )
    return np.asarray(out)


def start(config):
    x_BTD = stream()
    inputs = inputs_of(x_BTD)
    variables = layer(config).init(jax.random.key(0), x_BTD, inputs, method="read")
    return {"params": variables["params"]}


@pytest.fixture(scope="module")
def base():
    variables = start(BASE)
    return variables, read(BASE, variables)


def test_every_option_has_a_case_here():
    cases = [*SHAPES, *STARTS, *READS, *TRAINS, *ELSEWHERE]
    assert sorted(cases) == sorted(own_fields(ProductKeyConfig))


@pytest.mark.parametrize("field", SHAPES)
def test_it_changes_the_parameters(field):
    assert shapes(layer(changed(field, SHAPES[field]))) != shapes(layer(BASE))


@pytest.mark.parametrize("field", STARTS)
def test_it_changes_the_start(field, base):
    other = start(changed(field, STARTS[field]))
    differs = jax.tree.map(lambda a, b: np.abs(a - b).max() > 1e-3, base[0], other)
    assert any(jax.tree.leaves(differs))


@pytest.mark.parametrize("field", READS)
def test_it_changes_the_read(field, base):
    variables, out = base
    config = changed(field, READS[field])
    before = out
    if isinstance(READS[field], dict):
        before = read(dataclasses.replace(config, **{field: False}), variables)
    assert np.abs(read(config, variables) - before).max() > 1e-3


@pytest.mark.parametrize("field", TRAINS)
def test_it_changes_the_read_in_training_alone(field, base):
    variables, out = base
    config = changed(field, TRAINS[field])
    assert np.abs(read(config, variables, train=True) - out).max() > 1e-3
    np.testing.assert_array_equal(read(config, variables), out)


def deviations(d_model=8, **changes):
    """Standard deviations of keys and values."""
    config = dataclasses.replace(BASE, **changes)
    spec = config.table_specs(d_model)["table"]
    return config.key_deviation(d_model), spec.std, spec.init


def test_deviations_of_the_references():
    assert deviations() == (6**-0.5, 8**-0.5, "normal")
    assert deviations(value_init="zeros")[1] == 0
    assert deviations(slice_values=True)[1] == 4**-0.5
    assert deviations(key_init="normal", key_std=0.5)[0] == 0.5
    # arXiv:2310.10837, custom_init 1, 2 (and 4) and 3 (and 5), six layers, k = d.
    g = (2 / 6) ** 0.5
    cut = {"key_init": "truncated_normal", "value_init": "truncated_normal"}
    of = dict(**cut, key_width=None, init_scale=g)
    found = [deviations(**of, value_fan=fan) for fan in ("width", "reads", "slots")]
    for (key, value, init), want in zip(found, (8, 3 * 2, 16), strict=True):
        assert init == "truncated_normal"
        assert key == pytest.approx(8**-0.5 * g)
        assert value == pytest.approx(want**-0.5 * g)


def test_rows_and_reads():
    spec = BASE.table_specs(D)["table"]
    assert (spec.n_rows, spec.width, spec.reads) == (16, D, 6)
    spec = changed("modulo_rows", 7).table_specs(D)["table"]
    assert (spec.n_rows, spec.reads) == (7, 6)
    spec = changed("k", None).table_specs(D)["table"]
    assert (spec.n_rows, spec.reads) == (16, 16)
    spec = changed("flat", True).table_specs(D)["table"]
    assert spec.n_rows == 4
    assert dataclasses.replace(BASE, table_mode="rows", shared_table="pool").k == 3
    assert isinstance(BASE, MemoryConfig)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 17}, r"memories.k = 17 .* 1 to 16"),
        ({"k": 0}, r"memories.k = 0"),
        ({"k": 5, "flat": True}, r"memories.k = 5 .* 1 to 4"),
        ({"n_sub_keys": 46341}, r"memories.n_sub_keys = 46341 .* 46340"),
        ({"n_sub_keys": 0}, r"memories.n_sub_keys = 0"),
        ({"n_sub_keys": 2**31, "flat": True}, r"memories.n_sub_keys = 2147483648"),
        ({"n_heads": 0}, r"memories.n_heads = 0"),
        ({"key_width": 5}, r"memories.key_width = 5 .* even"),
        ({"key_width": 0}, r"memories.key_width = 0"),
        ({"value_width": 0}, r"memories.value_width = 0"),
        ({"query": "conv"}, r"memories.query = 'conv'"),
        ({"query": "mlp"}, r"memories.hidden_sizes = \(\) .* when query = 'mlp'"),
        ({"hidden_sizes": (3,)}, r"hidden_sizes = \(3,\) .* when query = 'linear'"),
        ({"query": "mlp", "hidden_sizes": (0,)}, r"memories.hidden_sizes = \(0,\)"),
        ({"query": "mlp", "hidden_sizes": [3]}, r"memories.hidden_sizes = \[3\]"),
        ({"query_init": "he"}, r"memories.query_init = 'he'"),
        ({"query_norm": "rms"}, r"memories.query_norm = 'rms'"),
        ({"query": "identity", "query_norm": "batch"}, r"no linear map"),
        ({"query": "identity", "query_learned": False}, r"memories.query_learned"),
        ({"query": "identity", "key_shared": True}, r"memories.key_shared = True"),
        (
            {"flat": True, "key_width": 5, "query_norm": "layer"},
            r"memories.key_width = 5",
        ),
        ({"key_init": "he"}, r"memories.key_init = 'he'"),
        ({"key_init": "binary"}, r"binary for 2\^3 keys of width 3, and there are 4"),
        ({"key_std": 0.1}, r"memories.key_std = 0.1 .* key_init"),
        ({"key_std": 0.0, "key_init": "normal"}, r"memories.key_std = 0.0"),
        ({"value_init": "zeros", "value_std": 1.0}, r"memories.value_std = 1.0"),
        ({"value_fan": "reads", "value_std": 1.0}, r"memories.value_std = 1.0"),
        ({"value_std": float("inf")}, r"memories.value_std = inf"),
        ({"value_init": "ones"}, r"memories.value_init = 'ones'"),
        ({"value_fan": "heads"}, r"memories.value_fan = 'heads'"),
        ({"init_scale": 0.0}, r"memories.init_scale = 0.0"),
        ({"temperature": 0.0}, r"memories.temperature = 0.0"),
        ({"activation": "gelu"}, r"memories.activation = 'gelu'"),
        ({"over": "batch"}, r"memories.over = 'batch'"),
        ({"over": "joint", "activation": "relu"}, r"memories.over = 'joint'"),
        ({"over": "joint", "slice_values": True}, r"memories.over = 'joint'"),
        ({"subtract": "max"}, r"memories.subtract = 'max'"),
        ({"normalize": True}, r"memories.normalize = True .* sum to 1"),
        ({"permutation_seed": -1}, r"memories.permutation_seed = -1"),
        ({"modulo_rows": 0}, r"memories.modulo_rows = 0 .* 1 to 16"),
        ({"modulo_rows": 17}, r"memories.modulo_rows = 17 .* 1 to 16"),
        ({"modulo_rows": 2.5}, r"memories.modulo_rows = 2.5 .* 1 to 16"),
        ({"permutation_seed": True}, r"memories.permutation_seed = True"),
        ({"hidden_sizes": (True,), "query": "mlp"}, r"memories.hidden_sizes"),
        ({"flat": "yes"}, r"memories.flat = 'yes'"),
        ({"layers": (True,)}, r"memories.layers = \(True,\) .* whole numbers"),
        ({"layers": ("1",)}, r"memories.layers = \('1',\) .* whole numbers"),
        ({"shared_table": 3}, r"memories.shared_table = 3"),
        ({"input_dropout": 1.0}, r"memories.input_dropout = 1.0"),
        ({"query_dropout": -0.1}, r"memories.query_dropout = -0.1"),
        ({"weight_dropout": float("nan")}, r"memories.weight_dropout = nan"),
        ({"value_dropout": 2.0}, r"memories.value_dropout = 2.0"),
        ({"score_noise": -1.0}, r"memories.score_noise = -1.0"),
        ({"gate": "tanh"}, r"memories.gate = 'tanh'"),
        ({"mode": "convex"}, r"memories.gate = 'none' .* 'sigmoid'"),
        (
            {"k": None, "table_mode": "rows"},
            r"memories.table_mode = 'rows' .* k = None",
        ),
        ({"k": None, "modulo_rows": 3}, r"memories.modulo_rows = 3 .* k = None"),
        ({"k": None, "permutation_seed": 3}, r"permutation_seed = 3 .* k = None"),
        ({"k": None, "slice_values": True}, r"memories.slice_values = True"),
        ({"k": None, "over": "joint"}, r"memories.over = 'joint' .* k = None"),
    ],
    ids=str,
)
def test_what_cannot_be_built_says_why(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(BASE, **changes)


@pytest.mark.parametrize(
    ("changes", "d_model", "message"),
    [
        ({"value_width": 5}, 6, r"memories.value_width = 5 .* None or 6"),
        ({"query": "identity"}, 8, r"memories.key_width = 6 .* None or 8"),
        ({"key_width": None}, 7, r"memories.key_width = 7 .* even"),
        ({"key_width": None, "key_init": "binary"}, 6, r"2\^3 keys of width 3"),
        (
            {"query": "shuffled", "n_heads": 3, "key_width": None},
            12,
            r"memories.n_heads = 3 .* 12",
        ),
        ({"slice_values": True}, 7, r"memories.slice_values = True .* 7"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_stream_says_why(changes, d_model, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(BASE, **changes).check_width(d_model)


def test_as_many_heads_as_anyone_may_write_are_checked_without_their_power_of_two():
    changed("n_heads", 10**20).check_width(D)
    with pytest.raises(ConfigError, match=r"memories.n_heads = 10{20}"):
        dataclasses.replace(changed("query", "shuffled"), n_heads=10**20).check_width(D)
