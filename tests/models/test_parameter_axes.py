"""Every parameter has logical axes, and the default rules divide every matrix."""

import jax
import pytest

from memjax.layers.block import HyperConfig
from memjax.layers.cross_attention import CedConfig
from memjax.layers.experts import ExpertsConfig
from memjax.models.config import ModelConfig
from memjax.models.parameter_axes import parameter_axes
from memjax.models.parameters import abstract_params
from memjax.optim.labels import path_name
from memjax.parallel.logical_axes import LogicalRules
from tests.models.test_memories import SMALL

RULES = LogicalRules((("fsdp", 2), ("tensor", 2)))
SIZES = {
    "vocab_size": 32,
    "n_layers": 2,
    "d_model": 16,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_ff": 24,
}
MODELS = {
    "scanned experts": {
        "experts": ExpertsConfig(n_experts=4, d_ff=8, shared_d_ff=8),
        "n_layers": 3,
    },
    "decoder": {
        "ced": CedConfig(first_decoder=1, share_kv=True),
        "hyper": HyperConfig(),
    },
    **{
        kind: {"memories": (SMALL[kind],)} for kind in ("engram", "peer", "fast_weight")
    },
}
# Matrices that are small, whatever the model: whole on every device.
SMALL_LEAVES = ("scale", "base", "conv", "bias", "w_attn", "w_ffn")


@pytest.mark.parametrize("model", MODELS)
def test_default_rules_divide_every_matrix(model: str) -> None:
    config = ModelConfig(**{**SIZES, **MODELS[model]})
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    for path, leaf in leaves:
        name = path_name(path)
        names = parameter_axes(name, leaf.shape)
        assert len(names) == leaf.ndim, name
        RULES.spec(name, names, leaf.shape)  # no two axes on one axis of the mesh
        matrix = leaf.ndim > 1 and not name.endswith(SMALL_LEAVES)
        if "mixing" not in name and name != "block_0/memory/fixed_keys":
            divided = any(RULES.axis_of(axis) for axis in names)
            assert divided == matrix, (name, names)
        assert (names[:1] == ("layers",)) == name.startswith("blocks_")


def test_what_an_axis_is() -> None:
    """Scanned experts, shared experts, keys and values that decoder blocks share."""
    for path, n_axes, want in (
        (
            "blocks_0_2/feed_forward/gate/kernel",
            4,
            ("layers", "experts", "embed", "expert_mlp"),
        ),
        ("block_0/feed_forward/shared/out/kernel", 2, ("expert_mlp", "embed")),
        ("block_0/feed_forward/router/kernel", 2, ("embed", None)),
        ("block_1/attention/local/key/kernel", 2, ("embed", "kv_heads")),
        ("source/value/kernel", 2, ("embed", "kv_heads")),
        ("memory_head", 2, ("vocab", "embed")),
        ("block_0/memory/embedding", 2, ("table_rows", "table_width")),
        ("block_0/memory/query/kernel_0", 2, ("kernel_in", "kernel_out")),
        ("block_0/attention_norm/scale", 1, (None,)),
    ):
        assert parameter_axes(path, (8,) * n_axes) == want
