"""Token ids to table rows: the multiplicative-xor n-gram hash.

What: for every token, one row per (order, head), on the host in int64 and inside jit in
    pairs of uint32, bit-equal.
Why: the reader of a table must find the same row in the data pipeline, in training, in
    generation and in the published models.
When not: for bytes hashed the FNV way; see byte_hash.

With a_k the token k places back (`pad_id` where it may not be seen) and m_k, p the
multipliers and primes of the layout: mix_n = XOR over k < n of a_k * m_k, and the row
of column (n, head) is mix_n mod p + offset. What may be seen is in look_back.

Source: deepseek-ai/Engram engram_demo_v1.py (NgramHashMapping); arXiv 2601.07372,
section on hashed n-grams; deepseek-ai/DeepSeek-V4.1-Flash inference/engram.py.
Differs: DEAD tokens from the second source hold for both; segments are ours.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from memjax.errors import ConfigError
from memjax.ops import uint32_pairs
from memjax.ops.look_back import (
    BAD_ROW,
    DEAD,
    check_host_ids,
    device_ids,
    look_backs,
    next_history,
)
from memjax.ops.ngram_layout import NgramLayout, ngram_layouts

__all__ = [
    "BAD_ROW",
    "DEAD",
    "NgramLayout",
    "host_ngram_rows",
    "next_history",
    "ngram_layouts",
    "ngram_rows",
]


def ngram_rows(
    ids_BT: Any,
    layout: NgramLayout,
    *,
    segments_BT: Any = None,
    history_BN: Any = None,
) -> jax.Array:
    """Rows of every token, inside jit and without 64-bit integers.

    Args:
        ids_BT: integer ids [..., T]; -1 is DEAD (not a token).
        layout: static.
        segments_BT: same shape; a look-back into another segment is blocked like the
            start of the sequence, and tokens of segment 0 are padding, i.e. DEAD.
        history_BN: the `layout.max_order - 1` ids before (`next_history`); any cutting
            of a sequence into chunks gives the same rows. None: the sequence starts
            here. With segments it belongs to the segment of the first token.

    Returns:
        int32 rows [..., T, C], column order-major, offset added, 0 <= row < n_rows.
        A window without any visible token gives the rows of `pad_id` only.
        An id outside [-1, vocab_size) cannot raise inside jit: every column whose
        window sees it gets BAD_ROW (2^31 - 1), which is outside of every table, so a
        filling gather returns its fill value and no wrong row is ever read.

    Raises:
        DataError: `ids_BT` or `history_BN` is a host (numpy) array with such an id.
        ShapeError: segments or history do not fit the ids.

    Cost: 1 + 32 / k remainders per column, k = 8 for primes below 2^24. 4096 tokens x
    24 columns take about 0.5 ms on two CPU cores.
    """
    ids_BT = device_ids(ids_BT, layout.vocab_size)
    if history_BN is not None:
        history_BN = device_ids(history_BN, layout.vocab_size, "history")
    windows = look_backs(
        ids_BT, layout.max_order, segments_BT=segments_BT, history_BN=history_BN
    )
    # Tokens are one flat axis n, kept innermost: that is what compilers vectorise.
    token_Nn = jnp.stack([token_BT.ravel() for token_BT, _ in windows])
    blocked_Nn = jnp.stack([blocked_BT.ravel() for _, blocked_BT in windows])
    bad_Nn = ((token_Nn < 0) | (token_Nn >= layout.vocab_size)) & ~blocked_Nn
    token_Nn = jnp.where(blocked_Nn, layout.pad_id, token_Nn).astype(jnp.uint32)
    multipliers_N1 = np.array(layout.multipliers, np.uint64)[:, None]
    products = uint32_pairs.multiply_by(token_Nn, multipliers_N1)
    high_G1n, low_G1n, bad_G1n = (
        jnp.stack([join(values_Nn[:n]) for n in layout.orders])[:, None]
        for values_Nn, join in (
            (products[0], _xor_all),
            (products[1], _xor_all),
            (bad_Nn, partial(jnp.any, axis=0)),
        )
    )
    primes_GH1 = np.array(layout.primes, np.int64)[..., None]
    offsets_GH1 = np.array(layout.offsets, np.int32).reshape(primes_GH1.shape)
    index_GHn = uint32_pairs.remainder((high_G1n, low_G1n), primes_GH1)
    rows_GHn = index_GHn.astype(jnp.int32) + offsets_GH1
    rows_GHn = jnp.where(bad_G1n, np.int32(BAD_ROW), rows_GHn)
    rows_Cn = rows_GHn.reshape(layout.n_columns, -1)
    return rows_Cn.T.reshape((*ids_BT.shape, layout.n_columns))


def host_ngram_rows(
    ids_BT: Any,
    layout: NgramLayout,
    *,
    segments_BT: Any = None,
    history_BN: Any = None,
    compat: Literal["strict", "demo"] = "strict",
) -> np.ndarray:
    """`ngram_rows` on the host in numpy int64; bit-equal, and it checks every id.

    Args:
        ids_BT, layout, segments_BT, history_BN: as in `ngram_rows`.
        compat: "strict" allows ids 0 .. vocab_size - 1 and DEAD. "demo" follows
            engram_demo_v1.py, which knows no DEAD: negative ids are multiplied as they
            are, in two's complement with a floor modulo; only the start is padded, and
            there is no history.

    Returns:
        int32 rows [..., T, C].

    Raises:
        DataError: an id is out of range; the message names it and the bound.
        ConfigError: unknown `compat`, or "demo" with a history.
        ShapeError: segments or history do not fit the ids.

    Cost: about 1 ms for 4096 tokens x 24 columns.
    """
    if compat not in ("strict", "demo"):
        raise ConfigError("compat", compat, "strict or demo")
    lowest = DEAD if compat == "strict" else -(2**63)
    ids_BT = check_host_ids(ids_BT, layout.vocab_size, lowest=lowest)
    if history_BN is not None:
        history_BN = check_host_ids(history_BN, layout.vocab_size, "history")
    if segments_BT is not None:
        segments_BT = np.asarray(segments_BT)
    windows = look_backs(
        ids_BT,
        layout.max_order,
        segments_BT=segments_BT,
        history_BN=history_BN,
        negative_ids_are_dead=compat == "strict",
    )
    mix_BT = np.zeros(ids_BT.shape, np.int64)
    columns = []
    for k, (token_BT, blocked_BT) in enumerate(windows):
        token_BT = np.where(blocked_BT, layout.pad_id, token_BT)
        mix_BT = mix_BT ^ (token_BT * np.int64(layout.multipliers[k]))
        if k + 1 in layout.orders:
            primes = layout.primes[layout.orders.index(k + 1)]
            columns += [np.mod(mix_BT, prime) for prime in primes]
    return (np.stack(columns, axis=-1) + np.array(layout.offsets)).astype(np.int32)


def _xor_all(values_Nn: jax.Array) -> jax.Array:
    return jax.lax.reduce_xor(values_Nn, axes=(0,))
