"""The tokens before each token, and which of them may not be seen.

What: for every position its `n` newest tokens, newest first, with a mask of the blocked
    ones; and the few ids that carry this from one chunk of a sequence to the next.
Why: "before the start", "not a real token" and "another document" are one rule here, so
    training, packed batches and generation cannot disagree.
When not: for the arithmetic on the tokens; see ngram_hash and byte_hash.

The rule: walking back from a position, everything from the first blocked token on is
blocked. Blocked are DEAD tokens (id -1), positions before the start, tokens of another
segment, and every token of segment 0 (padding).
Works on numpy arrays (host) and on jax arrays (inside jit) alike.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.errors import ConfigError, DataError, ShapeError

DEAD = -1
BAD_ROW = 2**31 - 1


def look_backs(
    ids_BT: Any,
    n: int,
    *,
    segments_BT: Any = None,
    history_BN: Any = None,
    negative_ids_are_dead: bool = True,
) -> list[tuple[Any, Any]]:
    """For k = 0 .. n-1: the tokens k places back, and whether they are blocked.

    Args:
        ids_BT: integer ids, any leading axes, numpy or jax; -1 is DEAD.
        n: window length, at least 1.
        segments_BT: same shape; document numbers inside a row, 0 = padding.
        history_BN: the n-1 ids before the first one, oldest first, DEAD where there are
            none; they belong to the segment of the first token, so a chunk that begins
            with a new document is given DEAD ones. None means all DEAD.
        negative_ids_are_dead: False treats ids below 0 as tokens like any other.

    Returns:
        n pairs (tokens_BT, blocked_BT); blocked is sticky in k, and the token under a
        blocked entry is meaningless.

    Raises:
        ShapeError: segments or history do not fit the ids.
        ConfigError: history is given although negative ids are tokens.
    """
    xp = jnp if isinstance(ids_BT, jax.Array) else np
    if not negative_ids_are_dead and history_BN is not None:
        raise ConfigError("history", "given", "None when negative ids are tokens")
    history_BN = _history(ids_BT, history_BN, n)
    extended = xp.concatenate([xp.asarray(history_BN, ids_BT.dtype), ids_BT], axis=-1)
    if negative_ids_are_dead:
        dead = extended == DEAD
    else:
        dead = xp.concatenate([history_BN == DEAD, xp.zeros(ids_BT.shape, bool)], -1)
    segments = None
    if segments_BT is not None:
        if tuple(segments_BT.shape) != tuple(ids_BT.shape):
            raise ShapeError("segments", tuple(segments_BT.shape), tuple(ids_BT.shape))
        segments_BT = xp.asarray(segments_BT)
        before = xp.broadcast_to(segments_BT[..., :1], history_BN.shape)
        segments = xp.concatenate([before, segments_BT], axis=-1)
        dead = dead | (segments == 0)
    n_tokens = ids_BT.shape[-1]
    blocked = xp.zeros(ids_BT.shape, bool)
    windows = []
    for k in range(n):
        view = slice(n - 1 - k, n - 1 - k + n_tokens)
        blocked = blocked | dead[..., view]
        if segments is not None:
            blocked = blocked | (segments[..., view] != segments_BT)
        windows.append((extended[..., view], blocked))
    return windows


def next_history(
    ids_BT: Any, history_BN: Any = None, n: int = 1, *, segments_BT: Any = None
) -> Any:
    """The n-1 ids that the next chunk needs, oldest first.

    `ids_BT` may be shorter than n-1; then older ids of `history_BN` stay. A sequence
    that has not begun, or a reused row, has a history of DEAD (-1) ids.

    Args:
        ids_BT: the ids just seen, any leading axes.
        history_BN: their own history, `n - 1` long; None means all DEAD.
        n: the largest n-gram order of the layout.
        segments_BT: when given, ids of other segments than the last token's, and
            padding, become DEAD, so that nothing older than the last document is kept.

    Returns:
        ids [..., n-1], same dtype as `ids_BT`, numpy for numpy and jax for jax.

    Raises:
        ShapeError: history or segments do not fit the ids.
    """
    xp = jnp if isinstance(ids_BT, jax.Array) else np
    if segments_BT is None:
        history_BN = xp.asarray(_history(ids_BT, history_BN, n), ids_BT.dtype)
        extended = xp.concatenate([history_BN, ids_BT], axis=-1)
        return extended[..., extended.shape[-1] - (n - 1) :]
    windows = look_backs(ids_BT, n, segments_BT=segments_BT, history_BN=history_BN)
    kept = [xp.where(blocked, DEAD, token)[..., -1] for token, blocked in windows]
    newest_first = xp.stack(kept[: n - 1], axis=-1) if n > 1 else ids_BT[..., :0]
    return newest_first[..., ::-1].astype(ids_BT.dtype)


def check_host_ids(
    ids: Any, n_ids: int, name: str = "ids", *, lowest: int = DEAD
) -> np.ndarray:
    """Host ids as int64, after checking lowest <= id < n_ids (lowest: DEAD, -1).

    Raises:
        DataError: an id is outside, or the array is not of integers; the message names
            the id, its position and the bound.
    """
    array = np.asarray(ids)
    if array.dtype.kind not in "iu":
        raise DataError(f"{name} has dtype {array.dtype}, expected integers")
    bad = array >= n_ids
    if array.dtype.kind == "i":
        bad |= array < lowest
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise DataError(
            f"{name}{list(where)} = {array[where]} is not allowed: "
            f"0 <= id < {n_ids}, or {DEAD} for no token"
        )
    return array.astype(np.int64)


def device_ids(ids: Any, n_ids: int, name: str = "ids") -> jax.Array:
    """Ids for use inside jit, int32. Host arrays are checked, traced ones cannot be.

    A traced 64-bit array is not wrapped: ids outside int32 become -2, an id that no
    vocabulary has.
    """
    if not isinstance(ids, jax.Array):
        return jnp.asarray(check_host_ids(ids, n_ids, name).astype(np.int32))
    if ids.dtype in (jnp.int32, jnp.int16, jnp.int8, jnp.uint16, jnp.uint8):
        return ids.astype(jnp.int32)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise DataError(f"{name} has dtype {ids.dtype}, expected integers")
    outside = ids > jnp.asarray(2**31 - 1, ids.dtype)
    if jnp.issubdtype(ids.dtype, jnp.signedinteger):
        outside |= ids < DEAD
    return jnp.where(outside, -2, jnp.where(outside, 0, ids).astype(jnp.int32))


def _history(ids_BT: Any, history_BN: Any, n: int) -> Any:
    shape = (*ids_BT.shape[:-1], n - 1)
    if history_BN is None:
        return np.full(shape, DEAD, np.int32)
    if tuple(history_BN.shape) != shape:
        raise ShapeError("history", tuple(history_BN.shape), shape)
    return history_BN
