"""Any memory at any place of any block: what holds for all kinds alike."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from memjax.errors import ConfigError
from memjax.layers.byte_engram import ByteEngramConfig
from memjax.layers.engram import EngramConfig
from memjax.layers.fast_weight_config import FastWeightConfig
from memjax.layers.hot_engram import HotEngramConfig
from memjax.layers.memory import PLACES
from memjax.layers.memory_plus import MemoryPlusConfig
from memjax.layers.ngram_embedding import NgramEmbeddingConfig
from memjax.layers.ngram_keys import NgramKeysConfig
from memjax.layers.peer import PeerConfig
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.layers.row_grad import value_and_row_grad
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel
from memjax.models.layouts import layouts, table_reads
from memjax.models.memories import KINDS
from memjax.models.parameters import abstract_params, cost, labels, split_variables
from memjax.ops.gates import COMBINE_MODES
from memjax.ops.row_gradient import dense_gradient, unique_rows
from memjax.parallel.mesh import MeshConfig, make_mesh
from memjax.parallel.row_sharding import RowSharding
from tests.models.parameters import filled

KEYS = {"n_sub_keys": 5, "key_width": 4, "n_heads": 2, "k": 3}
SMALL = {
    "engram": EngramConfig(n_heads=2, rows_per_head=53, row_width=4),
    "product_key": ProductKeyConfig(**KEYS),
    "memory_plus": MemoryPlusConfig(**KEYS),
    "peer": PeerConfig(**KEYS),
    "fast_weight": FastWeightConfig(**KEYS, value_width=6, chunk=2),
    "ngram_keys": NgramKeysConfig(**KEYS, code_width=3),
    "byte_engram": ByteEngramConfig(rows_per_head=(53, 60, 64), row_width=4),
    "ngram_embedding": NgramEmbeddingConfig(
        layers=(1,), n_heads=2, rows_per_head=53, row_width=4, average=False
    ),
    "hot_engram": HotEngramConfig(n_heads=2, rows_per_head=53, row_width=4),
}
BASE = ModelConfig(
    vocab_size=17, n_layers=3, d_model=16, n_heads=2, n_kv_heads=2, d_ff=12
)
TOKENS = (jnp.arange(20) * 7 % 17).reshape(2, 10)


def model_with(*memories, **changes):
    return dataclasses.replace(BASE, memories=memories, **changes)


@functools.cache
def apply_of(config, **static):
    return jax.jit(functools.partial(LanguageModel(config).apply, **static))


def logits(config, params, *args, **options):
    return apply_of(config, **options)(split_variables(params, config), *args)


def test_every_kind_is_tried_here():
    assert {type(memory) for memory in SMALL.values()} == set(KINDS)


@pytest.mark.parametrize("kind", SMALL)
def test_a_memory_is_causal_and_stays_in_its_document(kind):
    config = model_with(dataclasses.replace(SMALL[kind], layers=(0, 2)))
    params = filled(config)
    segments = jnp.where(jnp.arange(10) < 6, 1, 2)[None].repeat(2, 0)
    positions = jnp.where(jnp.arange(10) < 6, jnp.arange(10), jnp.arange(10) - 6)
    positions = positions[None].repeat(2, 0)
    out = logits(config, params, TOKENS, segments, positions)
    assert np.isfinite(out).all()
    changed = TOKENS.at[:, 8].add(1) % 17
    other = logits(config, params, changed, segments, positions)
    np.testing.assert_allclose(other[:, :8], out[:, :8], atol=1e-5)
    assert np.abs(other[:, 8:] - out[:, 8:]).max() > 1e-4
    elsewhere = TOKENS.at[:, 2].add(1) % 17
    other = logits(config, params, elsewhere, segments, positions)
    np.testing.assert_allclose(other[:, 6:], out[:, 6:], atol=1e-5)
    assert np.abs(other[:, 2:6] - out[:, 2:6]).max() > 1e-4


@pytest.mark.parametrize("kind", SMALL)
def test_without_its_read_the_backbone_stands_alone(kind):
    """At every place but in the feed-forward's, dropping is the plain model."""
    for place in PLACES:
        memory = dataclasses.replace(SMALL[kind], layers=(1,), place=place)
        config = model_with(memory)
        params = filled(config)
        read = logits(config, params, TOKENS)
        alone = logits(config, params, TOKENS, drop_memory=True)
        assert np.abs(read - alone).max() > 1e-4
        block = params["block_1"]
        assert ("feed_forward" in block) == (place != "instead_of_feed_forward")
        if "feed_forward" in block:
            plain = model_with(scan_layers=False)
            kept = {
                "params": params
                | {
                    "block_1": {
                        name: leaf
                        for name, leaf in block.items()
                        if "memory" not in name
                    }
                }
            }
            kept["params"] |= {f"block_{i}": params[f"block_{i}"] for i in (0, 2)}
            np.testing.assert_allclose(apply_of(plain)(kept, TOKENS), alone, atol=1e-5)


