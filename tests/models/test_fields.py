"""Every field of the model and memory configs changes something, or is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.layers.block import HyperConfig
from memjax.layers.cross_attention import CedConfig
from memjax.layers.engram import EngramConfig
from memjax.layers.experts import ExpertsConfig
from memjax.layers.precision import PrecisionConfig
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel
from memjax.models.parameters import merge_variables, row_tables, split_variables
from tests.models.parameters import filled

MEMORY = EngramConfig(
    layers=(0,),
    n_heads=2,
    rows_per_head=53,
    row_width=4,
    mode="capped",
    cap=0.4,
    conv_init="uniform",
    table_std=0.5,
)
BASE = ModelConfig(
    vocab_size=17,
    n_layers=3,
    d_model=16,
    n_heads=4,
    n_kv_heads=2,
    d_ff=12,
    memories=(MEMORY,),
)
TOKENS = jnp.tile(jnp.arange(8) % 5, (2, 1))

MEMORY_CHANGES = {
    "layers": (1,),
    "mode": "convex",
    "cap": 0.9,
    "place": "instead_of_feed_forward",
    "dropout": 0.99,
    "form": "v41",
    "orders": (2, 4),
    "n_heads": 1,
    "rows_per_head": (53, 71),
    "row_width": 6,
    "hash_seed": 1,
    "pad_id": 0,
    "gate": "plain",
    "norm_eps": 0.5,
    "kernel_size": 2,
    "dilation": 1,
    "conv_norm_eps": 0.5,
}
MODEL_CHANGES = {
    "vocab_size": 19,
    "n_layers": 2,
    "d_model": 24,
    "n_heads": 2,
    "n_kv_heads": 1,
    "d_ff": 20,
    "window": 2,
    "rope_theta": 10.0,
    "norm_eps": 0.5,
    "dropout": 0.5,
    "tie_embeddings": True,
    "scan_layers": False,
    "memories": (),
    "arrangement": "three_branch",
    "ced": CedConfig(first_decoder=1),
    "hyper": HyperConfig(n_streams=2),
    "experts": ExpertsConfig(n_experts=2, d_ff=4),
}
REFUSED = {
    "vocab_size": 0,
    "n_layers": 0,
    "d_model": 18,
    "n_heads": 5,
    "n_kv_heads": 3,
    "d_ff": 0,
    "window": 0,
    "rope_theta": 0.0,
    "norm_eps": 0.0,
    "dropout": 1.0,
    "arrangement": "four_branch",
    "memory_share": 1.0,
    "memories": (MEMORY, MEMORY),
    "starve_prob": 0.5,
    "starve_window": 2,
    "expert_layers": (1,),
}


def outcome(config):
    """Parameter shapes and training-mode logits of a config, same seeds for all."""
    params = filled(config)
    apply = jax.jit(functools.partial(LanguageModel(config).apply, train=True))
    out = apply({"params": params}, TOKENS, rngs={"dropout": jax.random.key(1)})
    shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), params)
    return shapes, np.asarray(out)


@pytest.fixture(scope="module")
def base():
    """What the unchanged config gives."""
    return outcome(BASE)


def assert_differs(one, other):
    """Other shapes, or other logits."""
    same_shapes = one[0] == other[0]
    assert not same_shapes or np.abs(one[1] - other[1]).max() > 1e-6


def test_the_tables_of_changes_are_complete():
    fields = {f.name for f in dataclasses.fields(EngramConfig)}
    # table_mode changes no number: see test_table_modes_agree below.
    elsewhere = {"n_branches", "conv_init", "table_std", "table_mode"}
    elsewhere |= {"kernel"}  # see test_kernels.py
    elsewhere |= {"shared_table"}  # needs two layers: see test_memories.py
    elsewhere |= {"n_token_classes"}  # needs classes: see test_token_classes.py
    assert fields - set(MEMORY_CHANGES) == elsewhere, "tests of the layer change them"
    fields = {f.name for f in dataclasses.fields(ModelConfig)}
    elsewhere = {"expert_layers"}  # see test_experts_model
    elsewhere |= {"remat", "memory_share", "precision", "starve_prob", "starve_window"}
    assert fields - set(MODEL_CHANGES) == elsewhere


@pytest.mark.parametrize("field", MEMORY_CHANGES)
def test_every_memory_field_matters(base, field):
    memory = dataclasses.replace(MEMORY, **{field: MEMORY_CHANGES[field]})
    assert_differs(base, outcome(dataclasses.replace(BASE, memories=(memory,))))


@pytest.mark.parametrize("field", MODEL_CHANGES)
def test_every_model_field_matters(base, field):
    assert_differs(
        base, outcome(dataclasses.replace(BASE, **{field: MODEL_CHANGES[field]}))
    )


def test_starved_attention_sees_its_window():
    """With certainty it is the window's logits; in evaluation it is nothing."""
    plain = dataclasses.replace(BASE, memories=())
    starved = dataclasses.replace(plain, starve_prob=1.0, starve_window=2)
    params = filled(plain)

    def logits(config, **options):
        apply = jax.jit(LanguageModel(config).apply, static_argnames="train")
        return apply({"params": params}, TOKENS, **options)

    windowed = logits(dataclasses.replace(plain, window=2))
    rngs = {"dropout": jax.random.key(0)}
    got = logits(starved, train=True, rngs=rngs)
    np.testing.assert_allclose(got, windowed, atol=1e-5)
    np.testing.assert_array_equal(logits(starved), logits(plain))
    halves = dataclasses.replace(starved, starve_prob=0.5)
    many = jnp.tile(TOKENS, (16, 1))
    apply = jax.jit(functools.partial(LanguageModel(halves).apply, train=True))
    got = apply({"params": params}, many, rngs=rngs)
    off_B = np.abs(got - jnp.tile(windowed, (16, 1, 1))).max((1, 2))
    assert 8 <= (off_B < 1e-5).sum() <= 24, "drawn for each sequence"
    for change in ({"starve_window": 0}, {"window": 1}, {"starve_prob": 1.5}):
        with pytest.raises(ConfigError, match=r"model\.starve_"):
            dataclasses.replace(starved, **change)


