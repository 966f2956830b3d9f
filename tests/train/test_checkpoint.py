"""Checkpoints: what is refused, what is passed over, what is kept."""

import shutil

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from memjax.errors import CheckpointError
from memjax.parallel.mesh import replicated
from memjax.train.checkpoint import Checkpoints, whole_steps
from memjax.train.restore_params import restore_params
from memjax.train.state import Ema, TrainState, init_state
from tests.train import toy
from tests.train.saved_states import (
    FINGERPRINT,
    SGD,
    abstract_of,
    params_of,
    restore,
    save,
    state_of,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Step 1: weights (6, 2) and the counter int32 16777217."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    save(directory, 1)
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def test_everything_comes_back(saved):
    restored = restore(saved, params_of())
    chex.assert_trees_all_equal(restored.state, state_of(params_of(), 1))
    assert int(restored.state.params["counter"]) == 16777217
    assert restored.data == {"next": 1}


@pytest.mark.parametrize("rows", [4, 8])
def test_p21_other_row_counts_are_never_cut_or_filled(saved, rows):
    """P21: (6, 2) into (4, 2) and (8, 2): error."""
    message = rf"params/weights: saved float32\[6, 2\], wanted float32\[{rows}, 2\]"
    with pytest.raises(CheckpointError, match=message):
        restore(saved, params_of(rows=rows))


def test_p21_an_integer_counter_is_not_cast_to_float(saved):
    """P21: int32 16777217 into a float32 counter: error, not 16777216."""
    message = r"params/counter: saved int32\[\], wanted float32\[\]"
    with pytest.raises(CheckpointError, match=message):
        restore(saved, params_of(counter=jnp.float32))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (2, r"params/layer_1/bias: saved none, wanted float32\[3\]"),
        (0, r"params/layer_0/bias: saved float32\[3\], wanted none"),
    ],
)
def test_p21_one_layer_more_or_fewer_lists_the_paths(saved, layers, message):
    """P21: a model with one layer more or fewer."""
    with pytest.raises(CheckpointError, match=message):
        restore(saved, params_of(layers=layers))


@pytest.mark.parametrize(
    ("fingerprint", "message"),
    [
        (
            {"ngram": {"seed": 1, "primes": [11, 13]}, "token_map": "3f2a"},
            "ngram.seed: saved 0, wanted 1",
        ),
        (
            {"ngram": {"seed": 0, "primes": [11, 17]}, "token_map": "3f2a"},
            r"ngram.primes: saved \[11, 13\], wanted \[11, 17\]",
        ),
        (
            {"ngram": {"seed": 0, "primes": [11, 13]}, "token_map": "77"},
            "token_map: saved '3f2a', wanted '77'",
        ),
        ({"token_map": "3f2a"}, "ngram.seed: saved 0, wanted None"),
    ],
)
def test_p21_another_seed_prime_list_or_token_map(saved, fingerprint, message):
    """P21: all shapes agree, the meaning of the rows does not."""
    with pytest.raises(CheckpointError, match=message):
        restore(saved, params_of(), fingerprint)
    with pytest.raises(CheckpointError, match=message):
        abstract = abstract_of(state_of(params_of()))
        restore_params(saved, abstract, fingerprint)


def test_p22_a_step_without_data_is_passed_over(copy):
    """P22 (a): steps 1 (whole) and 3 (directory there, data gone)."""
    (copy / "3").mkdir()
    with pytest.warns(UserWarning, match="checkpoints/3 is torn and passed over"):
        restored = restore(copy, params_of())
    assert int(restored.state.step) == 1
    assert (copy / "3").is_dir(), "nothing is renamed before a save needs the place"


@pytest.mark.parametrize(
    "lost", ["rest/_METADATA", "meta/metadata", "data/metadata", "commit_success.txt"]
)
def test_p22_a_step_with_lost_files_is_passed_over(copy, lost):
    """P22 (a), with a file cut off or gone inside the newest step."""
    save(copy, 3)
    path = copy / "3" / lost
    if lost == "commit_success.txt":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:10])
    with pytest.warns(UserWarning, match="checkpoints/3 is torn"):
        restored = restore(copy, params_of())
    assert int(restored.state.step) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_p22_lost_array_data_is_noticed(copy):
    """P22 (a), with the numbers themselves gone: never zeros in their place."""
    save(copy, 3)
    for path in (copy / "3" / "params" / "d").iterdir():
        path.unlink()
    with pytest.warns(UserWarning, match="checkpoints/3 is torn.*reading it failed"):
        restored = restore(copy, params_of())
    chex.assert_trees_all_equal(restored.state, state_of(params_of(), 1))


def test_p22_only_torn_steps_name_the_way_out(tmp_path):
    """P22 (a): starting anew by itself would hide the loss."""
    (tmp_path / "3").mkdir()
    with (
        pytest.warns(UserWarning, match="torn"),
        pytest.raises(CheckpointError, match="no whole checkpoint; torn: 3. Move"),
    ):
        restore(tmp_path, params_of())


