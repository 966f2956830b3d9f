"""Options of a fast-weight memory, checked when they are written down.

What: `FastWeightConfig`, and what follows from it: the settings of the mathematics, the
    table's size, the arithmetic of a token.
Why: everything that can be wrong about it is an error before anything is compiled.
When not: the module that uses it is `fast_weight`.
"""

from dataclasses import dataclass
from typing import ClassVar

from memjax.errors import ConfigError
from memjax.layers.memory import MemoryConfig, TableSpec, check_fields, check_least
from memjax.layers.slot_read import check_slots
from memjax.ops.fast_weight_chunk import FastWeightOptions

QUERY_NORMS = ("none", "l2", "zscore")
FUSES = ("convex", "sum")
INITIALS = ("learned", "fixed")
STATES = ("document", "shared")
_SETTINGS = (
    "k",
    "chunk",
    "lookahead",
    "score",
    "activation",
    "temperature",
    "learning_rate",
    "weight_decay",
    "grad_clip",
    "address_weight",
    "values_only",
    "rule",
)


@dataclass(frozen=True, kw_only=True)
class FastWeightConfig(MemoryConfig):
    """Options of a fast-weight memory, beside those of `MemoryConfig`.

    The defaults are those of arXiv:2601.00671 and its release, but for `state`.

    Attributes:
        n_sub_keys: N of each half; the memory has N * N slots.
        key_width: width of a whole key, even.
        value_width: W of a value; a z-scored one needs 2 or more.
        n_heads: H, each with its own sub-keys.
        k, chunk, lookahead, score, activation, temperature, learning_rate,
            weight_decay, grad_clip, address_weight, values_only, rule: see
            `ops.fast_weight_chunk.FastWeightOptions`.
        gated_loss: whether what a token writes is weighted by its gate.
        query_norm: of each half of the whole query, all heads together (which for
            several heads are not the halves of a product key, as in the release):
            "none"; "l2": q / sqrt(|q|^2 + 1e-6); "zscore".
        target_zscore: values are z-scored: (v - mean) / (std + 1e-6) with the unbiased
            deviation.
        fuse: how the read r and the token's own value v meet, with the gate g:
            "convex", g * r + (1 - g) * v, or "sum", r + v.
        gate_outputs: linear outputs that are averaged before the gate's sigmoid.
        norm_eps: of the four RMS norms.
        state: "document": every document starts from the same initial memory and
            forgets it at its end, whatever batch or row it stands in. "shared", the
            release: one memory for all, which a training step changes for the next
            (collection "fast_weights"); sequences of a batch read each other, and
            chunks are those of the row, whatever documents it holds. In evaluation
            each batch starts from the stored memory, and what it writes is dropped.
        initial: the memory a document starts with: "learned" by the optimizer through
            the exact gradient of the inner updates, or "fixed" as drawn. Must be
            "fixed" when the state is shared: no optimizer touches it.
        mask_padding: tokens of padding write nothing (state "shared" only; documents
            have none). They still count among the reads of a slot and in the address
            loss, as in the release.
    """

    normed_input: ClassVar[bool] = False

    n_sub_keys: int = 512
    key_width: int = 512
    value_width: int = 512
    n_heads: int = 1
    k: int = 8
    chunk: int = 512
    lookahead: int = 1
    score: str = "idw"
    activation: str = "softmax"
    temperature: float = 1.0
    learning_rate: float = 1.0
    weight_decay: float = 0.0
    grad_clip: bool = False
    address_weight: float | None = 1.0
    values_only: bool = True
    rule: str = "reference"
    gated_loss: bool = True
    query_norm: str = "none"
    target_zscore: bool = True
    fuse: str = "convex"
    gate_outputs: int = 8
    norm_eps: float = 1e-5
    state: str = "document"
    initial: str = "learned"
    mask_padding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        flags = ("grad_clip", "values_only", "gated_loss", "target_zscore")
        check_fields(
            self,
            {
                "query_norm": QUERY_NORMS,
                "fuse": FUSES,
                "state": STATES,
                "initial": INITIALS,
                "kernel": ("auto",),
                **dict.fromkeys((*flags, "mask_padding"), (False, True)),
            },
        )
        least = dict.fromkeys(("n_sub_keys", "n_heads", "k", "gate_outputs"), 1)
        width = 2 if self.target_zscore else 1
        check_least(self, {**least, "key_width": 2, "value_width": width})
        check_slots(self)
        if self.key_width % 2:
            raise ConfigError("memories.key_width", self.key_width, "an even number")
        try:
            _ = self.options
        except ConfigError as error:
            name = f"memories.{error.field}"
            raise ConfigError(name, error.value, error.allowed) from None
        if self.lookahead >= self.chunk:
            raise ConfigError(
                "memories.lookahead",
                self.lookahead,
                f"below chunk = {self.chunk}: later chunks hold no targets of this one",
            )
        if not 0 < self.norm_eps < float("inf"):
            raise ConfigError("memories.norm_eps", self.norm_eps, "above 0 and finite")
        self._check_where()

    def _check_where(self) -> None:
        if self.table_mode != "dense":
            raise ConfigError(
                "memories.table_mode",
                self.table_mode,
                "'dense': documents change their rows while they are read",
            )
        if self.shared_table is not None:
            raise ConfigError(
                "memories.shared_table",
                self.shared_table,
                "None: what a layer writes fits its own queries only",
            )
        if self.state == "shared" and self.initial != "fixed":
            raise ConfigError(
                "memories.initial",
                self.initial,
                "'fixed' when state = 'shared', whose memory no optimizer trains",
            )
        if self.state == "document" and self.mask_padding:
            raise ConfigError(
                "memories.mask_padding",
                True,
                "False when state = 'document': padding belongs to no document",
            )

    @property
    def options(self) -> FastWeightOptions:
        """The settings of the mathematics."""
        return FastWeightOptions(**{name: getattr(self, name) for name in _SETTINGS})

    @property
    def table_name(self) -> str:
        """Of the initial values."""
        return "table" if self.initial == "learned" else "fixed_table"

    def table_specs(self, d_model: int) -> dict[str, TableSpec]:
        """The initial values of the slots; `d_model` does not matter."""
        del d_model
        width = self.value_width
        spec = TableSpec(self.n_sub_keys**2, width, width**-0.5, self.n_heads * self.k)
        return {self.table_name: spec}

    @property
    def flops_per_token(self) -> int:
        """Of the memory in a forward pass, 2 per multiply-add, without projections.

        Scores of all sub-keys: once for a read of the shared memory, twice for that of
        a document (see `ops.fast_weight_documents`), and with an address loss once for
        it and once for its gradient. Rows of width W: each read, and the write.
        """
        reads = 2 if self.state == "document" else 1
        inner = 2 if self.options.moves_keys else 0
        scores = self.n_heads * self.n_sub_keys * self.key_width
        rows = self.n_heads * self.k * self.value_width
        return 2 * ((reads + inner) * scores + (reads + 1) * rows)

    @property
    def inner_flops(self) -> int:
        """`flops_per_token` without what parameters and weighed rows show already.

        Those are one score of each sub-key (a shared memory's are no parameters) and
        one read of each row.
        """
        scores = self.n_heads * self.n_sub_keys * self.key_width
        shown = scores if self.state == "document" else 0
        rows = self.n_heads * self.k * self.value_width
        return self.flops_per_token - 2 * (shown + rows)
