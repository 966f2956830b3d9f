"""Query networks: each kind against numpy, norms, freezing, initial values, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError, ShapeError
from memjax.layers.precision import Dtypes, PrecisionConfig
from memjax.layers.query_network import QueryNetwork

FLOAT32 = Dtypes.of(PrecisionConfig())
H, Q, D = 2, 8, 8
X = jax.random.normal(jax.random.key(7), (2, 3, D))
KEY = jax.random.key(0)
MASK = jnp.ones((2, 3), bool)


def network(kind, **fields):
    sizes = {"n_heads": H, "key_width": Q, "dtypes": FLOAT32} | fields
    return QueryNetwork(kind=kind, **sizes)


def built(kind, **fields):
    """(network, variables, queries of X)"""
    net = network(kind, **fields)
    start = jax.jit(lambda: net.init_with_output(KEY, X, MASK, train=False))
    query, variables = start()
    return net, variables, np.asarray(query)


def test_linear_queries_are_ordered_by_head_then_place():
    _, variables, query = built("linear")
    kernel, bias = variables["params"]["kernel_0"], variables["params"]["bias_0"]
    assert query.shape == (2, 3, H, Q)
    for a in range(H):
        columns = slice(a * Q, (a + 1) * Q)
        want = X @ kernel[:, columns] + bias[columns]
        np.testing.assert_allclose(query[:, :, a], want, atol=1e-6)


def test_mlp_has_relu_between_and_not_after():
    _, variables, query = built("mlp", hidden=(5, 4))
    p = variables["params"]
    assert {n: v.shape for n, v in p.items() if n.startswith("k")} == {
        "kernel_0": (D, 5),
        "kernel_1": (5, 4),
        "kernel_2": (4, H * Q),
    }
    x = X
    for i in range(3):
        x = x @ p[f"kernel_{i}"] + p[f"bias_{i}"]
        x = np.maximum(x, 0) if i < 2 else x
    np.testing.assert_allclose(query.reshape(2, 3, -1), x, atol=1e-6)
    assert query.min() < 0


def test_per_head_half_is_one_net_for_each_half():
    net, variables, query = built("per_head_half", hidden=(5,))
    p = variables["params"]
    assert p["kernel_0"].shape == (2 * H, D, 5) and p["bias_1"].shape == (2 * H, Q // 2)
    for a in range(H):
        for half in range(2):
            g = 2 * a + half
            hidden = np.maximum(X @ p["kernel_0"][g] + p["bias_0"][g], 0)
            want = hidden @ p["kernel_1"][g] + p["bias_1"][g]
            got = query[:, :, a, half * Q // 2 : (half + 1) * Q // 2]
            np.testing.assert_allclose(got, want, atol=1e-6)
    grad = jax.grad(
        lambda x: (
            network("per_head_half", hidden=(5,))
            .apply(variables, x, MASK, train=False)[0, 0, 1]
            .sum()
        )
    )(X)
    assert np.abs(grad[0, 0]).max() > 0 and np.abs(grad[0, 1:]).max() == 0


def test_identity_and_shuffled():
    _, variables, query = built("identity", n_heads=3)
    assert "params" not in variables
    np.testing.assert_array_equal(query, np.repeat(np.asarray(X)[:, :, None], 3, 2))
    x = jnp.arange(8.0).reshape(1, 1, 8)
    net = network("shuffled", n_heads=3)
    query = net.apply({}, x, jnp.ones((1, 1), bool), train=False)
    assert query[0, 0].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 4, 5, 2, 3, 6, 7],
        [0, 2, 4, 6, 1, 3, 5, 7],
    ]


def test_layer_norm_acts_on_each_half_with_one_gain():
    _, variables, query = built("linear", norm="layer")
    _, _, raw = built("linear")
    assert variables["params"]["norm_scale"].shape == (Q // 2,)
    halves = raw.reshape(2, 3, H, 2, Q // 2)
    centred = halves - halves.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(query.reshape(halves.shape), want, atol=1e-5)


def test_batch_norm_follows_every_linear_map():
    for kind, shapes in (("mlp", [(5,), (16,)]), ("per_head_half", [(4, 5), (4, 4)])):
        net, variables, _ = built(kind, hidden=(5,), norm="batch")
        stats = variables["batch_stats"]
        assert [stats[f"norm_{i}"]["mean"].shape for i in range(2)] == shapes
        mask = MASK.at[1, 1:].set(False)
        apply = functools.partial(net.apply, train=True, mutable=["batch_stats"])
        query, state = jax.jit(apply)(variables, X, mask)
        real = np.asarray(query)[np.asarray(mask)]
        np.testing.assert_allclose(real.mean(0), 0, atol=1e-5)
        moved = state["batch_stats"]["norm_0"]["mean"]
        assert np.abs(moved).max() > 0


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_a_network_that_is_not_learned_passes_its_gradient_to_the_stream_only(norm):
    free, variables, _ = built("linear", norm=norm)
    fixed = network("linear", norm=norm, learned=False)

    @jax.jit
    def both(variables, x):
        def loss(variables, x, net):
            out, state = net.apply(
                variables, x, MASK, train=True, mutable=["batch_stats"]
            )
            return jnp.sum(out**3), state

        grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
        return grad(variables, x, free), grad(variables, x, fixed)

    (free_grads, state), (fixed_grads, fixed_state) = both(variables, X)
    np.testing.assert_allclose(free_grads[1], fixed_grads[1], atol=1e-5)
    for grad in jax.tree.leaves(free_grads[0]["params"]):
        assert np.abs(grad).max() > 0
    for grad in jax.tree.leaves(fixed_grads[0]["params"]):
        np.testing.assert_array_equal(grad, 0)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(fixed_state), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("init", ["uniform", "xavier_uniform", "truncated_normal"])
def test_initial_values(init):
    net = network("per_head_half", hidden=(200,), init_rule=init)
    x = jnp.zeros((1, 100))
    start = jax.jit(lambda: net.init(KEY, x, jnp.ones(1, bool), train=False))
    p = start()["params"]
    kernel, bias = np.asarray(p["kernel_0"]), np.asarray(p["bias_0"])
    assert len({net.tobytes() for net in kernel}) == 2 * H
    if init == "uniform":
        assert 0.098 < kernel.max() <= 0.1 and -0.1 <= bias.min() < -0.09
    else:
        std = (2 / 300) ** 0.5 if init == "xavier_uniform" else 0.1
        assert abs(kernel.std() / std - 1) < 0.02
        np.testing.assert_array_equal(bias, 0)
    _, variables, _ = built("linear", use_bias=False, init_rule=init)
    assert set(variables["params"]) == {"kernel_0"}


def test_bfloat16_compute_and_wide_norms():
    policy = Dtypes.of(PrecisionConfig(compute="bfloat16"))
    _, variables, query = built("linear", dtypes=policy)
    assert query.dtype == jnp.bfloat16
    assert variables["params"]["kernel_0"].dtype == jnp.float32
    _, _, query = built("linear", dtypes=policy, norm="batch")
    assert query.dtype == np.float32


def test_errors():
    with pytest.raises(ConfigError, match="kind = 'cosine' is not allowed: one of"):
        built("cosine")
    with pytest.raises(ShapeError, match=r"x has shape \(2, 3, 8\), expected a width"):
        built("identity", key_width=6)
    with pytest.raises(ShapeError, match="a width divisible by 16"):
        built("shuffled", n_heads=4)
