"""Token ids to the ids of their classes.

What: `token_classes`, one read of a table of classes, on the host and inside jit.
Why: ids that must not occur may neither raise inside jit nor look like a class.
When not: making the table; see memjax.data.compressed_vocab.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from memjax.errors import ConfigError, DataError
from memjax.ops.look_back import DEAD

BAD_CLASS = -2


def token_classes(
    classes_V: Any, ids_BT: Any, *, compat: Literal["strict", "demo"] = "strict"
) -> Any:
    """classes_V[ids_BT], with a rule for every id outside the vocabulary.

    Args:
        classes_V: integers [V], the class of each id.
        ids_BT: integers of any shape, of the host (numpy, lists) or on the device.
        compat: what an id below 0 is. "strict": on the host an error, on the device
            DEAD (-1), no token. "demo": it stays as it is, as in engram_demo_v1.py.

    Returns:
        int32, shape of the ids; numpy for the host, jax for the device. In "demo" on
        the host in the dtype of the ids, whose negative values it must hold. On the
        device an id of at least V becomes BAD_CLASS (-2), for which
        `ops.ngram_hash.ngram_rows` gives a row outside of every table.

    Raises:
        DataError: an id of the host is at least V, or below 0 in "strict", or no
            integer; the message names it and its position.
        ConfigError: unknown `compat`.

    Cost: one read of 4 bytes an id.
    Source: deepseek-ai/Engram engram_demo_v1.py (CompressedTokenizer). Differs: its
    negative ids go through (here "demo"), its ids above V are an index error.
    """
    if compat not in ("strict", "demo"):
        raise ConfigError("compat", compat, "strict or demo")
    if isinstance(ids_BT, jax.Array):
        return _on_device(jnp.asarray(classes_V, jnp.int32), ids_BT, compat)
    ids_BT = np.asarray(ids_BT)
    if ids_BT.dtype.kind not in "iu":
        raise DataError(f"ids have dtype {ids_BT.dtype}, expected integers")
    classes_V = np.asarray(classes_V)
    bad_BT = (ids_BT >= len(classes_V)) | ((ids_BT < 0) & (compat == "strict"))
    if bad_BT.any():
        where = tuple(int(i) for i in np.argwhere(bad_BT)[0])
        raise DataError(
            f"ids{list(where)} = {ids_BT[where]} is not allowed: "
            f"0 <= id < {len(classes_V)}"
        )
    found_BT = classes_V[np.maximum(ids_BT, 0).astype(np.int64)]
    if compat == "demo":
        return np.where(ids_BT < 0, ids_BT, found_BT).astype(ids_BT.dtype)
    return found_BT.astype(np.int32)


def _on_device(classes_V: jax.Array, ids_BT: jax.Array, compat: str) -> jax.Array:
    if not jnp.issubdtype(ids_BT.dtype, jnp.integer):
        raise DataError(f"ids have dtype {ids_BT.dtype}, expected integers")
    # Compared in their own dtype: cut to 32 bits, 2**32 would be id 0.
    n_ids = len(classes_V)
    fits = n_ids <= jnp.iinfo(ids_BT.dtype).max
    inside_BT = (ids_BT >= 0) & (ids_BT < n_ids if fits else True)
    found_BT = classes_V[jnp.where(inside_BT, ids_BT, 0).astype(jnp.int32)]
    negative_BT = DEAD if compat == "strict" else ids_BT.astype(jnp.int32)
    outside_BT = jnp.where(ids_BT < 0, negative_BT, BAD_CLASS)
    return jnp.where(inside_BT, found_BT, outside_BT).astype(jnp.int32)
