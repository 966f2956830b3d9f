"""Keys of a product-key memory: each way to draw them, sharing, freezing, errors."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.layers.precision import Dtypes, PrecisionConfig
from memjax.layers.sub_keys import flat_keys, sub_keys

FLOAT32 = Dtypes.of(PrecisionConfig())
H, N, K = 3, 64, 12
BINARY = dict(n_sub_keys=8, key_width=6, init="binary")


class Owner(nn.Module):
    """A module that has nothing but keys."""

    options: dict
    flat: bool = False
    dtypes: Dtypes = FLOAT32

    @nn.compact
    def __call__(self):
        make = flat_keys if self.flat else sub_keys
        size = "n_slots" if self.flat else "n_sub_keys"
        options = {"n_heads": H, size: N, "key_width": K} | dict(self.options)
        return make(self, dtypes=self.dtypes, **options)


def draw(flat=False, dtypes=FLOAT32, seed=0, **options):
    """(keys, params)"""
    keys, variables = Owner(options, flat, dtypes).init_with_output(
        jax.random.key(seed)
    )
    return np.asarray(keys), variables["params"]


@pytest.mark.parametrize(
    ("init", "bound"), [("uniform_half", (K / 2) ** -0.5), ("uniform_full", K**-0.5)]
)
def test_uniform_keys_fill_their_interval(init, bound):
    keys, params = draw(init=init)
    assert params["keys"].shape == keys.shape == (H, 2, N, K // 2)
    assert 0.98 * bound < keys.max() <= bound and -bound <= keys.min() < -0.98 * bound
    assert abs(keys.std() - bound / 3**0.5) < 0.03 * bound


@pytest.mark.parametrize(
    ("options", "std"),
    [
        ({"init": "gaussian", "std": 0.02}, 1.0),
        ({"init": "normal", "std": 0.3}, 0.3),
        ({"init": "truncated_normal", "std": 0.3}, 0.3),
    ],
)
def test_normal_keys_have_their_deviation(options, std):
    keys, _ = draw(**options)
    assert abs(keys.std() / std - 1) < 0.05 and abs(keys.mean()) < 0.1 * std
    largest = np.abs(keys).max() / std
    if options["init"] == "truncated_normal":
        assert 2.2 < largest <= 2 / 0.8796
    else:
        assert largest > 2.5


def test_heads_halves_and_seeds_differ():
    keys, _ = draw()
    halves = keys.reshape(2 * H, -1)
    assert len({half.tobytes() for half in halves}) == 2 * H
    assert np.abs(draw(seed=1)[0] - keys).max() > 0.1


def test_binary_keys_are_all_sign_patterns():
    keys, params = draw(**BINARY)
    assert np.unique(np.abs(keys)).tolist() == [np.float32(6**-0.5)]
    assert len(np.unique(keys[1, 1], axis=0)) == 8
    np.testing.assert_array_equal(keys, np.broadcast_to(keys[0, 0], keys.shape))
    np.testing.assert_array_equal(keys[0, 0, 5] > 0, [True, False, True])
    assert draw(normalized=True, **BINARY)[0].max() == pytest.approx(3**-0.5)


def test_normalized_keys_have_length_one():
    keys, _ = draw(normalized=True, init="gaussian")
    np.testing.assert_allclose(np.linalg.norm(keys, axis=-1), 1, atol=1e-6)


def test_shared_keys_are_one_matrix_whose_gradient_adds_up():
    keys, params = draw(shared=True)
    assert params["keys"].shape == (N, K // 2)
    np.testing.assert_array_equal(keys, np.broadcast_to(params["keys"], keys.shape))
    owner = Owner({"shared": True})
    grad = jax.grad(lambda p: owner.apply({"params": p}).sum())(params)
    np.testing.assert_array_equal(grad["keys"], 2 * H)


def test_keys_that_are_not_learned_have_another_name_and_no_gradient():
    keys, params = draw(learned=False)
    assert set(params) == {"fixed_keys"}
    owner = Owner({"learned": False})
    grad = jax.grad(lambda p: owner.apply({"params": p}).sum())(params)
    np.testing.assert_array_equal(grad["fixed_keys"], 0)
    np.testing.assert_array_equal(keys, params["fixed_keys"])


def test_flat_keys():
    keys, params = draw(flat=True, init="uniform_half")
    assert params["keys"].shape == keys.shape == (H, N, K)
    assert 0.98 * K**-0.5 < keys.max() <= K**-0.5
    keys, params = draw(flat=True, shared=True)
    assert params["keys"].shape == (N, K) and keys.shape == (H, N, K)
    keys, _ = draw(flat=True, init="binary", n_slots=16, key_width=4)
    assert len(np.unique(keys[0], axis=0)) == 16 and keys.max() == 0.5


def test_stored_bfloat16_comes_out_as_float32():
    policy = Dtypes.of(PrecisionConfig(params="bfloat16"))
    keys, params = draw(dtypes=policy)
    assert params["keys"].dtype == jnp.bfloat16 and keys.dtype == np.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "other"}, "memories.key_init = 'other' is not allowed: one of"),
        ({"key_width": 7}, "memories.key_width = 7 is not allowed: an even number"),
        (
            BINARY | {"n_sub_keys": 7},
            r"binary for 2\^3 keys of width 3, and there are 7",
        ),
        ({"init": "binary", "key_width": 10**6}, "and there are 64"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        draw(**options)
