"""The mixture of experts as a layer.

What: equal to the oracle in value and gradient, one expert equal to the feed-forward,
    padding, loads by token histogram, every option, low precision, refusals.
Why: a wrong gradient through a sort trains, only worse.
When not: rules of routing alone; tests/ops/test_routing.py.
"""

import functools
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.layers.experts import Experts, ExpertsConfig
from memjax.layers.feed_forward import FeedForward
from memjax.layers.precision import Dtypes, PrecisionConfig
from memjax.layers.record import METRICS
from memjax.ops.hash_routing import bigram_experts, table_experts, table_load
from tests.oracles import routing as oracle

FLOAT32 = Dtypes.of(PrecisionConfig())
B, T, D, V = 2, 5, 4, 11
SMALL = {"n_experts": 3, "top_k": 2, "d_ff": 5}


def experts(**options):
    return Experts(ExpertsConfig(**(SMALL | options)), FLOAT32)


@functools.partial(jax.jit, static_argnums=0)
def _init(module, *inputs):
    return module.init(jax.random.key(0), stream(), *inputs)["params"]


@functools.partial(jax.jit, static_argnums=0)
def call(module, params, *inputs):
    """Output and records."""
    out, state = module.apply({"params": params}, *inputs, mutable=[METRICS])
    return out, state[METRICS]


def start(module, *inputs):
    return dict(_init(module, *inputs))


def stream():
    return jax.random.normal(jax.random.key(1), (B, T, D))


def token_ids():
    return np.random.default_rng(0).integers(0, V, (B, T))


