"""Sums of many reads by row, in an order that never changes.

What: `sort_reads`, which reads concern which row; `sum_reads`, their weighted
    cotangents added up.
Why: a scatter of all reads adds in any order on an accelerator and writes rows of a
    table over and over on a CPU.
When not: what is summed and for whom is `row_gradient`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

_IN_REGISTERS = 4
_NARROW = 32


def sort_reads(ids_P: Array) -> tuple[Array, Array]:
    """(rows ascending, their places in `ids_P`), int32 [P]; equal rows in their order.

    ids are int32 and not negative. Cost: a sort; of one 64-bit key each on a CPU, a
    fifth of the time that a sort of pairs takes there.
    """
    return lax.platform_dependent(ids_P, cpu=sort_packed, default=sort_pairs)


def sort_pairs(ids_P: Array) -> tuple[Array, Array]:
    """`sort_reads` in its plain form."""
    places_P = jnp.arange(len(ids_P), dtype=jnp.int32)
    rows_P, order_P = lax.sort((ids_P, places_P), num_keys=1, is_stable=True)
    return rows_P, order_P


def sort_packed(ids_P: Array) -> tuple[Array, Array]:
    """`sort_reads` by keys of the row in the high and the place in the low bits."""
    bits = max(1, (len(ids_P) - 1).bit_length())
    with jax.enable_x64(True):
        places_P = jnp.arange(len(ids_P), dtype=jnp.int64)
        keys_P = lax.sort((ids_P.astype(jnp.int64) << bits) | places_P)
        low_P = keys_P & ((1 << bits) - 1)
        return (keys_P >> bits).astype(jnp.int32), low_P.astype(jnp.int32)


def sum_reads(
    n_slots: int,
    at_a_time: int,
    slot_P: Array,
    order_P: Array,
    reads_P: Array,
    weights_P: Array | None,
    cotangent_NW: Array,
    n_inside: Array,
) -> Array:
    """[n_slots, W]: weight * cotangent of each read, added to its slot, in XLA's terms.

    float32 or wider. The order of additions depends on the reads of a slot alone; on a
    CPU it is theirs, from left to right.
    Nothing of the size P x W is formed.

    Args:
        n_slots: of the result.
        at_a_time: reads (on a CPU slots first) that are added in a step.
        slot_P: int32, ascending: where reads are added; n_slots or more: nowhere.
        order_P: int32, the numbers of the reads in that order.
        reads_P: int32, whose cotangent each read gets; by number.
        weights_P: float, times what; by number. None: 1.
        cotangent_NW: the cotangents.
        n_inside: how many are added anywhere.
    """
    dtype = jnp.result_type(cotangent_NW, jnp.float32)
    token_P = reads_P[order_P]
    weights_P = None if weights_P is None else weights_P[order_P].astype(dtype)
    size = min(at_a_time, len(slot_P))
    zeros_UW = jnp.zeros((n_slots, cotangent_NW.shape[1]), dtype)
    return lax.platform_dependent(
        zeros_UW,
        slot_P,
        token_P,
        weights_P,
        cotangent_NW,
        n_inside,
        cpu=functools.partial(add_in_turn, size),
        default=functools.partial(add_blocks, size, add_by_product),
    )


def add_blocks(
    size: int,
    add: Callable[[Array, Array, Array], Array],
    sums_UW: Array,
    slot_P: Array,
    token_P: Array,
    weights_P: Array | None,
    cotangent_NW: Array,
    n_inside: Array,
) -> Array:
    """Blocks of `size` reads, each added to the sums by `add`, one of those below."""
    padding = (0, -len(slot_P) % size)
    slot_P = jnp.pad(slot_P, padding, constant_values=len(sums_UW))
    token_P = jnp.pad(token_P, padding)
    if weights_P is not None:
        weights_P = jnp.pad(weights_P, padding)

    def add_block(i: Array, sums_UW: Array) -> Array:
        def some(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, i * size, size)

        part_BW = _at(cotangent_NW, some(token_P)).astype(sums_UW.dtype)
        if weights_P is not None:
            part_BW = part_BW * some(weights_P)[:, None]
        return add(sums_UW, some(slot_P), part_BW)

    return lax.fori_loop(0, (n_inside + size - 1) // size, add_block, sums_UW)


def add_by_product(sums_UW: Array, slot_B: Array, part_BW: Array) -> Array:
    """Parts added to ascending slots without two writes to one: parts of a run are
    added by a matrix product with zeros and ones, and the first of a run writes. A
    part that is not finite makes all slots of the block NaN."""
    same_BB = (slot_B[:, None] == slot_B[None, :]).astype(part_BW.dtype)
    total_BW = jnp.matmul(same_BB, part_BW, precision=lax.Precision.HIGHEST)
    first_B = jnp.concatenate([jnp.ones(1, bool), slot_B[1:] != slot_B[:-1]])
    slot_B = jnp.where(first_B, slot_B, sums_UW.shape[0])
    return sums_UW.at[slot_B].add(total_BW, mode="drop")


def add_by_scatter(sums_UW: Array, slot_B: Array, part_BW: Array) -> Array:
    """Parts added to slots by a scatter, which takes them in their order on a CPU."""
    return sums_UW.at[slot_B].add(part_BW, mode="drop")


def add_in_turn(
    size: int,
    sums_UW: Array,
    slot_P: Array,
    token_P: Array,
    weights_P: Array | None,
    cotangent_NW: Array,
    n_inside: Array,
) -> Array:
    """Where a scatter is a loop over its parts, as on a CPU.

    The first four reads of a slot are added in registers, before memory is touched; any
    others one by one after that, so that all are added from left to right. Reads of up
    to 32 columns are all added one by one: finding the others would cost more.
    """
    if sums_UW.shape[1] <= _NARROW:
        reads = slot_P, token_P, weights_P, cotangent_NW, n_inside
        return add_blocks(size, add_by_scatter, sums_UW, *reads)
    places_P = jnp.arange(len(slot_P), dtype=jnp.int32)
    begins_P = jnp.concatenate([jnp.ones(1, bool), slot_P[1:] != slot_P[:-1]])
    nth_P = places_P - lax.cummax(jnp.where(begins_P, places_P, 0))
    inside_P = places_P < n_inside
    first_P, n_first = _places((nth_P == 0) & inside_P, n_inside, size + 1)
    other_P, n_others = _places((nth_P >= _IN_REGISTERS) & inside_P, n_inside, size)

    def part(read_B: Array, there_B: Array) -> Array:
        read_B = jnp.where(there_B, read_B, 0)
        part_BW = _at(cotangent_NW, _at(token_P, read_B)).astype(sums_UW.dtype)
        if weights_P is not None:
            part_BW = part_BW * _at(weights_P, read_B)[:, None]
        return jnp.where(there_B[:, None], part_BW, 0)

    def add(sums_UW: Array, read_B: Array, there_B: Array, total_BW: Array) -> Array:
        slot_B = _at(slot_P, jnp.where(there_B, read_B, 0))
        slot_B = jnp.where(there_B, slot_B, len(sums_UW))
        return sums_UW.at[slot_B].add(total_BW, mode="drop")

    def add_first(i: Array, sums_UW: Array) -> Array:
        read_B = lax.dynamic_slice_in_dim(first_P, i * size, size)
        end_B = lax.dynamic_slice_in_dim(first_P, i * size + 1, size)
        total_BW = part(read_B, read_B < end_B)
        for j in range(1, _IN_REGISTERS):
            total_BW = total_BW + part(read_B + j, read_B + j < end_B)
        return add(sums_UW, read_B, read_B < end_B, total_BW)

    def add_others(i: Array, sums_UW: Array) -> Array:
        read_B = lax.dynamic_slice_in_dim(other_P, i * size, size)
        there_B = read_B < n_inside
        return add(sums_UW, read_B, there_B, part(read_B, there_B))

    sums_UW = lax.fori_loop(0, (n_first + size - 1) // size, add_first, sums_UW)
    return lax.fori_loop(0, (n_others + size - 1) // size, add_others, sums_UW)


def _places(mask_P: Array, end: Array, padding: int) -> tuple[Array, Array]:
    """(where the mask is set, ascending, then `end`, [P + padding]; how often)."""
    places_P = jnp.arange(len(mask_P), dtype=jnp.int32)
    number_P = lax.cumsum(mask_P.astype(jnp.int32))
    beyond = len(mask_P) + padding
    to_P = jnp.where(mask_P, number_P - 1, beyond)
    found = jnp.broadcast_to(end, (beyond,))
    return found.at[to_P].set(places_P, mode="drop"), number_P[-1]


def _at(array: Array, index: Array) -> Array:
    return array.at[index].get(mode="promise_in_bounds")