@pytest.mark.parametrize("mode", COMBINE_MODES)
def test_every_mode_of_the_combinator_takes_any_memory(mode):
    memory = dataclasses.replace(
        SMALL["memory_plus"], mode=mode, gate="sigmoid", dropout=0.5
    )
    config = model_with(memory)
    params = filled(config)
    assert ("dense" in params["block_1"]["memory"]) == (mode != "sum")
    assert np.isfinite(logits(config, params, TOKENS)).all()
    trained = jax.jit(functools.partial(LanguageModel(config).apply, train=True))
    seeds = [
        trained({"params": params}, TOKENS, rngs={"dropout": jax.random.key(i)})
        for i in range(6)
    ]
    assert len({float(x.sum()) for x in seeds}) > 1, "memory dropout"
    with pytest.raises(ConfigError, match=r"memories\.gate = 'none'"):
        dataclasses.replace(SMALL["peer"], mode="convex")


def test_memories_of_one_block_act_in_the_order_of_their_places():
    config = model_with(
        dataclasses.replace(SMALL["peer"], place="after_feed_forward"),
        dataclasses.replace(SMALL["memory_plus"], place="instead_of_feed_forward"),
        SMALL["engram"],
    )
    params = filled(config)
    block = params["block_1"]
    assert {"memory_0", "memory_1", "memory_2"} <= set(block)
    assert "down_table" in block["memory_0"] and "swilu" in block["memory_1"]
    assert "memory_0_input_norm" in block and "memory_2_input_norm" not in block
    out = logits(config, params, TOKENS)
    for name in ("memory_0", "memory_1", "memory_2"):
        changed = params | {
            "block_1": block | {name: jax.tree.map(lambda x: x * 1.5, block[name])}
        }
        assert np.abs(logits(config, changed, TOKENS) - out).max() > 1e-5
    for i, change in (
        (1, {"place": "instead_of_feed_forward"}),
        (2, {"layers": (0, 1)}),
    ):
        twice = (*config.memories, dataclasses.replace(config.memories[i], **change))
        with pytest.raises(ConfigError, match=r"model\.memories\.3\.layers"):
            model_with(*twice)


def test_one_table_for_several_layers_and_memories():
    """The gradient of a shared table is the sum over its readers, in both modes."""
    pool = {"shared_table": "pool", "value_width": 16}
    first = dataclasses.replace(SMALL["memory_plus"], layers=(0, 1), **pool)
    second = dataclasses.replace(
        SMALL["memory_plus"], layers=(2,), k=2, form="plain", **pool
    )
    dense = model_with(first, second)
    rows = model_with(
        *(dataclasses.replace(m, table_mode="rows") for m in dense.memories)
    )
    params = filled(dense)
    assert params["shared_pool"]["table"].shape == (25, 16)
    assert "table" not in params["block_0"]["memory"]
    reads = table_reads(dense)
    assert list(reads) == ["shared_pool/table"]
    assert reads["shared_pool/table"].rows == 2 * 2 * 3 + 2 * 2
    assert labels(abstract_params(dense))["shared_pool"]["table"] == "table"
    assert cost(dense, 10).table_bytes_per_token == 16 * 16 * 4

    def loss(variables, config):
        out, state = LanguageModel(config).apply(variables, TOKENS, mutable=["reads"])
        return jnp.sum(jnp.sin(out)), state

    want = jax.jit(jax.grad(lambda p: loss({"params": p}, dense)[0]))(params)
    graded = jax.jit(value_and_row_grad(lambda v: loss(v, rows)))
    _, grads = graded(split_variables(params, rows))
    (path,) = grads.tables
    got = dense_gradient(unique_rows(grads.tables[path], 25, 16), 25)
    want_RW = want["shared_pool"]["table"]
    np.testing.assert_allclose(got, want_RW, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["engram", "byte_engram", "hot_engram"])