def oracle_out(params, x, config, experts_NK=None):
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x_ND = np.asarray(x, np.float64).reshape(-1, D)
    options = (config.normalize, config.route_scale)
    routes = []
    for n, row in enumerate(x_ND):
        scores = oracle.scores(row @ params["router"]["kernel"], config.scores)
        if experts_NK is None:
            routes.append(oracle.choose(scores, config.top_k, *options))
        else:
            chosen = experts_NK[n]
            routes.append((chosen, oracle.weights(scores, chosen, *options)))
    kernels = {name: params[name]["kernel"] for name in ("gate", "up", "out")}
    return oracle.mixture(x_ND, routes, kernels), [r[0] for r in routes]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scores": "sqrt_softplus", "normalize": False, "route_scale": 1.5},
        {"scores": "sqrt_softplus", "routing": "random", "route_scale": 2.5},
    ],
)
def test_values_and_gradients_equal_the_dense_oracle(options):
    module, x = experts(**options), stream()
    inputs, given = (), None
    if options.get("routing") == "random":
        given = table_experts(module.config.table(V), token_ids())
        inputs = (None, jnp.asarray(given))
        given = given.reshape(-1, 2)
    params = start(module, *inputs)
    out, _ = call(module, params, x, *inputs)
    want, _ = oracle_out(params, x, module.config, given)
    np.testing.assert_allclose(out.reshape(-1, D), want, rtol=1e-5, atol=1e-6)

    rng = np.random.default_rng(2)
    cotangent = rng.normal(size=want.shape)

    def loss(params, x):
        out = module.apply({"params": params}, x, *inputs)
        return jnp.sum(out.reshape(-1, D) * cotangent)

    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    leaves, tree = jax.tree.flatten((params, x))
    leaves = [np.asarray(leaf, np.float64) for leaf in leaves]
    for i, grad in enumerate(jax.tree.leaves(grads)):
        direction, ends = rng.normal(size=grad.shape), []
        for step in (1e-6, -1e-6):
            moved = [
                leaf + (step * direction if j == i else 0)
                for j, leaf in enumerate(leaves)
            ]
            found, _ = oracle_out(*tree.unflatten(moved), module.config, given)
            ends.append(np.sum(found * cotangent))
        slope = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(
            np.sum(grad * direction), slope, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("normalize", [False, True])
def test_one_expert_is_the_feed_forward(normalize):
    module = experts(n_experts=1, top_k=1, normalize=normalize)
    dense, x = FeedForward(5, FLOAT32), stream()
    params = start(module)
    one = {
        name: {"kernel": params[name]["kernel"][0]} for name in ("gate", "up", "out")
    }
    shapes = jax.eval_shape(dense.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, one) == jax.tree.map(jnp.shape, shapes)
    out, metrics = call(module, params, x)
    np.testing.assert_allclose(
        out, dense.apply({"params": one}, x), rtol=1e-6, atol=1e-7
    )
    assert metrics["load"].tolist() == [B * T] and metrics["balance_loss"] == 1


def test_initial_kernels_are_drawn_per_expert_like_a_feed_forwards():
    module = experts(n_experts=4, d_ff=400)
    kernels = start(module)["out"]["kernel"]
    np.testing.assert_allclose(jnp.std(kernels, axis=(1, 2)), 400**-0.5, rtol=0.1)
    assert (kernels[0] != kernels[1]).all()
    small = Experts(module.config, FLOAT32, out_scale=0.1)
    np.testing.assert_allclose(start(small)["out"]["kernel"], 0.1 * kernels, rtol=1e-5)


def test_padding_is_no_load_moves_no_token_and_has_no_output():
    module, x = experts(), stream()
    params = start(module)
    mask = jnp.arange(T)[None] < jnp.array([[T], [2]])
    out, metrics = call(module, params, x, mask)
    plain, _ = call(module, params, x)
    np.testing.assert_array_equal(out[mask], plain[mask])
    np.testing.assert_array_equal(out[~mask], 0)
    other = jnp.where(mask[..., None], x, 9.0)
    again, same = call(module, params, other, mask)
    np.testing.assert_array_equal(again, out)
    jax.tree.map(np.testing.assert_array_equal, metrics, same)
    _, chosen = oracle_out(params, x[mask], module.config)
    assert metrics["load"].tolist() == oracle.load(chosen, 3).tolist()
    ratio = metrics["load"].max() / metrics["load"].mean()
    np.testing.assert_allclose(metrics["load_ratio"], ratio, rtol=1e-6)
    _, nobody = call(module, params, x, jnp.zeros((B, T), bool))
    assert nobody["load_ratio"] == nobody["balance_loss"] == 0


def test_the_balance_loss_trains_the_router():
    module, x = experts(n_experts=4, top_k=1, normalize=False), stream()
    params = start(module)
    params["router"]["kernel"] = params["router"]["kernel"].at[:, 0].add(0.7)
    x = jnp.abs(x)  # so that expert 0 is everyone's choice

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        _, state = module.apply({"params": params}, x, mutable=[METRICS])
        return state[METRICS]["balance_loss"]

    first, grads = loss(params)
    assert first > 1.5
    for _ in range(60):
        grads = loss(params)[1]
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
    assert loss(params)[0] < first - 0.4
    assert not np.any(grads["gate"]["kernel"]) and np.any(grads["router"]["kernel"])


@pytest.mark.parametrize("routing", ["random", "balanced", "sliced", "bigram"])
def test_the_load_of_hash_routing_is_that_of_the_tokens(routing):
    config = ExpertsConfig(**(SMALL | {"n_experts": 4, "routing": routing}))
    ids = token_ids()
    counts = np.bincount(ids.ravel(), minlength=V)
    if routing == "bigram":
        chosen = bigram_experts(ids, config.layout(V, 0))
        want = oracle.load(chosen, 4)
    else:
        table = config.table(V, counts)
        chosen, want = table_experts(table, ids), table_load(table, counts, 4)
    module = Experts(config, FLOAT32)
    params = start(module, None, chosen)
    _, metrics = call(module, params, stream(), None, jnp.asarray(chosen))
    assert metrics["load"].tolist() == want.tolist()
    assert set(metrics) == {"load", "load_ratio"}


def test_uniform_weights_have_no_gate_and_missing_experts_are_seen():
    module = experts(routing="random", weights="uniform", route_scale=2.0)
    ids = jnp.asarray(table_experts(module.config.table(V), token_ids()))
    params = start(module, None, ids)
    assert set(params) == {"gate", "up", "out"}
    x, mask = stream(), jnp.ones((B, T), bool).at[1, 3].set(False)
    out, _ = call(module, params, x, mask, ids)
    kernels = {name: np.asarray(params[name]["kernel"], np.float64) for name in params}
    routes = [(chosen, np.ones(2)) for chosen in np.asarray(ids).reshape(-1, 2)]
    want = oracle.mixture(np.asarray(x, np.float64).reshape(-1, D), routes, kernels)
    want = want.reshape(B, T, D)
    np.testing.assert_allclose(out[mask], want[mask], rtol=1e-5, atol=1e-6)
    ids = ids.at[0, 1].set(3).at[1, 3].set(-1)
    out, _ = call(module, params, x, mask, ids)
    assert np.isnan(out[0, 1]).all() and not np.any(out[1, 3])
    assert np.isfinite(np.delete(out.reshape(-1, D), 1, axis=0)).all()


def test_padding_without_an_expert_gives_finite_gradients():
    module, x = experts(routing="random", scores="sqrt_softplus"), stream()
    ids, mask = jnp.zeros((B, T, 2), int).at[..., 1].set(2), jnp.ones((B, T), bool)
    ids, mask = ids.at[0, 4].set(2**31 - 1), mask.at[0, 4].set(False)
    params = start(module, mask, ids)
    grads = jax.jit(
        jax.grad(lambda p: jnp.sum(module.apply({"params": p}, x, mask, ids)))
    )(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_the_shared_expert_is_a_feed_forward_beside():
    module, x = experts(shared_d_ff=3), stream()
    params = start(module)
    out, _ = call(module, params, x)
    alone, _ = call(experts(), {k: v for k, v in params.items() if k != "shared"}, x)
    shared = FeedForward(3, FLOAT32).apply({"params": params["shared"]}, x)
    np.testing.assert_allclose(out, alone + shared, rtol=1e-5, atol=1e-6)


def test_bfloat16_routes_in_float32():
    dtypes = Dtypes.of(PrecisionConfig(compute="bfloat16"))
    module, x = Experts(ExpertsConfig(**SMALL), dtypes), stream().astype(jnp.bfloat16)
    params = start(experts())
    out, metrics = call(module, params, x)
    assert out.dtype == jnp.bfloat16 and metrics["balance_loss"].dtype == jnp.float32
    wide = x.astype(jnp.float32)
    want, chosen = oracle_out(params, wide, module.config)
    assert metrics["load"].tolist() == oracle.load(chosen, 3).tolist()
    got = np.asarray(out, np.float64).reshape(-1, D)
    np.testing.assert_allclose(got, want, atol=0.03)


REFUSED = {
    "n_experts": [{"n_experts": 0}, {"n_experts": 5, "routing": "sliced"}],
    "top_k": [{"top_k": 0}, {"top_k": 4}, {"top_k": 1.5}],
    "d_ff": [{"d_ff": 0}],
    "shared_d_ff": [{"shared_d_ff": -1}],
    "routing": [{"routing": "hash"}],
    "hash_seed": [
        {"hash_seed": -1},
        {"hash_seed": 1},
        {"hash_seed": 1, "routing": "balanced"},
    ],
    "weights": [{"weights": "ones"}, {"weights": "uniform"}],
    "scores": [
        {"scores": "relu"},
        {"scores": "sqrt_softplus", "weights": "uniform", "routing": "random"},
    ],
    "normalize": [
        {"top_k": 1},
        {"normalize": 3},
        {"normalize": False, "weights": "uniform", "routing": "random"},
    ],
    "route_scale": [{"route_scale": 0.0}, {"route_scale": "2"}],
    "balance_weight": [
        {"balance_weight": -1.0},
        {"balance_weight": 0.5, "routing": "random"},
    ],
}


@pytest.mark.parametrize("field", [field.name for field in fields(ExpertsConfig)])
def test_impossible_settings_are_refused_by_name(field):
    for options in REFUSED[field]:
        with pytest.raises(ConfigError, match=rf"^experts\.{field} = "):
            ExpertsConfig(**(SMALL | options))


def test_tables_and_ids_belong_to_their_routing():
    learned, balanced = experts(), ExpertsConfig(**SMALL, routing="balanced")
    ids = jnp.zeros((B, T, 2), int)
    with pytest.raises(ShapeError, match="None for 'learned' routing"):
        start(learned, None, ids)
    with pytest.raises(ShapeError, match=r"expert_ids has shape \(\)"):
        start(experts(routing="random"))
    with pytest.raises(ShapeError, match="expert_ids"):
        start(experts(routing="random"), None, ids[..., :1])
    with pytest.raises(ShapeError, match="mask_BT"):
        start(learned, jnp.ones((B, T + 1), bool))
    with pytest.raises(ConfigError, match=r"experts\.routing = 'learned'"):
        learned.config.table(V)
    with pytest.raises(ConfigError, match="'bigram' for a layout"):
        balanced.layout(V, 0)
    with pytest.raises(ConfigError, match="counts_V"):
        balanced.table(V)
    with pytest.raises(ShapeError, match="counts_V"):
        balanced.table(V, np.ones(V - 1, int))
    seeds = [ExpertsConfig(**SMALL, routing="random", hash_seed=s) for s in (0, 1)]
    assert (seeds[0].table(V) != seeds[1].table(V)).any()
