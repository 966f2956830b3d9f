"""The layer that mixes residual streams: where it starts, what its options change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.layers.hyper_connections import HyperConnection
from memjax.layers.precision import Dtypes, PrecisionConfig
from memjax.ops.hyper_connections import collapse, expand, first_pre, hyper_residual

FLOAT32 = Dtypes.of(PrecisionConfig())
D = 6


def layer(n_streams=4, **options):
    return HyperConnection(n_streams=n_streams, dtypes=FLOAT32, **options)


def stream_of(n_streams):
    return jax.random.normal(jax.random.key(1), (2, 3, n_streams, D))


def test_a_model_starts_near_separate_streams_that_are_read_by_their_mean():
    stream = stream_of(4)
    variables = layer().init(jax.random.key(0), stream)
    mix = layer().apply(variables, stream)
    np.testing.assert_allclose(mix.pre, 0.25, atol=0.01)
    np.testing.assert_allclose(mix.post, 1.0, atol=0.01)
    corner = np.exp(4) / (np.exp(4) + 3)
    np.testing.assert_allclose(mix.comb[..., 0, 0], corner, atol=0.01)
    np.testing.assert_allclose(mix.comb.sum(-2), 1.0, atol=1e-5)
    shapes = jax.tree.map(jnp.shape, variables["params"])
    assert shapes == {"kernel": (24, 24), "scale": (3,), "base": (24,)}
    std = float(jnp.std(variables["params"]["kernel"]))
    assert 0.015 < std < 0.025


def test_one_stream_without_kernel_is_the_plain_residual_to_one_millionth():
    """eps is all that is left (pre 1 + eps, comb 1 - eps), and nothing without it."""
    x = stream_of(1)[..., 0, :]
    for eps, atol in ((1e-6, 5e-6), (0.0, 0.0)):
        module = layer(1, eps=eps)
        variables = module.init(jax.random.key(0), expand(x, 1))
        params = variables["params"] | {"kernel": jnp.zeros((D, 3))}
        mix = module.apply({"params": params}, expand(x, 1))
        for pre in (None, first_pre(x, 1)):
            new = hyper_residual(expand(x, 1), mix, jnp.sin, pre=pre)
            got = collapse(new, jnp.ones(1))
            np.testing.assert_allclose(got, x + jnp.sin(x), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("changed", "weight"),
    [({"n_iterations": 1}, "comb"), ({"eps": 0.1}, "pre"), ({"norm_eps": 9.0}, "post")],
)
def test_every_option_changes_the_weights(changed, weight):
    stream = stream_of(4)
    variables = layer().init(jax.random.key(0), stream)
    params = jax.tree.map(lambda leaf: leaf + 0.3, variables["params"])
    plain, other = (
        getattr(module.apply({"params": params}, stream), weight)
        for module in (layer(), layer(**changed))
    )
    assert np.abs(plain - other).max() > 1e-4


def test_weights_are_kept_wide_whatever_the_stream_is():
    dtypes = Dtypes.of(PrecisionConfig(params="bfloat16", compute="bfloat16"))
    module, low = HyperConnection(n_streams=4, dtypes=dtypes), jnp.dtype("bfloat16")
    stream = stream_of(4).astype(low)
    variables = module.init(jax.random.key(0), stream)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {low}
    mix = module.apply(variables, stream)
    assert {leaf.dtype for leaf in mix} == {jnp.dtype("float32")}


@pytest.mark.parametrize("single_pass", [False, True])
def test_every_weight_of_two_sub_blocks_is_trained_in_both_forms(single_pass):
    """In the single-pass form the last pre collapses the streams."""
    module, x = layer(2, n_iterations=3), stream_of(1)[..., 0, :]
    first = module.init(jax.random.key(0), expand(x, 2))["params"]
    shift = jax.random.normal(jax.random.key(2), first["base"].shape)
    start = [first | {"base": first["base"] + shift}, first]

    @jax.jit
    @jax.grad
    def gradient(params):
        stream, pre = expand(x, 2), first_pre(x, 2)
        for one in params:
            mix = module.apply({"params": one}, stream)
            handed = pre if single_pass else None
            stream = hyper_residual(stream, mix, jnp.sin, pre=handed)
            pre = mix.pre
        end = collapse(stream, pre if single_pass else jnp.ones_like(pre))
        return jnp.sum(end**2)

    found = gradient(start)
    # The streams are equal before the first sub-block, so its comb has nothing to mix.
    assert (np.abs(found[0]["base"][:4]) > 1e-4).all()
    assert (np.abs(found[1]["base"]) > 1e-4).all()
    assert all((np.abs(one["kernel"]).sum(0) > 0).all() for one in found)


def test_impossible_numbers_are_refused_when_the_layer_is_made():
    for field, value in (
        ("n_streams", 0),
        ("n_iterations", 0),
        ("eps", -1.0),
        ("norm_eps", float("nan")),
    ):
        with pytest.raises(ConfigError, match=f"{field} = "):
            layer(**{field: value})
