"""The linear map: a product over the last axis, whatever stands before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.layers.precision import Dtypes, PrecisionConfig
from memjax.layers.projection import projection


@pytest.mark.parametrize("lead", [(), (3,), (2, 5), (2, 0), (2, 1, 3)])
def test_it_multiplies_the_last_axis(lead):
    module = projection("map", 4, Dtypes.of(PrecisionConfig()), use_bias=True)
    x = jax.random.normal(jax.random.key(0), (*lead, 6))
    params = module.init(jax.random.key(1), x)["params"]
    params["bias"] = jnp.arange(4.0)
    got = module.apply({"params": params}, x)
    assert isinstance(got, jax.Array)
    want = np.float64(x) @ np.float64(params["kernel"]) + np.arange(4)
    assert got.shape == (*lead, 4)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_kernel_copies_nothing():
    """A gradient of more axes was transposed, all tokens of it, on a CPU."""
    module = projection("map", 4, Dtypes.of(PrecisionConfig()))
    x = jax.random.normal(jax.random.key(0), (2, 16, 6))
    bar = jax.random.normal(jax.random.key(2), (2, 16, 4))
    variables = module.init(jax.random.key(1), x)

    @jax.jit
    def gradient(variables, x, bar):
        return jax.vjp(lambda v: module.apply(v, x), variables)[1](bar)[0]

    text = gradient.lower(variables, x, bar).compile().as_text()
    assert "f32[4,32]" not in text and "f32[6,32]" not in text
    got = gradient(variables, x, bar)["params"]["kernel"]
    want = np.einsum("bti,bto->io", np.float64(x), np.float64(bar))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
