"""The switch of a memory's kernels reaches its reads and the sums of its gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from memjax.errors import ConfigError
from memjax.models.language_model import LanguageModel
from memjax.models.layouts import table_reads
from memjax.ops.row_gradient import RowGradient
from memjax.optim.table_optimizer import rowwise
from memjax.optim.tables import table_optimizer
from tests.models.test_memories import SMALL, TOKENS, model_with


def launches(program, *args):
    """Kernels of a program for one NVIDIA GPU."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("x",), abstract_device=device)
    ):
        traced = jax.jit(program).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return text.count("@__gpu$xla.gpu.triton(") + text.count("@mosaic_gpu_v2(")


@pytest.mark.parametrize(
    "kind, kernel, found",
    [
        ("product_key", "auto", True),
        ("product_key", "xla", False),
        ("peer", "triton", True),
        ("peer", "xla", False),
    ],
)
def test_reads_of_a_memory(kind, kernel, found):
    memory = dataclasses.replace(SMALL[kind], layers=(0,), kernel=kernel)
    model = LanguageModel(model_with(memory, n_layers=1))
    params = jax.eval_shape(functools.partial(model.init, jax.random.key(0)), TOKENS)
    assert (launches(model.apply, params, TOKENS) > 0) == found
    reads = table_reads(model.config)
    assert {each.kernel for each in reads.values()} == {kernel}


@pytest.mark.parametrize("kernel, found", [("auto", False), ("triton", True)])
def test_gradients_of_single_rows_of_a_dense_table(kernel, found):
    memory = dataclasses.replace(SMALL["engram"], layers=(0,), kernel=kernel)
    model = LanguageModel(model_with(memory, n_layers=1))
    params = jax.eval_shape(functools.partial(model.init, jax.random.key(0)), TOKENS)

    def loss(params):
        return jnp.sum(model.apply(params, TOKENS))

    assert (launches(jax.grad(loss), params) > 0) == found


@pytest.mark.parametrize("kernels, found", [(None, True), ({"t": "xla"}, False)])
def test_sums_of_a_table_optimizer(kernels, found):
    optimizer = table_optimizer(rowwise(optax.sgd(0.1)), kernels=kernels)
    tables = {"t": jnp.ones((9, 4))}
    reads = RowGradient(jnp.zeros((6, 2), jnp.int32), None, jnp.ones((6, 4)))

    def step(tables, reads):
        return optimizer.apply({"t": reads}, optimizer.init(tables), tables)[0]

    assert (launches(step, tables, reads) > 0) == found


def test_what_is_no_kernel_of_a_memory():
    with pytest.raises(ConfigError, match=r"memories.kernel = 'cuda' .*'triton'"):
        dataclasses.replace(SMALL["product_key"], kernel="cuda")
    with pytest.raises(ConfigError, match=r"memories.kernel = 'xla' .*\('auto',\)"):
        dataclasses.replace(SMALL["fast_weight"], kernel="xla")
    one = dataclasses.replace(SMALL["product_key"], layers=(0,), shared_table="pool")
    other = dataclasses.replace(one, layers=(1,), kernel="xla")
    with pytest.raises(ConfigError, match="kernel auto.*kernel xla|kernel xla"):
        model_with(one, other)
    with pytest.raises(ConfigError, match="kernel = 'mosaic' .* a multiple of 128"):
        model_with(dataclasses.replace(one, kernel="mosaic"))
    fp8 = dataclasses.replace(one, kernel="mosaic", table_mode="fp8")
    with pytest.raises(ConfigError, match="kernel = 'mosaic' .*FP8"):
        model_with(fp8)