def test_memory_share_matters():
    memory = dataclasses.replace(MEMORY, layers=(3,))
    config = dataclasses.replace(BASE, arrangement="probability", memories=(memory,))
    assert_differs(
        outcome(config), outcome(dataclasses.replace(config, memory_share=0.9))
    )


@pytest.mark.parametrize("field", ["params", "compute", "tables", "accumulation"])
def test_every_precision_field_matters(base, field):
    precision = PrecisionConfig(**{field: "bfloat16"})
    assert_differs(base, outcome(dataclasses.replace(BASE, precision=precision)))
    with pytest.raises(ConfigError, match=f"precision.{field} = 'float8'"):
        PrecisionConfig(**{field: "float8"})


@pytest.mark.parametrize("field", REFUSED)
def test_impossible_values_are_refused(field):
    with pytest.raises(ConfigError, match=r"model\.") as caught:
        dataclasses.replace(BASE, **{field: REFUSED[field]})
    assert "is not allowed: " in str(caught.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layers": (3,)}, "layers"),
        ({"n_branches": 2}, "n_branches"),
        ({"pad_id": 17}, "pad_id"),
        ({"pad_id": -1}, "pad_id"),
    ],
)
def test_memories_that_do_not_fit_the_model_are_refused(change, field):
    memory = dataclasses.replace(MEMORY, **change)
    with pytest.raises(ConfigError, match=rf"model\.memories\.0\.{field}"):
        dataclasses.replace(BASE, memories=(memory,))


def test_probability_wants_one_memory_after_the_last_block():
    for memories in ((), (MEMORY,)):
        with pytest.raises(ConfigError, match=r"model\.memories"):
            dataclasses.replace(BASE, arrangement="probability", memories=memories)


def test_table_modes_agree():
    """The same tree of parameters gives the same logits in both modes."""
    rows = dataclasses.replace(MEMORY, table_mode="rows")
    config = dataclasses.replace(BASE, memories=(rows,))
    params = filled(config)
    dense = LanguageModel(BASE).apply({"params": params}, TOKENS)
    variables = split_variables(params, config)
    assert set(variables) == {"params", "tables"}
    assert "table" not in variables["params"]["block_0"]["memory"]
    got = LanguageModel(config).apply(variables, TOKENS)
    np.testing.assert_array_equal(got, dense)
    merged = merge_variables(variables)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    n_rows = params["block_0"]["memory"]["table"].shape[0]
    assert row_tables(config) == {"block_0/memory/table": n_rows}
    with pytest.raises(ConfigError, match="table_mode"):
        dataclasses.replace(MEMORY, table_mode="sparse")