def test_hashed_layers_share_rows_when_asked_to(kind):
    """One layout and one table; the second layer reads what a first would."""
    memory = dataclasses.replace(SMALL[kind], layers=(0, 2), shared_table="pool")
    model = model_with(memory)
    params = filled(model)
    found = layouts(model)
    assert found[0] == found[2]
    assert params["shared_pool"]["table"].shape == (found[0].n_rows, 4)
    assert "table" not in params["block_2"]["memory"]
    alone = dataclasses.replace(memory, layers=(0,))
    assert layouts(model_with(alone))[0] == found[0]
    out = logits(model, params, TOKENS)
    for layer in (0, 2):
        block = params[f"block_{layer}"]
        other = jax.tree.map(lambda x: x * 1.5, block["memory"])
        changed = params | {f"block_{layer}": block | {"memory": other}}
        assert np.abs(logits(model, changed, TOKENS) - out).max() > 1e-5
    changed = params | {"shared_pool": jax.tree.map(jnp.sin, params["shared_pool"])}
    assert np.abs(logits(model, changed, TOKENS) - out).max() > 1e-5


def test_shared_rows_of_engrams_have_one_gradient_in_both_modes():
    memory = dataclasses.replace(SMALL["engram"], layers=(0, 2), shared_table="pool")
    dense = model_with(memory)
    rows = model_with(dataclasses.replace(memory, table_mode="rows"))
    params = filled(dense)

    def loss(variables, config):
        out, state = LanguageModel(config).apply(variables, TOKENS, mutable=["reads"])
        return jnp.sum(jnp.sin(out)), state

    want = jax.jit(jax.grad(lambda p: loss({"params": p}, dense)[0]))(params)
    want_RW = want["shared_pool"]["table"]
    graded = jax.jit(value_and_row_grad(lambda v: loss(v, rows)))
    _, grads = graded(split_variables(params, rows))
    reads = grads.tables["shared_pool/table"]
    assert len(reads) == 2
    got = dense_gradient(unique_rows(reads, *want_RW.shape), len(want_RW))
    np.testing.assert_allclose(got, want_RW, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change", [{"hash_seed": 1}, {"layers": (2,)}, {"pad_id": 3}, {"row_width": 8}]
)
def test_engrams_that_hash_differently_do_not_share(change):
    one = dataclasses.replace(SMALL["engram"], layers=(0,), shared_table="pool")
    other = dataclasses.replace(one, **{"layers": (1,), **change})
    with pytest.raises(ConfigError, match=r"model\.memories\.1\.shared_table"):
        model_with(one, other)


@pytest.mark.parametrize(
    "change",
    [
        {"n_sub_keys": 6},
        {"value_width": 8},
        {"table_mode": "rows"},
        {"value_std": 0.5},
        {"form": "experts", "value_width": None},
    ],
)
def test_unequal_tables_are_not_shared(change):
    one = dataclasses.replace(
        SMALL["memory_plus"], layers=(0,), shared_table="pool", value_width=16
    )
    other = dataclasses.replace(one, layers=(1,), **change)
    with pytest.raises(ConfigError, match=r"model\.memories\.1\.shared_table"):
        model_with(one, other)


