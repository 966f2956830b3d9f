"""Where the chunks of packed documents lie.

What: `place_chunks`, from the document numbers of a row.
Why: chunks are counted from the start of each document, which may be anywhere.
When not: rows without documents; a reshape will do.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class ChunkPlaces(NamedTuple):
    """Places in a line of R tokens with at most M = R // c whole chunks; all int32.

    Attributes:
        position_R: of each token in its document.
        starts_M: the first token of each whole chunk, ascending; R where there is none.
        after_R: which of those chunks stands before the chunk of the token in its
            document; -1 for tokens of a document's first chunk, and for padding.
    """

    position_R: Array
    starts_M: Array
    after_R: Array


def place_chunks(segments_R: Array, chunk: int) -> ChunkPlaces:
    """Chunks of `chunk` tokens of each document of a line.

    Args:
        segments_R: int32; equal neighbours > 0 are one document. Padding (0) only at
            the end.
        chunk: tokens c of a chunk.

    A document's last chunk is whole if all its c tokens are there.
    """
    size = segments_R.size
    index = jnp.arange(size, dtype=jnp.int32)
    begins = segments_R != jnp.pad(segments_R, (1, 0))[:size]
    begin = lax.cummax(jnp.where(begins, index, 0))
    position = index - begin
    last = jnp.minimum(index + chunk - 1, size - 1)
    whole = (position % chunk == 0) & (index + chunk <= size) & (segments_R > 0)
    whole &= (segments_R[last] > 0) & (begin[last] == begin)
    starts_M = jnp.nonzero(whole, size=size // chunk, fill_value=size)[0]
    rank = jnp.cumsum(whole, dtype=jnp.int32) - 1
    before = jnp.maximum(index - position % chunk - chunk, 0)
    later = (segments_R > 0) & (position >= chunk)
    after_R = jnp.where(later, rank[before], -1)
    return ChunkPlaces(position, starts_M.astype(jnp.int32), after_R)
