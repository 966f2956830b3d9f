"""The Engram layer: forms, modes, masks, laws; golden numbers are in tests/golden."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.layers.engram import Engram, EngramConfig
from memjax.layers.precision import Dtypes, PrecisionConfig
from memjax.layers.record import METRICS
from memjax.ops.ngram_layout import ngram_layouts

FLOAT32 = Dtypes.of(PrecisionConfig())
BASE = EngramConfig(layers=(0,), n_heads=2, row_width=4, rows_per_head=11)


def build(config, d_model=6, n_tokens=9, dtypes=FLOAT32):
    """(module, params, hidden, rows) of a small layer."""
    module = Engram(config=config, n_rows=50, dtypes=dtypes)
    rows = jax.random.randint(jax.random.key(1), (2, n_tokens, config.n_columns), 0, 50)
    hidden = jax.random.normal(jax.random.key(2), (2, n_tokens, d_model))
    params = module.init(jax.random.key(0), hidden, rows)["params"]
    return module, params, hidden, rows


def read(module, params, hidden, rows, **options):
    """The branch alone."""
    options["method"] = Engram.branch
    return module.apply({"params": params}, hidden, rows, **options)


@pytest.mark.parametrize("form", ["demo", "v41"])
def test_call_is_stream_plus_read(form):
    module, params, hidden, rows = build(dataclasses.replace(BASE, form=form))
    whole = module.apply({"params": params}, hidden, rows)
    np.testing.assert_array_equal(whole, hidden + read(module, params, hidden, rows))


def test_an_unread_row_has_no_gradient_and_repeats_add_up():
    module, params, hidden, rows = build(BASE)
    rows = jnp.zeros_like(rows).at[0, 0, 0].set(7)
    grad = jax.grad(lambda p: read(module, p, hidden, rows).sum())(params)["table"]
    touched = np.flatnonzero(np.abs(np.asarray(grad)).sum(-1))
    assert touched.tolist() == [0, 7]


def test_a_row_id_outside_the_table_reads_nan_and_never_another_row():
    module, params, hidden, rows = build(BASE)
    for bad in (50, -1, 2**31 - 1):
        out = read(module, params, hidden, rows.at[0, 3, 1].set(bad))
        assert np.isnan(np.asarray(out[0, 3])).all()
        assert np.isfinite(np.asarray(out[1])).all()


def test_a_masked_token_closes_its_gate():
    config = dataclasses.replace(BASE, form="v41")
    module, params, hidden, rows = build(config)
    mask = jnp.ones(rows.shape[:2], bool).at[1, 2].set(False)
    out = read(module, params, hidden, rows, token_mask_BT=mask)
    np.testing.assert_array_equal(out[1, 2], 0)
    assert np.abs(out[1, 3]).max() > 0


def test_convolution_is_causal_and_stays_in_its_document():
    config = dataclasses.replace(BASE, conv_init="uniform")
    module, params, hidden, rows = build(config)
    other = rows.at[:, 5].set(3)
    out, changed = (read(module, params, hidden, r) for r in (rows, other))
    np.testing.assert_array_equal(out[:, :5], changed[:, :5])
    assert np.abs(out[:, 8] - changed[:, 8]).max() > 0, "dilation 3 reaches token 8"
    segments = jnp.array([[1] * 6 + [2] * 3] * 2)
    out, changed = (
        read(module, params, hidden, r, segments_BT=segments) for r in (rows, other)
    )
    np.testing.assert_array_equal(out[:, 6:], changed[:, 6:])


@pytest.mark.parametrize("mode", ["convex", "interpolate", "capped", "capped_rms"])
def test_other_modes_own_a_dense_path_and_dropping_leaves_it(mode):
    config = dataclasses.replace(BASE, mode=mode, cap=0.5, kernel_size=0)
    module, params, hidden, rows = build(config)
    assert params["dense"]["kernel"].shape == (6, 6)
    dropped = read(module, params, hidden, rows, drop=True)
    dense = hidden @ params["dense"]["kernel"]
    if mode == "capped_rms":
        dense = dense / jnp.sqrt(jnp.mean(dense**2, -1, keepdims=True) + 1e-6)
    want = 0.5 * dense if mode == "interpolate" else dense
    np.testing.assert_allclose(dropped, want, rtol=1e-5, atol=1e-6)


def test_memory_dropout_drops_whole_sequences_in_training_only():
    config = dataclasses.replace(BASE, dropout=0.5, kernel_size=0)
    module, params, hidden, rows = build(config)
    tiled = jnp.tile(hidden[:1], (64, 1, 1)), jnp.tile(rows[:1], (64, 1, 1))
    rngs = {"dropout": jax.random.key(3)}
    out = np.asarray(read(module, params, *tiled, train=True, rngs=rngs))
    full = np.asarray(read(module, params, *tiled))
    kept = np.abs(out).sum((1, 2)) > 0
    assert 16 < kept.sum() < 48
    np.testing.assert_allclose(out[kept], full[kept], rtol=1e-6)
    assert (np.abs(out[~kept]) == 0).all()
    again = read(module, params, *tiled, train=True, rngs=rngs)
    np.testing.assert_array_equal(out, again)


def test_gates_are_recorded_once():
    module, params, hidden, rows = build(BASE)
    variables = {"params": params}
    for _ in range(3):
        _, state = module.apply(variables, hidden, rows, mutable=[METRICS])
        variables |= state
    assert state[METRICS]["gate"].shape == (2, 9, 1)


def test_gradients_against_finite_differences():
    config = dataclasses.replace(BASE, mode="convex", conv_init="uniform")
    module, params, hidden, rows = build(config, n_tokens=5)
    params = jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(jax.random.key(9), x.shape), params
    )

    def loss(p, h):
        return jnp.sum(jnp.sin(read(module, p, h, rows)))

    grads = jax.grad(loss, argnums=(0, 1))(params, hidden)
    direction = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(4), x.shape), (params, hidden)
    )
    slope = sum(
        jnp.vdot(a, b)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
    )
    step = 1e-2
    high, low = (
        loss(*jax.tree.map(lambda x, d, s=s: x + s * d, (params, hidden), direction))
        for s in (step, -step)
    )
    np.testing.assert_allclose((high - low) / (2 * step), slope, rtol=2e-2)


def test_bfloat16_policy_keeps_the_stream_dtype():
    dtypes = Dtypes.of(PrecisionConfig(compute="bfloat16", tables="bfloat16"))
    module, params, hidden, rows = build(BASE, dtypes=dtypes)
    assert params["table"].dtype == jnp.bfloat16
    out = read(module, params, hidden.astype(jnp.bfloat16), rows)
    assert out.dtype == jnp.bfloat16
    full = read(build(BASE)[0], jax.tree.map(jnp.float32, params), hidden, rows)
    np.testing.assert_allclose(np.asarray(out, np.float32), full, atol=0.02)


def test_bad_input_is_named():
    module, params, hidden, rows = build(BASE)
    with pytest.raises(ShapeError, match="rows_BTC"):
        read(module, params, hidden, rows[..., :2])
    with pytest.raises(ConfigError, match="n_branches"):
        read(module, params, hidden[:, :, None].repeat(2, 2), rows)
    for change in (
        {"form": "v5"},
        {"gate": "tanh"},
        {"conv_init": "ones"},
        {"mode": "mean"},
        {"cap": 1.5},
        {"dropout": 1.0},
        {"layers": (2, 1)},
        {"layers": ()},
        {"layers": (-1,)},
        {"orders": (3, 2)},
        {"orders": ()},
        {"rows_per_head": (1, 2, 3)},
        {"n_heads": 0},
        {"row_width": 0},
        {"kernel_size": -1},
        {"n_branches": 0},
        {"dilation": 0},
        {"dilation": "2"},
        {"orders": (2, "3")},
        {"norm_eps": -1.0},
        {"conv_norm_eps": -1.0},
        {"table_std": -1.0},
    ):
        (field,) = change
        with pytest.raises(ConfigError, match=f"memories.{field} = "):
            dataclasses.replace(BASE, **change)


def test_initialisers_follow_the_config():
    _, params, _, _ = build(dataclasses.replace(BASE, table_std=0.5))
    assert 0.4 < np.std(params["table"]) < 0.6
    np.testing.assert_array_equal(params["conv"], 0)
    _, params, _, _ = build(dataclasses.replace(BASE, conv_init="uniform"))
    assert 0.015 < np.std(params["table"]) < 0.025
    assert 0.3 < np.abs(params["conv"]).max() <= 0.5


def test_the_rows_of_a_shared_table_are_those_of_the_first_layer():
    config = dataclasses.replace(BASE, layers=(1, 4), shared_table="pool")
    (first, _) = ngram_layouts(
        vocab_size=99,
        pad_id=0,
        orders=config.orders,
        n_heads=config.n_heads,
        rows_per_head=config.rows_per_head,
        layer_ids=config.layers,
    )
    assert config.table_specs(16) == config.specs(first.n_rows)
