"""The last N tokens of every token as rows of a table with one row per place and id.

What: `WindowLayout`, and its rows on the host and inside jit.
Why: an n-gram that is embedded place by place needs no hash, and one gather reads it.
When not: a row per n-gram; those are hashes.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.errors import ConfigError
from memjax.ops.look_back import BAD_ROW, check_host_ids, device_ids, look_backs

_MAX_ROWS = 2**31 - 2


@dataclass(frozen=True, kw_only=True)
class WindowLayout:
    """Column k is the token k places back, newest first; it has vocab_size + 1 rows.

    The row of token x in column k is k * (vocab_size + 1) + x; a token that may not be
    seen (see look_back) has the last row of its column.

    Attributes:
        vocab_size: ids are 0 .. vocab_size - 1.
        order: N, tokens of a window.

    Raises:
        ConfigError: N < 1, or the rows do not fit 32 bits.
    """

    vocab_size: int
    order: int

    def __post_init__(self) -> None:
        if self.order < 1 or self.vocab_size < 1:
            raise ConfigError("order", self.order, "1 or more, of a vocabulary")
        if self.n_rows > _MAX_ROWS:
            want = f"at most {_MAX_ROWS // (self.vocab_size + 1)} for these ids"
            raise ConfigError("order", self.order, want)

    @property
    def n_columns(self) -> int:
        """N, rows read per token."""
        return self.order

    @property
    def max_order(self) -> int:
        """N; the history has one id less."""
        return self.order

    @property
    def n_rows(self) -> int:
        """N * (vocab_size + 1)."""
        return self.order * (self.vocab_size + 1)

    def fingerprint(self) -> str:
        """SHA-256 (hex) over kind and numbers: equal iff the rows mean the same."""
        numbers = {"kind": type(self).__name__, **asdict(self)}
        text = json.dumps(numbers, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def rows(
        self, ids_BT: Any, *, segments_BT: Any = None, history_BN: Any = None
    ) -> jax.Array:
        """int32 rows [..., T, N] inside jit; an id outside gives BAD_ROW.

        Args and errors as in `ngram_hash.ngram_rows`.
        """
        ids_BT = device_ids(ids_BT, self.vocab_size)
        if history_BN is not None:
            history_BN = device_ids(history_BN, self.vocab_size, "history")
        rows_BTC = self._rows(ids_BT, segments_BT, history_BN, jnp)
        return jnp.where(rows_BTC < 0, BAD_ROW, rows_BTC).astype(jnp.int32)

    def host_rows(
        self, ids_BT: Any, *, segments_BT: Any = None, history_BN: Any = None
    ) -> np.ndarray:
        """`rows` in numpy; DataError for an id outside."""
        ids_BT = check_host_ids(ids_BT, self.vocab_size)
        if history_BN is not None:
            history_BN = check_host_ids(history_BN, self.vocab_size, "history")
        if segments_BT is not None:
            segments_BT = np.asarray(segments_BT)
        return self._rows(ids_BT, segments_BT, history_BN, np).astype(np.int32)

    def _rows(self, ids_BT: Any, segments_BT: Any, history_BN: Any, xp: Any) -> Any:
        """Rows, and -1 for an id outside."""
        windows = look_backs(
            ids_BT, self.order, segments_BT=segments_BT, history_BN=history_BN
        )
        columns = []
        for k, (token_BT, blocked_BT) in enumerate(windows):
            bad_BT = (token_BT < 0) | (token_BT >= self.vocab_size)
            row_BT = k * (self.vocab_size + 1) + xp.where(
                blocked_BT, self.vocab_size, token_BT
            )
            columns.append(xp.where(bad_BT & ~blocked_BT, -1, row_BT))
        return xp.stack(columns, axis=-1)
