"""What every memory of a model has in common: where it sits and how it is joined.

What: `MemoryConfig`, the base of each memory's own config.
Why: one way to attach any memory, so that ablations change a word, not code.
When not: options of one kind of memory live beside that layer.
"""

from dataclasses import dataclass

from memjax.errors import ConfigError
from memjax.layers.table import TABLE_MODES
from memjax.ops.gates import COMBINE_MODES


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Attachment of a memory to a model.

    Attributes:
        layers: block indices (from 0) that read it, ascending and distinct.
        mode: how a read joins the stream, one of `ops.gates.COMBINE_MODES`.
        cap: share of the memory in the modes that have one, in [0, 1].
        dropout: probability that the read of a whole sequence is dropped while
            training, in [0, 1). A dropped read has gate 0 and nothing is rescaled.
        table_mode: "dense": the table is an ordinary parameter with an ordinary
            gradient; "rows": only rows that were read have a gradient, so a step costs
            what the reads cost, whatever the size of the table.
    """

    layers: tuple[int, ...] = (1,)
    mode: str = "sum"
    cap: float = 0.25
    dropout: float = 0.0
    table_mode: str = "dense"

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple):
            raise ConfigError("memories.layers", self.layers, "a tuple such as (1,)")
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(
                "memories.layers", self.layers, "ascending distinct layer indices"
            )
        if self.layers[0] < 0:
            raise ConfigError("memories.layers", self.layers, "indices >= 0")
        if self.mode not in COMBINE_MODES:
            raise ConfigError("memories.mode", self.mode, f"one of {COMBINE_MODES}")
        if not 0.0 <= self.cap <= 1.0:
            raise ConfigError("memories.cap", self.cap, "0 <= cap <= 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError("memories.dropout", self.dropout, "0 <= dropout < 1")
        if self.table_mode not in TABLE_MODES:
            raise ConfigError(
                "memories.table_mode", self.table_mode, f"one of {TABLE_MODES}"
            )
