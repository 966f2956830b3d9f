"""The tokens before each token: literal windows, padding, idle and reused rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.ops.look_back import DEAD, look_backs, next_history

_N = 3


def _windows(ids, **options) -> list[list[list[int]]]:
    """[B, T, N], oldest first, blocked tokens as 0."""
    pairs = look_backs(ids, _N, **options)
    filled = [np.where(blocked, 0, token) for token, blocked in pairs]
    return np.stack(filled[::-1], axis=-1).tolist()


@jax.jit
def _step(ids_BT: jax.Array, history_BN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a step of generation does: windows, then the history of the next step."""
    pairs = look_backs(ids_BT, _N, history_BN=history_BN)
    filled = [jnp.where(blocked, 0, token) for token, blocked in pairs]
    return jnp.stack(filled[::-1], axis=-1), next_history(ids_BT, history_BN, _N)


@pytest.mark.parametrize("n_padding", [0, 1, 4])
def test_p09_right_padding_changes_no_window_of_a_real_token(n_padding: int) -> None:
    """Tokens [5, 6, 7, 8], segments [1, 1, 2, 2], then padding of any value."""
    ids = np.array([[5, 6, 7, 8] + [9] * n_padding])
    segments = np.array([[1, 1, 2, 2] + [0] * n_padding])
    real = [[0, 0, 5], [0, 5, 6], [0, 0, 7], [0, 7, 8]]
    want = [real + [[0, 0, 0]] * n_padding]
    assert _windows(ids, segments_BT=segments) == want
    dead = np.where(segments == 0, DEAD, ids)
    assert _windows(dead[:, 2:]) == [want[0][2:]]
    history = next_history(ids[:, :4], None, _N, segments_BT=segments[:, :4])
    assert history.tolist() == [[7, 8]]


def test_p09_nothing_is_kept_of_a_document_that_padding_ended() -> None:
    ids, segments = np.array([[5, 6, 9]]), np.array([[1, 1, 0]])
    assert next_history(ids, None, _N, segments_BT=segments).tolist() == [[DEAD, DEAD]]


def test_p09_what_is_behind_a_dead_token_is_not_seen() -> None:
    """Blocking is sticky: 5 stands before the DEAD token."""
    ids = np.array([[5, DEAD, 6, 7, 8]])
    assert _windows(ids)[0] == [[0, 0, 5], [0, 0, 0], [0, 0, 6], [0, 6, 7], [6, 7, 8]]


def test_p10_an_idle_row_changes_no_other_row() -> None:
    """Row 0 generates 7, 8, 9; row 1 waits with DEAD in between, and goes on."""
    history = jnp.full((2, _N - 1), DEAD, jnp.int32)
    seen = []
    for column in ([7, 4], [8, DEAD], [9, 5]):
        windows, history = _step(jnp.array(column)[:, None], history)
        seen.append(windows[:, 0].tolist())
    assert [pair[0] for pair in seen] == [[0, 0, 7], [0, 7, 8], [7, 8, 9]]
    # A DEAD id ends what row 1 had; a row that shall go on must keep its history.
    assert [pair[1] for pair in seen] == [[0, 0, 4], [0, 0, 0], [0, 0, 5]]
    assert history.tolist() == [[8, 9], [DEAD, 5]]


def test_p10_an_idle_row_goes_on_when_its_history_is_kept() -> None:
    history = jnp.array([[1, 7], [3, 4]])
    idle = jnp.array([False, True])
    _, moved = _step(jnp.array([[8], [DEAD]]), history)
    history = jnp.where(idle[:, None], history, moved)
    windows, _ = _step(jnp.array([[9], [5]]), history)
    assert windows[:, 0].tolist() == [[7, 8, 9], [3, 4, 5]]


def test_p10_a_reused_row_starts_with_an_empty_history() -> None:
    """Row 1 ends its text and begins another with 4; row 0 goes on."""
    history = jnp.array([[1, 2], [8, 9]])
    history = jnp.where(jnp.array([[False], [True]]), DEAD, history)
    windows, history = _step(jnp.array([[3], [4]]), history)
    assert windows[:, 0].tolist() == [[1, 2, 3], [0, 0, 4]]
    assert history.tolist() == [[2, 3], [DEAD, 4]]


def test_p10_rejected_guesses_are_forgotten() -> None:
    """Feed 1 .. 8, guess 9, 6, 6, reject the last 2, feed 10 and 11."""
    _, after_8 = _step(jnp.arange(1, 9)[None], jnp.full((1, _N - 1), DEAD))
    guessed, _ = _step(jnp.array([[9, 6, 6]]), after_8)
    assert guessed[0, 0].tolist() == [7, 8, 9]
    _, after_9 = _step(jnp.array([[9]]), after_8)
    windows, history = _step(jnp.array([[10, 11]]), after_9)
    assert windows[0].tolist() == [[8, 9, 10], [9, 10, 11]]
    assert history.tolist() == [[10, 11]]
