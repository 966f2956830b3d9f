"""Settings of a run, the state they start from, and silence."""

import dataclasses
import logging

import jax
import pytest

from memjax.errors import ConfigError
from memjax.train.config import RESUMABLE_FIELDS, TrainConfig
from memjax.train.noise import quiet_libraries
from memjax.train.state import init_state, state_leaves
from tests.train import toy


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("n_steps", 0, "at least 1"),
        ("n_steps", 2.0, "an integer"),
        ("accumulate_steps", 0, "at least 1"),
        ("eval_every", 0, "at least 1"),
        ("max_eval_batches", -1, "at least 1"),
        ("save_every", 0, "at least 1"),
        ("keep_last", 0, "at least 1"),
        ("log_every", True, "an integer"),
        ("health_every", 0, "at least 1"),
        ("profile_steps", (3, 3), "first < end"),
        ("profile_steps", (1, 2, 3), "first < end"),
    ],
)
def test_values_out_of_range_name_the_field(field, value, allowed):
    with pytest.raises(ConfigError, match=rf"train\.{field} = .*{allowed}"):
        TrainConfig(**{field: value})


def test_a_rerun_may_change_all_but_the_cut_of_the_batch_and_the_slots():
    names = {f"train.{field.name}" for field in dataclasses.fields(TrainConfig)}
    assert names - set(RESUMABLE_FIELDS) == {
        "train.accumulate_steps",
        "train.host_slots",
    }


@pytest.mark.multidevice
def test_the_same_seed_starts_alike_on_any_number_of_devices():
    def start(n_devices, seed):
        mesh = toy.toy_mesh(n_devices)
        return init_state(toy.init_params, toy.transform(), mesh, seed=seed)

    one, eight, other = start(1, 0), start(8, 0), start(1, 1)
    assert toy.tree_hash(one) == toy.tree_hash(eight)
    assert toy.tree_hash(one.params) != toy.tree_hash(other.params)
    assert toy.tree_hash(one.key) != toy.tree_hash(other.key)
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(eight))
    assert {"step", "params/bias", "key"} < set(state_leaves(one))


def test_quiet_libraries_keep_their_errors():
    loggers = [logging.getLogger(name) for name in ("absl", "orbax", "jax")]
    before = [logger.level for logger in loggers]
    try:
        quiet_libraries()
        assert not any(logger.isEnabledFor(logging.WARNING) for logger in loggers)
        assert all(logger.isEnabledFor(logging.ERROR) for logger in loggers)
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
