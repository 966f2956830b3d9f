"""Changes to a large table that belong to one sequence only.

What: `Overlay`, the rows a sequence has added to a table that many sequences share, and
    functions that read, add, scale and clear it.
Why: fast weights of one document touch few rows; a copy of the table for each sequence
    would be its whole size (537 MB at the size of arXiv:2601.00671).
When not: rows that stay for everybody; write the table itself.

All functions are for one sequence; `jax.vmap` over overlays leaves the table shared.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memjax.errors import ConfigError, ShapeError
from memjax.ops.embedding_bag import gather_rows


class Overlay(NamedTuple):
    """What a sequence reads at slot s: scale * table[s] + the row it added there.

    Attributes:
        rows_PW: sums of what was added, one place P for each write that fits. The row
            of a slot lies at the place of its first write, so rows never move.
        slots_P: int32, ascending: the slot of each write; S where there is none yet.
            None: there is a place for every slot, and a slot is its own place.
        places_P: int32, the place of each write; of equal slots the first write is
            first. None with `slots_P`.
        count: int32 scalar, writes so far.
        scale: scalar, what is left of the shared table. NaN after more writes than
            places: every read is then NaN, never a row that lacks a write.
    """

    rows_PW: Array
    slots_P: Array | None
    places_P: Array | None
    count: Array
    scale: Array


def empty_overlay(
    n_slots: int, width: int, n_writes: int, dtype: jnp.dtype | type = jnp.float32
) -> Overlay:
    """The overlay of a sequence that has written nothing.

    Args:
        n_slots: rows S of the shared table.
        width: W of its rows.
        n_writes: (token, row) writes it must hold. From S on each slot has its place,
            and there is no limit.
        dtype: of the rows; sums are kept in it.

    Raises:
        ConfigError: n_writes is negative.

    Memory: min(n_writes, S) rows, but one at least, and 8 bytes a write.
    """
    if n_writes < 0:
        raise ConfigError("n_writes", n_writes, "an integer >= 0")
    n_places = min(max(n_writes, 1), n_slots)
    index = None, None
    if n_writes < n_slots:
        index = (
            jnp.full((n_places,), n_slots, jnp.int32),
            jnp.arange(n_places, dtype=jnp.int32),
        )
    return Overlay(
        jnp.zeros((n_places, width), dtype),
        *index,
        jnp.zeros((), jnp.int32),
        jnp.ones((), dtype),
    )


def read_overlay(overlay: Overlay, table_SW: Array, slots: Array) -> Array:
    """Rows [..., W] as the sequence sees them, in the dtype of the overlay.

    Args:
        table_SW: the shared table; uint16 holds the bits of bfloat16.
        slots: int32 [...]. Slots outside the table are NaN.

    Cost: two rows read a slot, and a binary search over the writes. Gradients flow to
        the table, to what was added and to the scale; nothing of the size of the
        overlay is kept for the backward pass.
    """
    places, hit = _places(overlay, slots)
    added = overlay.rows_PW.at[places].get(mode="fill", fill_value=0)
    added = jnp.where(hit[..., None], added, 0)
    shared = gather_rows(table_SW, slots).astype(overlay.rows_PW.dtype)
    return overlay.scale * shared + added


def add_rows(
    overlay: Overlay, slots_N: Array, rows_NW: Array, active: Array | bool = True
) -> Overlay:
    """The overlay after one row was added to each of N slots.

    Args:
        slots_N: int32 in [0, S); a slot that occurs twice gets both rows.
        rows_NW: what is added.
        active: bool scalar; False adds nothing and logs nothing.

    Raises:
        ShapeError: slots and rows do not belong together.

    Cost: N row writes, and one sort of the P logged slots.
    """
    if rows_NW.shape != (*slots_N.shape, overlay.rows_PW.shape[1]):
        want = (*slots_N.shape, overlay.rows_PW.shape[1])
        raise ShapeError("rows_NW", rows_NW.shape, want)
    rows_NW = jnp.where(active, rows_NW, 0).astype(overlay.rows_PW.dtype)
    if overlay.slots_P is None:
        rows_PW = overlay.rows_PW.at[slots_N].add(rows_NW, mode="drop")
        return overlay._replace(rows_PW=rows_PW)
    logged = _log(overlay, slots_N, active)
    places_N, hit_N = _places(logged, slots_N)
    # Without a place (not active, or no place left) the row is dropped.
    places_N = jnp.where(hit_N, places_N, overlay.rows_PW.shape[0])
    return logged._replace(
        rows_PW=overlay.rows_PW.at[places_N].add(rows_NW, mode="drop")
    )


def scale_overlay(
    overlay: Overlay, factor: Array | float, active: Array | bool = True
) -> Overlay:
    """Every row of the table, written or not, times `factor`, as this sequence sees it.

    Cost: one pass over the overlay; the shared table is not touched.
    """
    factor = jnp.where(active, factor, 1).astype(overlay.scale.dtype)
    return overlay._replace(
        rows_PW=overlay.rows_PW * factor, scale=overlay.scale * factor
    )


def clear_overlay(overlay: Overlay, n_slots: int, when: Array | bool) -> Overlay:
    """As `empty_overlay` where `when`, a bool scalar, is True."""
    n_places, width = overlay.rows_PW.shape
    empty = empty_overlay(n_slots, width, n_places, overlay.rows_PW.dtype)
    return jax.tree.map(lambda new, old: jnp.where(when, new, old), empty, overlay)


def _places(overlay: Overlay, slots: Array) -> tuple[Array, Array]:
    """Where the rows of slots [...] lie, and whether they were ever written."""
    if overlay.slots_P is None or overlay.places_P is None:
        return slots, jnp.ones(slots.shape, bool)
    found = jnp.searchsorted(overlay.slots_P, slots).astype(jnp.int32)
    found = jnp.minimum(found, overlay.slots_P.size - 1)
    return overlay.places_P[found], overlay.slots_P[found] == slots


def _log(overlay: Overlay, slots_N: Array, active: Array | bool) -> Overlay:
    """The index with N more writes; rows are not touched."""
    assert overlay.slots_P is not None and overlay.places_P is not None
    n_places, n_new = overlay.slots_P.size, slots_N.size
    count = overlay.count + jnp.where(active, n_new, 0).astype(jnp.int32)
    full = count > n_places
    scale = jnp.where(full, jnp.nan, overlay.scale)
    if n_new > n_places:
        return overlay._replace(count=count, scale=scale)
    # The free entries come last, with their places in order: new writes take them.
    write = active & ~full
    start = (jnp.where(write, overlay.count, n_places - n_new),)
    old_N = lax.dynamic_slice(overlay.slots_P, start, (n_new,))
    slots_P = lax.dynamic_update_slice(
        overlay.slots_P, jnp.where(write, slots_N, old_N), start
    )
    slots_P, places_P = lax.sort(
        (slots_P, overlay.places_P), num_keys=1, is_stable=True
    )
    return Overlay(overlay.rows_PW, slots_P, places_P, count, scale)
