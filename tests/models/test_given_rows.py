"""Models that are handed the rows of their memories instead of hashing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.build.parts import Parts
from memjax.data.config import DataConfig
from memjax.errors import ConfigError, ShapeError
from memjax.evaluate.memory_records import apply_recording
from memjax.experiment import Experiment
from memjax.models.config import ModelConfig
from memjax.models.decode import decoder
from memjax.models.language_model import LanguageModel
from memjax.models.layouts import layouts
from memjax.ops.hashed_rows import host_rows
from tests.models.parameters import filled
from tests.models.test_memories import SMALL

CONFIG = ModelConfig(
    vocab_size=257,
    n_layers=4,
    d_model=16,
    n_heads=2,
    n_kv_heads=2,
    d_ff=12,
    scan_layers=False,
    memories=(
        dataclasses.replace(SMALL["engram"], layers=(0, 2), table_mode="rows"),
        dataclasses.replace(SMALL["ngram_keys"], layers=(1,)),
        dataclasses.replace(SMALL["byte_engram"], layers=(3,)),
        dataclasses.replace(SMALL["product_key"], layers=(3,)),
    ),
)
TOKENS = np.arange(20).reshape(2, 10) * 7 % 257
SEGMENTS = np.where(np.arange(20).reshape(2, 10) % 10 < 6, 1, 2)
BATCH = {
    "tokens": TOKENS,
    "segments": SEGMENTS,
    "positions": np.tile([*range(6), *range(4)], (2, 1)),
    "targets": TOKENS,
    "weights": np.ones((2, 10), np.float32),
}


def parts(hash_on):
    data = DataConfig(context=10, batch_size=2, eval_stride=10, hash_on=hash_on)
    return Parts(Experiment(name="rows", model=CONFIG, data=data))


def close(got, want):
    """Equal but for how two programs fuse their sums; row ids are equal."""
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_loss_and_gradients_are_the_same():
    params = filled(CONFIG)
    key = jax.random.key(0)
    found = []
    assert parts("device").row_ids is None
    row_ids = parts("host").row_ids
    assert row_ids is not None
    given = row_ids(BATCH)
    for batch in (BATCH, given):
        batch = jax.tree.map(jnp.asarray, batch)
        found.append(jax.jit(parts("host").gradients)(params, batch, key))
    jax.tree.map(close, *found)


def test_given_rows_are_read():
    """Rows of any one layer rolled by a token change the logits."""
    model = LanguageModel(CONFIG)
    rows = host_rows(layouts(CONFIG), TOKENS, SEGMENTS)
    apply = jax.jit(
        lambda rows: apply_recording(model, filled(CONFIG), BATCH | rows)[0]
    )
    fields = {f"rows/{layer}": array for layer, array in rows.items()}
    logits = apply(fields)
    close(logits, apply({}))
    for name, array in fields.items():
        assert (
            np.abs(apply(fields | {name: np.roll(array, 1, 1)}) - logits).max() > 1e-3
        )


def test_rows_that_fit_nothing():
    model, params = LanguageModel(CONFIG), {"params": {}}
    with pytest.raises(ConfigError, match=r"rows = 4 .*one of \[0, 1, 2, 3\]"):
        model.apply(params, TOKENS, rows={4: TOKENS})
    with pytest.raises(ConfigError, match="None with a cache"):
        decoder(model, 8).apply(params, TOKENS, rows={0: TOKENS})
    with pytest.raises(ShapeError, match="rows_BTC"):
        jax.eval_shape(
            lambda p: apply_recording(
                model, p, BATCH | {"rows/0": np.zeros((2, 10, 3), np.int32)}
            ),
            filled(CONFIG),
        )
