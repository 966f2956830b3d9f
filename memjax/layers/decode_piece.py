"""Where every row of a decode batch stands, and the tokens that it is handed next.

What: `Place`, the state of the rows; `Piece`, their next tokens as attention and
    memories need them; all of it in the collection "cache".
Why: rows advance by themselves, idle ones stay as they are, and none of that is the
    concern of a layer.
When not: whole texts; without a cache the model needs none of this.
"""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from memjax.ops.look_back import DEAD, device_ids

CACHE = "cache"


@flax.struct.dataclass
class Piece:
    """The next tokens of every row; the real ones stand first, padding at the end.

    S places for tokens in the cache of a row; a token's place is its number in the row.

    Attributes:
        tokens_BT: int32 ids.
        documents_BT: int32 number of the document, ascending in a row and never used
            twice in it, not even after a reset; 0 is padding.
        positions_BT: int32 position inside the document.
        places_BT: int32 place of the token; S for padding and for what does not fit.
        lost_BT: bool, real tokens for which there was no place left.
        stored_BS: int32 document of every place, this piece's included; 0: free.
        history_BN: int32 ids before the piece, oldest first, DEAD (-1) where the
            document of the first token has none.
        n_real_B: int32, tokens that are not padding.
        order_BT: int32, where each token stood in what was handed in.
    """

    tokens_BT: Array
    documents_BT: Array
    positions_BT: Array
    places_BT: Array
    lost_BT: Array
    stored_BS: Array
    history_BN: Array
    n_real_B: Array
    order_BT: Array

    @property
    def n_places(self) -> int:
        """S."""
        return self.stored_BS.shape[1]

    def history(self, n_tokens: int) -> Array:
        """The newest ids [B, n_tokens] of `history_BN`."""
        return self.history_BN[:, self.history_BN.shape[1] - n_tokens :]

    def store(self, old: Array, new: Array) -> Array:
        """`old` [B, S, ...] with `new` [B, T, ...] at the places of the tokens."""
        return _put(old, self.places_BT, new)

    def recent(self, before: Array, new: Array) -> Array:
        """The last R entries of each row, after `before` [B, R, ...] and this piece's.

        Padding among `new` [B, T, ...] does not count.
        """
        joined = jnp.concatenate([before, new.astype(before.dtype)], axis=1)

        def last(row: Array, start: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(row, start, before.shape[1])

        return jax.vmap(last)(joined, self.n_real_B)

    def visible(self, window: int | None) -> Array:
        """Which places a token sees, bool [B, 1, T, S].

        Those of its document, not later than its own, and of the last `window` only.
        """
        at_S = jnp.arange(self.n_places)
        back_BTS = self.places_BT[:, :, None] - at_S
        seen_BTS = self.stored_BS[:, None, :] == self.documents_BT[:, :, None]
        seen_BTS &= back_BTS >= 0
        if window is not None:
            seen_BTS &= back_BTS < window
        return seen_BTS[:, None]

    def clean(self, stored: Array) -> Array:
        """`stored` [B, S, ...] with 0 for the documents before this piece's first.

        A NaN of theirs would go through a mask: 0 * NaN is NaN.
        """
        keep_BS = self.stored_BS >= self.documents_BT[:, :1]
        return jnp.where(keep_BS.reshape(*keep_BS.shape, 1, 1), stored, 0)

    def restored(self, logits_BTV: Array) -> Array:
        """In the order of what was handed in; NaN for tokens without a place."""
        logits_BTV = jnp.where(self.lost_BT[..., None], jnp.nan, logits_BTV)
        if logits_BTV.shape[1] == 1:
            return logits_BTV
        back_BT = jnp.argsort(self.order_BT, axis=1)
        return jnp.take_along_axis(logits_BTV, back_BT[..., None], axis=1)


class Place(nn.Module):
    """Tokens and segments [B, T] -> `Piece`, and the rows stand behind it.

    Variables of the collection "cache", int32, all 0 before the first token: `length`
    (tokens in the row), `document` (documents so far), `segment` (of the last token, as
    the caller numbers them), `position` (of the next token), each [B]; `stored` [B, S];
    `history` [B, N].

    A segment other than that of the token before begins a document.

    Attributes:
        n_places: S, tokens that a row can hold.
        n_history: N, ids that the longest n-gram needs of the tokens before.
    """

    n_places: int
    n_history: int

    @nn.compact
    def __call__(self, tokens_BT: Array, segments_BT: Array) -> Piece:
        n_batch, n_tokens = tokens_BT.shape
        at_T = jnp.arange(n_tokens, dtype=jnp.int32)

        def variable(name: str, *shape: int) -> Any:
            shape = (n_batch, *shape)
            return self.variable(CACHE, name, jnp.zeros, shape, jnp.int32)

        length, document = variable("length"), variable("document")
        segment, position = variable("segment"), variable("position")
        stored = variable("stored", self.n_places)
        history = variable("history", self.n_history)

        order_BT = jnp.argsort(segments_BT <= 0, axis=1, stable=True)
        tokens_BT, segments_BT = (
            jnp.take_along_axis(device_ids(jnp.asarray(x), 1), order_BT, axis=1)
            for x in (tokens_BT, segments_BT)
        )
        real_BT = segments_BT > 0
        before_BT = jnp.concatenate(
            [segment.value[:, None], segments_BT[:, :-1]], axis=1
        )
        begins_BT = real_BT & (segments_BT != before_BT)
        documents_BT = document.value[:, None] + jnp.cumsum(
            begins_BT, axis=1, dtype=jnp.int32
        )
        starts_BT = jax.lax.cummax(jnp.where(begins_BT, at_T, -1), axis=1)
        starts_BT = jnp.where(starts_BT < 0, -position.value[:, None], starts_BT)
        places_BT = length.value[:, None] + at_T
        fits_BT = real_BT & (places_BT < self.n_places)
        places_BT = jnp.where(fits_BT, places_BT, self.n_places)
        stored.value = _put(stored.value, places_BT, documents_BT)
        piece = Piece(
            tokens_BT=tokens_BT,
            documents_BT=jnp.where(real_BT, documents_BT, 0),
            positions_BT=at_T - starts_BT,
            places_BT=places_BT,
            lost_BT=real_BT & ~fits_BT,
            stored_BS=stored.value,
            history_BN=jnp.where(begins_BT[:, :1], DEAD, history.value),
            n_real_B=jnp.sum(real_BT, axis=1, dtype=jnp.int32),
            order_BT=order_BT,
        )

        def last(old_B: Array, new_BT: Array) -> Array:
            """Of the last real token; the old one in rows without any."""
            return piece.recent(old_B[:, None], new_BT)[:, 0]

        length.value = length.value + piece.n_real_B
        document.value = last(document.value, documents_BT)
        segment.value = last(segment.value, segments_BT)
        position.value = last(position.value, piece.positions_BT + 1)
        history.value = _history_after(piece)
        return piece


def keep(module: nn.Module, name: str, new: Array, piece: Piece) -> Array:
    """`new` [B, T, ...] of the piece in the variable `name` [B, S, ...]; all of it.

    The variable is one of `module` in the collection "cache".
    """
    shape = (len(new), piece.n_places, *new.shape[2:])
    kept = module.variable(CACHE, name, jnp.zeros, shape, new.dtype)
    kept.value = piece.store(kept.value, new)
    return kept.value


def before_piece(
    module: nn.Module, name: str, new_BTC: Array, n_before: int, piece: Piece
) -> tuple[Array, Array]:
    """The last entries [B, R, C] before this piece, and their documents [B, R].

    They are variables of `module` in the collection "cache", which then hold what the
    next piece needs of `new_BTC`. Entries of document 0 are of no token.
    """
    shape = (len(new_BTC), n_before)
    entries = module.variable(
        CACHE, name, jnp.zeros, (*shape, *new_BTC.shape[2:]), new_BTC.dtype
    )
    of = module.variable(CACHE, f"{name}_documents", jnp.zeros, shape, jnp.int32)
    before = entries.value, of.value
    entries.value = piece.recent(entries.value, new_BTC)
    of.value = piece.recent(of.value, piece.documents_BT)
    return before


def _history_after(piece: Piece) -> Array:
    """The newest ids [B, N] of the last document; DEAD before its first token."""
    ids_BN = piece.recent(piece.history_BN, piece.tokens_BT)
    first_B1 = piece.documents_BT[:, :1]  # 0 in an idle row, as is its last
    of_BN = piece.recent(jnp.broadcast_to(first_B1, ids_BN.shape), piece.documents_BT)
    last_B1 = piece.recent(first_B1, piece.documents_BT)
    return jnp.where(of_BN == last_B1, ids_BN, DEAD)


def _put(old: Array, places_BT: Array, new: Array) -> Array:
    """`old` [B, S, ...] with `new` [B, T, ...] there; places from S on are dropped."""
    rows_B1 = jnp.arange(len(old))[:, None]
    return old.at[rows_B1, places_BT].set(new.astype(old.dtype), mode="drop")