def test_p22_a_leftover_temporary_directory_blocks_nothing(copy):
    """P22 (a): a temporary directory of step 3, then saving step 3."""
    (copy / "3.orbax-checkpoint-tmp").mkdir()
    (copy / "3.orbax-checkpoint-tmp-17").mkdir()
    assert int(restore(copy, params_of()).state.step) == 1
    save(copy, 3)
    assert int(restore(copy, params_of()).state.step) == 3


def test_p22_saving_below_a_torn_step_writes(copy):
    """P22 (b): resume from 1 while a torn 3 exists, train, save 2, then 3."""
    (copy / "3").mkdir()
    with pytest.warns(UserWarning, match="checkpoints/3 is torn"):
        save(copy, 2)
    assert int(restore(copy, params_of()).state.step) == 2
    save(copy, 3)
    assert int(restore(copy, params_of()).state.step) == 3
    assert (copy / "3.torn").is_dir()


def test_p22_saving_below_or_at_a_whole_step_is_an_error(copy):
    """P22 (b): with a whole step 3 nothing is skipped silently."""
    save(copy, 3)
    for step in (2, 3):
        with pytest.raises(CheckpointError, match=f"cannot save step {step}: .*/3 exi"):
            save(copy, step)
    assert whole_steps(copy) == [1, 3]


def test_the_newest_and_the_best_are_kept(tmp_path):
    scores = [3.0, None, 1.0, None, 2.0, float("nan"), None]
    for step, bpb in enumerate(scores, start=1):
        save(tmp_path, step, bpb=bpb)
    assert whole_steps(tmp_path) == [3, 6, 7]
    with Checkpoints(tmp_path) as checkpoints:
        assert (checkpoints.best_step, checkpoints.best_bpb) == (3, 1.0)
        assert checkpoints.is_best(0.9) and not checkpoints.is_best(1.0)
    with Checkpoints(tmp_path, keep_last=1, keep_best=False) as checkpoints:
        checkpoints.save(state_of(params_of(), 8), data=None, fingerprint=FINGERPRINT)
    assert whole_steps(tmp_path) == [8]


def test_a_save_is_of_its_moment_although_the_state_is_donated(tmp_path):
    bump = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = TrainState(
        jnp.int32(5), {"w": jnp.zeros(1 << 20)}, (), None, jnp.zeros(2, jnp.uint32)
    )
    state = jax.device_put(state, replicated(toy.toy_mesh()))
    abstract = abstract_of(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, data=None, fingerprint={})
        for _ in range(5):
            state = bump(state)
        jax.block_until_ready(state)
        restored = checkpoints.restore_newest(abstract, {})
    assert int(restored.state.step) == 5
    assert float(jnp.abs(restored.state.params["w"]).max()) == 0.0


@pytest.mark.multidevice
def test_eight_devices_read_what_one_wrote(saved):
    place = replicated(toy.toy_mesh(8))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        state_of(params_of()),
    )
    with Checkpoints(saved) as checkpoints:
        restored = checkpoints.restore_newest(abstract, FINGERPRINT)
    assert len(restored.state.params["weights"].sharding.device_set) == 8
    chex.assert_trees_all_equal(restored.state.params, params_of())


def test_parameters_alone_and_their_average(tmp_path):
    ema = Ema(
        init=lambda p: {"weights": p["weights"] + 1, "counter": optax.MaskedNode()},
        update=lambda e, p, s: e,
        merge=lambda e, p: {**p, "weights": e["weights"]},
    )
    state = init_state(
        lambda key: jax.tree.map(jnp.asarray, params_of()), SGD, toy.toy_mesh(), ema=ema
    )
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, data=None, fingerprint=FINGERPRINT)
        checkpoints.save(
            state._replace(step=state.step + 1), data=None, fingerprint=FINGERPRINT
        )
    abstract = abstract_of(state)
    without = abstract._replace(ema=None, opt_state=None)
    params, step = restore_params(tmp_path, without, FINGERPRINT, step=0)
    assert step == 0
    chex.assert_trees_all_equal(params, params_of())
    params, step = restore_params(tmp_path, abstract, FINGERPRINT, ema=ema)
    assert step == 1
    chex.assert_trees_all_equal(params["weights"], params_of()["weights"] + 1)
    with pytest.raises(CheckpointError, match=r"step 7 is not among .*\[0, 1\]"):
        restore_params(tmp_path, abstract, FINGERPRINT, step=7)
    wrong = {**abstract.params, "extra": abstract.params["counter"]}
    wrong = abstract._replace(params=wrong)
    with pytest.raises(CheckpointError, match="params/extra: saved none"):
        restore_params(tmp_path, wrong, FINGERPRINT)
