"""Which program a traced bag becomes on each platform, without its devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from memjax.errors import ConfigError
from memjax.ops.embedding_bag import embedding_bag
from memjax.ops.fp8 import dequantize_rows, fp8_bag

TRITON, MOSAIC = "__gpu$xla.gpu.triton", "mosaic_gpu_v2"


def mesh(n_devices: int) -> AbstractMesh:
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    kinds = (AxisType.Auto,)
    return AbstractMesh((n_devices,), ("data",), kinds, abstract_device=device)


def lowered(program: Any, platform: str, *args: Any, **settings: Any) -> str:
    with jax.sharding.use_abstract_mesh(mesh(1)):
        traced = jax.jit(program, **settings).trace(*args)
        return traced.lower(lowering_platforms=(platform,)).as_text()


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


BAG = array(1000, 256), array(40, 5, dtype=jnp.int32), array(40, 5)


def step(kernel: str) -> Any:
    """Value and both gradients: a forward pass, products, and sums by row."""

    def program(table: Any, ids: Any, weights: Any) -> Any:
        def loss(table: Any, weights: Any) -> Any:
            return jnp.sum(jnp.sin(embedding_bag(table, ids, weights, kernel)))

        return jax.value_and_grad(loss, argnums=(0, 1))(table, weights)

    return program


@pytest.mark.parametrize(
    "kernel, platform, call, n_calls",
    [
        # Sums by row are two launches: further items, and first ones.
        ("auto", "cuda", TRITON, 4),
        ("auto", "cpu", TRITON, 0),
        ("auto", "tpu", TRITON, 0),
        ("auto", "rocm", TRITON, 0),
        ("xla", "cuda", TRITON, 0),
        ("triton", "cuda", TRITON, 4),
        ("mosaic", "cuda", MOSAIC, 4),
    ],
)
def test_one_traced_program_for_each_platform(
    kernel: str, platform: str, call: str, n_calls: int
) -> None:
    """Warnings are errors here, those of jax about its Triton too."""
    text = lowered(step(kernel), platform, *BAG)
    assert text.count(f"@{call}(") == n_calls, "launches"
    assert (f"@{TRITON}(" in text or f"@{MOSAIC}(" in text) == (n_calls > 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "uint16"])
@pytest.mark.parametrize("kernel, call", [("triton", TRITON), ("mosaic", MOSAIC)])
def test_narrow_tables(kernel: str, call: str, dtype: str) -> None:
    def program(table: Any, ids: Any, weights: Any) -> Any:
        value, pull = jax.vjp(lambda w: embedding_bag(table, ids, w, kernel), weights)
        return value, pull(value)

    table = array(1000, 384, dtype=dtype)
    assert lowered(program, "cuda", table, *BAG[1:]).count(f"@{call}(") == 2


def test_a_published_table_in_fp8() -> None:
    """384,006,168 rows x 256: above 2^32 bytes, where offsets have 64 bits."""
    n_rows = 384_006_168
    table = array(n_rows, 256, dtype=jnp.uint8), array(n_rows, 8, dtype=jnp.uint8)
    text = lowered(dequantize_rows, "cuda", *table, array(64, 24, dtype=jnp.int32))
    assert text.count(f"@{TRITON}(") == 1
    assert lowered(fp8_bag, "cuda", *table, *BAG[1:]).count(f"@{TRITON}(") == 1


def test_programs_of_other_platforms_are_as_without_kernels() -> None:
    args = [jnp.ones(x.shape, x.dtype) for x in BAG]
    compiled = [
        jax.jit(step(kernel)).lower(*args).compile() for kernel in ("auto", "xla")
    ]
    memory: list[Any] = [each.memory_analysis() for each in compiled]
    sizes = [each.temp_size_in_bytes for each in memory]
    assert sizes[0] == sizes[1]
    one, other = (jax.tree.leaves(each(*args)) for each in compiled)
    assert all(map(jnp.array_equal, one, other))


def test_numbers_of_32_bits_in_64_bit_mode() -> None:
    with jax.enable_x64(True):
        assert lowered(step("auto"), "cuda", *BAG).count(f"@{TRITON}(") == 4
        wide = *BAG[:2], array(40, 5, dtype="float64")
        assert TRITON not in lowered(step("auto"), "cuda", *wide)


def test_derivatives_are_those_of_the_plain_form() -> None:
    """Of the gradient of the weights, too, both ways."""
    table, ids = jnp.arange(12.0).reshape(4, 3) / 9, jnp.array([[0, 1], [3, 3]])
    weights = jnp.array([[0.5, -1.0], [2.0, 0.25]])

    def loss(weights: Any, kernel: str) -> Any:
        return jnp.sum(jnp.sin(embedding_bag(table, ids, weights, kernel)))

    def second(weights: Any, kernel: str) -> Any:
        slope = jax.grad(loss)
        forward = jax.jvp(lambda w: slope(w, kernel), (weights,), (weights,))[1]
        pulled = jax.grad(lambda w: jnp.vdot(slope(w, kernel), weights))(weights)
        return forward, pulled

    got, want = (jax.jit(second, static_argnums=1)(weights, k) for k in ("auto", "xla"))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert np.abs(want).min() > 1e-3


def test_while_debugging() -> None:
    table, ids, weights = jnp.ones((3, 2)), jnp.array([[0, 2]]), jnp.ones((1, 2))
    with jax.disable_jit():
        np.testing.assert_array_equal(embedding_bag(table, ids, weights), [[2.0, 2.0]])
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.jit(embedding_bag)(table, ids + 1, weights)


def test_a_demanded_kernel_where_shard_map_checks() -> None:
    whole, split = jax.P(), jax.P("data")
    parts = jax.shard_map(
        lambda table, ids, weights: embedding_bag(table, ids, weights, "triton"),
        mesh=mesh(4),
        in_specs=(whole, split, split),
        out_specs=split,
    )
    with pytest.raises(ConfigError, match="kernel = 'triton' .*check_vma"):
        jax.eval_shape(parts, *BAG)


def test_on_several_devices_inside_shard_map_only() -> None:
    """XLA cannot divide a kernel, and would have every device do all of the work."""
    table, ids, weights = BAG
    whole, split = jax.P(), jax.P("data")

    def text(program: Any) -> str:
        shardings = tuple(
            NamedSharding(mesh(8), spec) for spec in (whole, split, split)
        )
        traced = jax.jit(program, in_shardings=shardings).trace(table, ids, weights)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    parts = jax.shard_map(
        embedding_bag,
        mesh=mesh(8),
        in_specs=(whole, split, split),
        out_specs=split,
        check_vma=False,
    )
    assert f"@{TRITON}(" in text(parts)
    assert f"@{TRITON}(" not in text(embedding_bag)
