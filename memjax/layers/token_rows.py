"""Memories whose row ids follow from the tokens alone.

What: `TokenRows`, which a memory's config adds to its bases.
Why: the model computes their `rows_BTC` inside jit, so every use of it reads alike.
When not: Engram, whose layout depends on the layer too; the model makes it.
"""

from memjax.ops.hashed_rows import Layout


class TokenRows:
    """A config that says how tokens become `MemoryInputs.rows_BTC`.

    The module is handed `n_rows`, those of the layout.
    """

    def row_layout(self, vocab_size: int) -> Layout:
        """The layout for a vocabulary; ConfigError naming a field that does not fit."""
        raise NotImplementedError(type(self).__name__)