def test_what_does_not_fit_the_model_is_refused_when_the_config_is_made():
    peer = SMALL["peer"]
    for change, field in (
        ({"layers": (3,)}, "layers"),
        ({"place": "beside_feed_forward"}, "place"),
    ):
        memory = dataclasses.replace(peer, **change)
        with pytest.raises(ConfigError, match=rf"model\.memories\.0\.{field}"):
            model_with(memory, arrangement="three_branch")
    with pytest.raises(ConfigError, match=r"memories\.place = 'inside'"):
        dataclasses.replace(peer, place="inside")
    with pytest.raises(ConfigError, match=r"memories\.shared_table = 'A b'"):
        dataclasses.replace(peer, shared_table="A b")
    with pytest.raises(ConfigError, match="46340"):
        dataclasses.replace(peer, n_sub_keys=46341)


@pytest.mark.parametrize("arrangement", ["three_branch", "probability"])
def test_other_arrangements_take_product_keys(arrangement):
    layers = (3,) if arrangement == "probability" else (1,)
    config = model_with(
        dataclasses.replace(SMALL["memory_plus"], layers=layers),
        arrangement=arrangement,
    )
    params = filled(config)
    out = logits(config, params, TOKENS)
    assert np.abs(out - logits(config, params, TOKENS, drop_memory=True)).max() > 1e-4
    if arrangement == "probability":
        np.testing.assert_allclose(jnp.exp(out).sum(-1), 1, rtol=1e-5)


@pytest.mark.multidevice
@pytest.mark.parametrize("kind", ["product_key", "memory_plus"])
def test_eight_devices_read_like_one(kind):
    """Batch and table divided, batch statistics over the whole batch."""
    options = {"query_norm": "batch"} if kind == "product_key" else {}
    memory = dataclasses.replace(SMALL[kind], table_mode="rows", **options)
    config = model_with(memory)
    mesh = make_mesh(MeshConfig(data=2, table=4), jax.devices())
    sharding = RowSharding(mesh)
    tokens = jnp.concatenate([TOKENS, TOKENS[:, ::-1]])
    segments = jnp.where(jnp.arange(10) < 7, 1, 0)[None].repeat(4, 0)

    def forward(model, variables, tokens):
        mutable = ["batch_stats"]
        return model.apply(variables, tokens, segments, train=True, mutable=mutable)

    whole = LanguageModel(config)
    variables = whole.init(jax.random.key(0), tokens)
    want = jax.jit(functools.partial(forward, whole))(variables, tokens)
    table = variables["tables"]["block_1"]["memory"]["table"]
    padded = jnp.pad(table, [(0, 28 - 25), (0, 0)])
    placed = jax.device_put(padded, NamedSharding(mesh, sharding.spec))
    divided = variables | {"tables": {"block_1": {"memory": {"table": placed}}}}
    spread = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
    model = LanguageModel(config, sharding)
    got = jax.jit(functools.partial(forward, model))(divided, spread)
    assert bool(want[1]) == (kind == "product_key")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_costs_count_the_arithmetic_inside_a_memory():
    memory = dataclasses.replace(SMALL["fast_weight"], layers=(0, 2))
    config = model_with(memory)
    sizes = cost(config, context=10)
    named = {"kernel", "keys"}
    shown = sum(
        2 * leaf.size
        for path, leaf in jax.tree.leaves_with_path(abstract_params(config))
        if str(path[-1].key) in named
    )
    head = 2 * BASE.vocab_size * BASE.d_model
    attention = int(4 * 3 * (10 - 10 * 9 / 20) * 16)
    scores, rows = 2 * 2 * 5 * 4 * 2, 2 * 2 * 3 * 6 * 2
    inside = 2 * memory.flops_per_token - scores - rows
    assert sizes.flops_per_token == shown + rows + inside + head + attention
    fixed = dataclasses.replace(memory, initial="fixed")
    both = cost(model_with(fixed), 10)
    assert both.table_params == sizes.table_params == 2 * 25 * 6
    assert both.dense_params == sizes.dense_params


def test_a_word_where_a_number_belongs_is_an_error_of_ours():
    for kind, memory in SMALL.items():
        floats = [f.name for f in dataclasses.fields(memory) if f.type is float]
        assert "cap" in floats, kind
        for name in floats:
            with pytest.raises(ConfigError, match=rf"memories\.{name} = 'high'"):
                dataclasses.replace(memory, **{name: "high"})
    with pytest.raises(ConfigError, match=r"model\.dropout = True"):
        dataclasses.replace(BASE, dropout=True)
