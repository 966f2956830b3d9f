"""Gates and the combinator: formulas, edges, gradients, bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.errors import ConfigError
from memjax.ops.gates import (
    COMBINE_MODES,
    GATE_KINDS,
    combine,
    gate_of,
    normalized_dot,
    plain_gate,
    rms_normalize,
    signed_sqrt_gate,
)


def _oracle_gate(score: float, zero: str) -> float:
    root = max(abs(score), 1e-6) ** 0.5
    sign = np.sign(score) if zero == "sign" else np.copysign(1.0, score)
    return float(1 / (1 + np.exp(-sign * root)))


@pytest.mark.parametrize("zero", ["sign", "copysign"])
def test_signed_sqrt_gate_equals_its_formula(zero):
    scores = np.array([0.0, -0.0, 1e-7, -1e-7, 1e-4, -0.3, 2.0, -9.0], np.float32)
    want = [_oracle_gate(float(s), zero) for s in scores]
    got = signed_sqrt_gate(jnp.asarray(scores), zero=zero)
    np.testing.assert_allclose(got, want, atol=1e-6)
    jitted = jax.jit(lambda s: signed_sqrt_gate(s, zero=zero))(scores)
    np.testing.assert_allclose(jitted, got, rtol=1e-6)


def test_conventions_differ_at_zero_only():
    zero = jnp.zeros(())
    assert float(signed_sqrt_gate(zero, zero="sign")) == 0.5
    assert float(signed_sqrt_gate(zero, zero="copysign")) > 0.5
    assert float(signed_sqrt_gate(-zero, zero="copysign")) < 0.5
    other = jnp.array([1e-9, -3.0])
    np.testing.assert_array_equal(
        signed_sqrt_gate(other, zero="sign"), signed_sqrt_gate(other, zero="copysign")
    )


def test_gradient_of_the_signed_sqrt_gate():
    slope = jax.vmap(jax.grad(signed_sqrt_gate))
    scores = jnp.array([0.0, 9e-7, -9e-7, 0.5, -2.0])
    got = slope(scores)
    np.testing.assert_array_equal(got[:3], 0)
    for s, g in zip(scores[3:], got[3:], strict=True):
        high, low = (_oracle_gate(float(s) + d, "sign") for d in (1e-4, -1e-4))
        np.testing.assert_allclose(g, (high - low) / 2e-4, rtol=1e-3)


def test_plain_gate_is_the_sigmoid():
    np.testing.assert_allclose(plain_gate(jnp.array([0.0, 1.0])), [0.5, 0.7310586])


@pytest.mark.parametrize("kind", GATE_KINDS)
def test_gates_by_name_keep_dtype_and_range(kind):
    gate = gate_of(kind, jnp.array([-80.0, 0.0, 80.0], jnp.bfloat16))
    assert gate.dtype == jnp.bfloat16
    assert np.all((np.asarray(gate) >= 0) & (np.asarray(gate) <= 1))


def test_unknown_names_say_what_is_allowed():
    with pytest.raises(ConfigError, match="signed_sqrt"):
        gate_of("sigmoid", jnp.zeros(()))
    with pytest.raises(ConfigError, match="copysign"):
        signed_sqrt_gate(jnp.zeros(()), zero="both")
    read, gate = jnp.ones((2, 3)), jnp.ones((2,))
    with pytest.raises(ConfigError, match="capped_rms"):
        combine(read, gate, read, mode="mean")
    with pytest.raises(ConfigError, match=r"cap = 1\.5"):
        combine(read, gate, read, mode="capped", cap=1.5)
    with pytest.raises(ConfigError, match="dense"):
        combine(read, gate, None, mode="convex")


def _oracle_combine(read, gate, dense, mode, cap):
    g = gate[..., None]
    if mode == "capped_rms":
        read = read / np.sqrt(np.mean(read**2, -1, keepdims=True) + 1e-6)
        dense = dense / np.sqrt(np.mean(dense**2, -1, keepdims=True) + 1e-6)
    return {
        "sum": g * read,
        "convex": g * read + (1 - g) * dense,
        "interpolate": cap * g * read + (1 - cap) * dense,
        "capped": cap * g * read + (1 - cap * g) * dense,
        "capped_rms": cap * g * read + (1 - cap * g) * dense,
    }[mode]


@pytest.mark.parametrize("mode", COMBINE_MODES)
def test_combine_equals_its_formula(mode):
    rng = np.random.default_rng(0)
    read, dense = rng.normal(size=(2, 4, 5, 8))
    gate = rng.uniform(size=(4, 5))
    got = combine(
        jnp.asarray(read, jnp.float32),
        jnp.asarray(gate, jnp.float32),
        jnp.asarray(dense, jnp.float32),
        mode=mode,
        cap=0.3,
    )
    want = _oracle_combine(read, gate, dense, mode, 0.3)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["convex", "capped", "capped_rms"])
def test_a_closed_gate_leaves_the_dense_path_alone(mode):
    dense = jax.random.normal(jax.random.key(0), (3, 8))
    got = combine(1e3 * dense[::-1], jnp.zeros(3), dense, mode=mode, cap=0.5)
    want = rms_normalize(dense) if mode == "capped_rms" else dense
    np.testing.assert_array_equal(got, want)


def test_a_closed_gate_adds_nothing_in_sum():
    read = jnp.full((2, 4), 7.0)
    np.testing.assert_array_equal(combine(read, jnp.zeros(2), None, mode="sum"), 0)


@pytest.mark.parametrize("mode", ["interpolate", "capped", "capped_rms"])
def test_the_memory_coefficient_never_passes_the_cap(mode):
    """The derivative with respect to the read is at most the cap, whatever the gate."""
    read, dense = jax.random.normal(jax.random.key(1), (2, 1, 4))
    read = rms_normalize(read)
    slope = jax.jacobian(lambda r: combine(r, jnp.ones(1), dense, mode=mode, cap=0.25))(
        read
    )
    assert float(jnp.max(jnp.abs(slope))) <= 0.25 + 1e-6


def test_refine_sees_the_gated_read_and_is_mixed_with_it():
    read, dense = jnp.full((1, 2), 2.0), jnp.full((1, 2), 10.0)
    got = combine(
        read,
        jnp.array([0.5]),
        dense,
        mode="interpolate",
        cap=0.25,
        refine=lambda gated: gated + 1,
    )
    np.testing.assert_allclose(got, 0.25 * (0.5 * 2 + 1) + 0.75 * 10)


def test_combine_is_linear_in_read_and_dense():
    key = jax.random.key(2)
    a, b, c, d = jax.random.normal(key, (4, 3, 5))
    gate = jax.random.uniform(key, (3,))
    for mode in ("sum", "convex", "interpolate", "capped"):
        both = combine(a + b, gate, c + d, mode=mode)
        apart = combine(a, gate, c, mode=mode) + combine(b, gate, d, mode=mode)
        np.testing.assert_allclose(both, apart, atol=1e-5)


def test_rms_normalize_keeps_zero_vectors_and_dtype():
    x = jnp.array([[0.0, 0.0], [3.0, 4.0]], jnp.bfloat16)
    got = rms_normalize(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[0], 0)
    np.testing.assert_allclose(np.mean(np.asarray(got[1], float) ** 2), 1, rtol=0.02)


def test_normalized_dot_is_the_product_of_two_norms():
    rng = np.random.default_rng(2)
    query, key = rng.normal(size=(2, 3, 4, 6))
    query[0, 0] = 0
    gain = rng.normal(size=6)

    def root(x):
        return np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    want = np.sum(gain * (query / root(query)) * (key / root(key)), axis=-1)
    got = normalized_dot(
        jnp.float32(query), jnp.float32(key), jnp.float32(gain), eps=1e-5
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert got[0, 0] == 0
