"""The gradient's squared norm, divided by kind of parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.build.parts import Parts
from memjax.evaluate.gradient_share import kind_of, make_gradient_share
from memjax.experiment import Experiment
from memjax.layers.engram import EngramConfig
from memjax.models.config import ModelConfig
from memjax.ops.row_gradient import RowGradient


def path_of(*names):
    return tuple(jax.tree_util.DictKey(name) for name in names)


def test_names_say_what_belongs_to_the_memory():
    for names in (
        ("block_1", "memory", "value", "kernel"),
        ("block_1", "memory_0", "keys"),
        ("block_1", "memory_input_norm", "gain"),
        ("block_1", "w_mem"),
        ("block_1", "w_mem_2"),
        ("memory_head",),
    ):
        assert kind_of(path_of(*names)) == "memory"
    for names in (("block_1", "attention", "q", "kernel"), ("embedding",), ("w_attn",)):
        assert kind_of(path_of(*names)) == "backbone"


def test_parts_of_literal_gradients_add_up_to_one():
    """Squares: backbone 4, memory 16, a dense table 9; rows: (1 + 2)^2 + 4^2 = 25."""
    dense = {
        "embedding": jnp.array([2.0]),
        "block_0": {"memory": {"keys": jnp.array([4.0]), "table": jnp.array([[3.0]])}},
    }
    reads = (
        RowGradient(jnp.array([[7], [1]]), None, jnp.array([[1.0], [4.0]])),
        RowGradient(jnp.array([[7]]), jnp.array([[2.0]]), jnp.array([[1.0]])),
    )

    def gradients(params, batch, key):
        del key
        scaled = jax.tree.map(lambda x: params * x, dense)
        rows = {
            "pool": tuple(r._replace(cotangent=params * r.cotangent) for r in reads)
        }
        return (0.0, {"weight": batch}), (scaled, rows)

    share = make_gradient_share(gradients)
    found = share(1.0, 3.0)
    assert found["norm"] == pytest.approx(54**0.5 / 3)
    parts = {"backbone": 4 / 54, "memory": 16 / 54, "tables": 34 / 54}
    for name, part in parts.items():
        assert found[name] == pytest.approx(part)
    assert np.isnan([share(0.0, 3.0)[name] for name in parts]).all()


def test_both_table_modes_divide_the_gradient_alike():
    """Rows that tokens share are added up before they are squared."""
    found = {}
    batch = {
        "tokens": jnp.array([[1, 2, 1, 2, 1, 2]]),
        "targets": jnp.array([[2, 1, 2, 1, 2, 3]]),
        "segments": jnp.ones((1, 6), jnp.int32),
        "positions": jnp.arange(6)[None],
        "weights": jnp.ones((1, 6)),
    }
    for mode in ("dense", "rows"):
        memory = EngramConfig(
            layers=(0,), n_heads=1, rows_per_head=5, row_width=4, table_mode=mode
        )
        model = ModelConfig(
            n_layers=1, d_model=8, n_heads=2, n_kv_heads=2, d_ff=8, memories=(memory,)
        )
        parts = Parts(Experiment(name="share", model=model))
        params = jax.jit(parts.init_params)(jax.random.key(0))
        found[mode] = make_gradient_share(parts.gradients)(params, batch)
    assert found["dense"]["tables"] > 1e-4
    want = {name: pytest.approx(x, rel=1e-4) for name, x in found["dense"].items()}
    assert found["rows"] == want


def test_a_model_with_state_hands_a_tuple():
    def gradients(params, batch, key):
        del key
        return (0.0, ({"weight": batch}, "state of no use here")), (params, {})

    # Strings cannot leave a jitted function; here they stay inside it.
    found = make_gradient_share(gradients)({"embedding": jnp.ones(4)}, 2.0)
    assert found == {"backbone": 1.0, "memory": 0.0, "tables": 0.0, "norm": 1.0}
