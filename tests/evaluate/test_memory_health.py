"""Usage and the metrics of a small model."""

import jax
import numpy as np

from memjax.evaluate.bits_per_byte import token_nats
from memjax.evaluate.memory_health import make_health, usage
from memjax.layers.engram import EngramConfig
from memjax.models.config import ModelConfig
from memjax.models.language_model import LanguageModel
from memjax.models.layouts import layouts


def test_usage_counts_rows_and_their_entropy():
    got = usage(np.array([[3, 3], [5, 9]]), 8)
    assert got == {"rows_touched": 3, "usage_frac": 3 / 8, "usage_entropy_bits": 1.5}
    assert usage(np.full(9, 2), 4)["usage_entropy_bits"] == 0
    nothing = usage(np.array([], np.int64), 4)
    assert set(nothing.values()) == {0}


def test_metrics_of_scanned_blocks_and_a_memory_after_the_last():
    memory = EngramConfig(layers=(2,), n_heads=2, rows_per_head=7, row_width=4)
    config = ModelConfig(
        vocab_size=17,
        n_layers=2,
        d_model=8,
        n_heads=2,
        n_kv_heads=2,
        d_ff=8,
        arrangement="probability",
        memories=(memory,),
    )
    model = LanguageModel(config)
    rng = np.random.default_rng(1)
    batch = {
        "tokens": rng.integers(0, 17, (2, 6)).astype(np.int32),
        "targets": rng.integers(0, 17, (2, 6)).astype(np.int32),
        "segments": np.array([[1] * 6, [1] * 3 + [0] * 3], np.int32),
        "positions": np.tile(np.arange(6, dtype=np.int32), (2, 1)),
    }
    batch["weights"] = (batch["segments"] > 0).astype(np.float32)

    def loss(params, batch, key, drop_memory=False):
        del key
        logits = model.apply(
            {"params": params},
            *(batch[name] for name in ("tokens", "segments", "positions")),
            drop_memory=drop_memory,
        )
        nats = token_nats(logits, batch["targets"]) * batch["weights"]
        return nats.sum(), {"weight": batch["weights"].sum()}

    params = jax.jit(model.init)(jax.random.key(0), batch["tokens"])["params"]
    found = make_health(model, loss)(params, batch)
    assert all(np.isfinite(value) for value in found.values())
    assert found["rows_touched/layer_2"] <= layouts(config)[2].n_rows
    assert 0 < found["gate_q05/layer_2"] <= found["gate_q95/layer_2"] < 1
    norms = [found[f"backbone_grad_norm{x}"] for x in ("", "_without_memory")]
    assert norms[0] > 0 and norms[1] > 0 and norms[0] != norms[1]
    assert {f"stream_rms/layer_{i}" for i in range(2)} <= set(found)
