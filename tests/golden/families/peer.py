"""Family peer: PEER layers, both readings of the scores."""

import dataclasses
import math

import flax.linen as nn

from memjax.layers.peer import Peer, PeerConfig
from tests.golden.case import Case
from tests.golden.families.fwd import dtypes_of
from tests.golden.families.memory_reads import Tree, array, check_read, reproduce

_GELU = "GELU (exact erf form)"
_LINEAR = "to_queries.0.weight"
_PARAMS = {"keys", "weight_down_embed.weight", "weight_up_embed.weight", _LINEAR}
_ARRAYS = {"x", "grad_out", "out", "grad.x", "indices", "raw_scores", "scores"}


def run(case: Case) -> None:
    settings = case.settings
    settings.take("activation", default=_GELU, one_of=(_GELU,))
    settings.take("dropout", default=0.0, one_of=(0.0,))
    d_model, n_experts = settings.take("dim"), settings.take("num_experts")
    assert case.data["x"].shape[-1] == d_model
    k = settings.take("num_experts_per_head")
    half_k = settings.take("product_key_topk", default=k)
    competing = not settings.take("non_competing_scores", default=True)
    width = settings.take("dim_key", default=d_model // 2)
    normed = settings.take("pre_rmsnorm", default=False)
    config = PeerConfig(
        n_sub_keys=math.isqrt(n_experts),
        key_width=2 * width,
        n_heads=settings.take("heads"),
        # The release reads one expert per head when scores do not compete.
        k=k if competing else 1,
        half_k=half_k,
        activation="softmax" if competing else "relu",
        separate_tables=settings.take("separate_embed_per_head", default=False),
        input_norm=normed,
    )
    assert config.n_sub_keys**2 == n_experts, "settings.num_experts is no square"
    params = _PARAMS | ({"norm.gamma"} if normed else set())
    kinds = ("param.", "grad.")
    case.expect_arrays(_ARRAYS | {kind + name for kind in kinds for name in params})

    def tree_of(kind: str) -> Tree:
        linear = array(case, kind + _LINEAR)
        linear = linear.reshape(2, config.n_heads, width, d_model)
        tree: Tree = {
            "query": {"kernel": linear.transpose(3, 1, 0, 2).reshape(d_model, -1)},
            "keys": array(case, kind + "keys").transpose(0, 2, 1, 3),
            "down_table": array(case, kind + "weight_down_embed.weight"),
            "up_table": array(case, kind + "weight_up_embed.weight"),
        }
        if normed:
            tree["input_gain"] = array(case, kind + "norm.gamma")
        return tree

    def module_of(mode: str) -> nn.Module:
        return Peer(dataclasses.replace(config, table_mode=mode), dtypes_of(case))

    state, _ = reproduce(case, module_of, tree_of)
    check_read(
        case,
        "",
        state,
        (),
        tree_of("param.")["keys"],
        rows_a_head=n_experts if config.separate_tables else 0,
        half_k=half_k,
    )
