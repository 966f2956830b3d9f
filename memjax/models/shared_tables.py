"""Tables that several memories of a model read.

What: `SharedTables`, a module that owns them and hands out their handles.
Why: the parent makes a table once, and whoever reads it is passed the handle.
When not: which memories share what is `models.memories.shared_tables`.
"""

import flax.linen as nn

from memjax.layers.memory import own_tables
from memjax.layers.precision import Dtypes
from memjax.layers.table import Table
from memjax.models.memories import Memory
from memjax.parallel.row_sharding import RowSharding


class SharedTables(nn.Module):
    """The tables that several memories read; called for their handles by name."""

    memory: Memory
    d_model: int
    dtypes: Dtypes
    sharding: RowSharding | None

    @nn.compact
    def __call__(self) -> dict[str, Table]:
        specs = self.memory.table_specs(self.d_model)
        undivided = self.memory.table_mode in ("dense", "host")
        sharding = None if undivided else self.sharding
        return own_tables(self, self.memory, specs, None, self.dtypes, sharding)
