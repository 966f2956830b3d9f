"""The configuration of the language model.

What: plain, frozen, validated data; a typo or an impossible shape fails here.
Why: a model can be described, compared and saved without being built.
When not: training, data and optimizer have configs of their own.
"""

from dataclasses import dataclass, field

from memjax.errors import ConfigError
from memjax.layers.block import HyperConfig
from memjax.layers.cross_attention import CedConfig
from memjax.layers.engram import EngramConfig
from memjax.layers.experts import ExpertsConfig
from memjax.layers.memory import check_numbers
from memjax.layers.precision import PrecisionConfig
from memjax.layers.table import FP8_BLOCK
from memjax.layers.token_rows import TokenRows
from memjax.models.memories import Memory, reads_tokens, shared_tables
from memjax.ops.mosaic_kernels import ROW_BLOCK as MOSAIC_BLOCK

ARRANGEMENTS = ("residual", "three_branch", "probability")
_PIECES = {"experts": ExpertsConfig, "ced": CedConfig, "hyper": HyperConfig}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder with memories at chosen blocks.

    Attributes:
        vocab_size: V, ids 0..V-1; 257 for bytes and the document separator.
        n_layers, d_model, n_heads, n_kv_heads, d_ff: the usual; d_model divides by
            n_heads into heads of even width, n_heads by n_kv_heads.
        window: tokens a query sees (itself included); None: all of its segment.
        starve_prob: while training, the attention of a whole sequence sees only
            `starve_window` tokens with this probability, so that what is further back
            must come from a memory (arXiv:2601.00671); drawn once for all layers.
        starve_window: tokens a starved query sees, itself included.
        rope_theta: base of the rotary wavelengths.
        norm_eps: eps of the backbone's RMSNorms.
        dropout: on the attention and feed-forward branches, in [0, 1).
        tie_embeddings: the head is the token embedding.
        remat: recompute each block in the backward pass.
        scan_layers: run equal neighbouring blocks as one scanned block, so that
            compile time does not grow with depth (a little slower on a CPU).
        memories: what is attached where. Several can act on one block, in the order
            of their places; one may stand in for the feed-forward, and one may be
            addressed by tokens (hashed, or product keys over n-grams).
        arrangement: "residual"; "three_branch" (see `layers.block.Block`); or
            "probability": the one memory does not touch the stream, it reads after
            the last block (its `layers` must be (n_layers,)) into a head of its own
            and p = memory_share * p_memory + (1 - memory_share) * p_backbone
            (arXiv:1911.00172 eq. 3).
        memory_share: lambda of the "probability" arrangement, 0 < lambda < 1.
        experts: a mixture of experts as the feed-forward; None: dense ones of d_ff.
        expert_layers: blocks that have it; None: all.
        ced: a causal encoder-decoder: from one block on, attention looks at what that
            block was handed; `window` is then that of the blocks before. None: every
            block looks at its own stream.
        hyper: hyper-connections between several residual streams; None: one stream,
            added to.
        precision: dtypes.
    """

    vocab_size: int = 257
    n_layers: int = 3
    d_model: int = 128
    n_heads: int = 4
    n_kv_heads: int = 4
    d_ff: int = 352
    window: int | None = None
    starve_prob: float = 0.0
    starve_window: int | None = None
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    dropout: float = 0.0
    tie_embeddings: bool = False
    remat: bool = False
    scan_layers: bool = True
    memories: tuple[Memory, ...] = ()
    arrangement: str = "residual"
    memory_share: float = 0.25
    experts: ExpertsConfig | None = None
    expert_layers: tuple[int, ...] | None = None
    ced: CedConfig | None = None
    hyper: HyperConfig | None = None
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)

    def __post_init__(self) -> None:
        check_numbers(self, "model")
        for name in (
            "vocab_size",
            "n_layers",
            "d_model",
            "n_heads",
            "n_kv_heads",
            "d_ff",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"model.{name}", value, "a whole number of at least 1"
                )
        if self.d_model % self.n_heads or (self.d_model // self.n_heads) % 2:
            raise ConfigError(
                "model.n_heads",
                self.n_heads,
                f"a divisor of d_model = {self.d_model} that leaves an even head width",
            )
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                "model.n_kv_heads",
                self.n_kv_heads,
                f"a divisor of n_heads = {self.n_heads}",
            )
        for name in ("window", "starve_window"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"model.{name}", value, "None or an integer >= 1")
        self._check_starvation()
        for name, kind in _PIECES.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                want = f"None or an object of {kind.__name__}"
                raise ConfigError(f"model.{name}", value, want)
        self._check_experts()
        self._check_ced()
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError("model.dropout", self.dropout, "0 <= dropout < 1")
        for name in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"model.{name}", getattr(self, name), "a number > 0")
        if self.arrangement not in ARRANGEMENTS:
            raise ConfigError(
                "model.arrangement", self.arrangement, f"one of {ARRANGEMENTS}"
            )
        if self.hyper is not None and self.arrangement == "three_branch":
            raise ConfigError(
                "model.hyper", self.hyper, "None when arrangement = 'three_branch'"
            )
        if not 0.0 < self.memory_share < 1.0:
            raise ConfigError(
                "model.memory_share", self.memory_share, "0 < memory_share < 1"
            )
        self._check_memories()

    def _check_ced(self) -> None:
        if self.ced is not None and self.ced.first_decoder >= self.n_layers:
            raise ConfigError(
                "model.ced.first_decoder",
                self.ced.first_decoder,
                f"a block index below n_layers = {self.n_layers}",
            )

    def decodes(self, layer: int) -> bool:
        """Whether a block belongs to the decoder of a causal encoder-decoder."""
        return self.ced is not None and layer >= self.ced.first_decoder

    def _check_experts(self) -> None:
        layers = self.expert_layers
        if layers is None:
            return
        fits = isinstance(layers, tuple) and all(type(x) is int for x in layers)
        fits = fits and list(layers) == sorted(set(layers))
        if self.experts is None or not fits or not layers:
            raise ConfigError(
                "model.expert_layers",
                layers,
                "None, or ascending block indices when there are experts",
            )
        if layers[0] < 0 or layers[-1] >= self.n_layers:
            raise ConfigError(
                "model.expert_layers",
                layers,
                f"block indices below n_layers = {self.n_layers}",
            )

    def _check_expert_blocks(self, replaced: set[int]) -> None:
        if self.expert_layers is not None and replaced & set(self.expert_layers):
            raise ConfigError(
                "model.expert_layers",
                self.expert_layers,
                "blocks whose feed-forward no memory stands in for, as one does in "
                f"{sorted(replaced)}",
            )

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward of a block is a mixture of experts."""
        if self.experts is None:
            return False
        return self.expert_layers is None or layer in self.expert_layers

    def _check_starvation(self) -> None:
        window = self.starve_window
        if not 0.0 <= self.starve_prob <= 1.0:
            raise ConfigError(
                "model.starve_prob", self.starve_prob, "0 <= starve_prob <= 1"
            )
        if (window is None) != (self.starve_prob == 0):
            raise ConfigError(
                "model.starve_window",
                window,
                f"{'None' if window else 'at least 1'} when starve_prob = "
                f"{self.starve_prob}",
            )
        if window is not None and not 1 <= window <= (self.window or window):
            raise ConfigError(
                "model.starve_window", window, f"1 to window = {self.window}"
            )

    def _check_memories(self) -> None:
        if not isinstance(self.memories, tuple):
            raise ConfigError(
                "model.memories", self.memories, "a tuple of memory configs"
            )
        replaced: set[int] = set()
        reading_tokens: set[int] = set()
        for i, memory in enumerate(self.memories):
            path = f"model.memories.{i}"
            self._check_place(path, memory)
            blocks = set(memory.layers)
            if memory.place == "instead_of_feed_forward":
                if replaced & blocks:
                    raise ConfigError(
                        f"{path}.layers",
                        memory.layers,
                        "blocks whose feed-forward no other memory stands in for",
                    )
                replaced |= blocks
            if reads_tokens(memory):
                if reading_tokens & blocks:
                    raise ConfigError(
                        f"{path}.layers",
                        memory.layers,
                        "blocks without another memory that is addressed by tokens",
                    )
                reading_tokens |= blocks
            if isinstance(memory, EngramConfig):
                self._check_engram(path, memory)
            try:
                memory.check_width(self.d_model)
                _check_tables(memory, self.d_model)
                if memory.shared_table is not None:
                    memory.table_specs(self.d_model)
                if isinstance(memory, TokenRows):
                    memory.row_layout(self.vocab_size)
            except ConfigError as error:
                field = error.field.removeprefix("memories.")
                raise ConfigError(
                    f"{path}.{field}", error.value, error.allowed
                ) from None
        self._check_expert_blocks(replaced)
        shared_tables(self.memories, self.d_model)
        if self.arrangement == "probability" and not self.memories:
            raise ConfigError(
                "model.memories", (), "one memory when arrangement = 'probability'"
            )

    def _check_place(self, path: str, memory: Memory) -> None:
        if self.arrangement == "probability":
            if len(self.memories) > 1 or memory.layers != (self.n_layers,):
                raise ConfigError(
                    f"{path}.layers",
                    memory.layers,
                    f"one memory with layers = ({self.n_layers},) "
                    "when arrangement = 'probability'",
                )
        elif memory.layers[-1] >= self.n_layers:
            raise ConfigError(
                f"{path}.layers",
                memory.layers,
                f"block indices below n_layers = {self.n_layers}",
            )
        if self.arrangement != "residual" and memory.place != "before_attention":
            raise ConfigError(
                f"{path}.place",
                memory.place,
                f"'before_attention' when arrangement = {self.arrangement!r}",
            )

    def _check_engram(self, path: str, memory: EngramConfig) -> None:
        streams = 1 if self.hyper is None else self.hyper.n_streams
        if memory.n_branches not in (1, streams):
            raise ConfigError(
                f"{path}.n_branches",
                memory.n_branches,
                "1: this model has one residual stream"
                if streams == 1
                else f"1, or all {streams} residual streams",
            )
        if memory.n_branches > 1 and "feed_forward" in memory.place.partition("_")[2]:
            raise ConfigError(
                f"{path}.place",
                memory.place,
                "'before_attention' for a memory on all residual streams",
            )
        n_ids = self.n_hashed_ids(memory)
        if n_ids > self.vocab_size:
            raise ConfigError(
                f"{path}.n_token_classes",
                n_ids,
                f"None or at most vocab_size = {self.vocab_size}",
            )
        if not 0 <= self.pad_id(memory) < n_ids:
            raise ConfigError(
                f"{path}.pad_id",
                memory.pad_id,
                f"None or an id below {n_ids}, the vocab_size or n_token_classes",
            )

    @property
    def wants_classes(self) -> bool:
        """Whether a memory's n-grams are made of classes of tokens."""
        return any(
            isinstance(memory, EngramConfig) and memory.n_token_classes
            for memory in self.memories
        )

    def n_hashed_ids(self, memory: EngramConfig) -> int:
        """How many ids its n-grams are made of: V, or V' classes."""
        return memory.n_token_classes or self.vocab_size

    def pad_id(self, memory: EngramConfig) -> int:
        """The id that stands for "before the start" in n-gram windows."""
        return self.n_hashed_ids(memory) - 1 if memory.pad_id is None else memory.pad_id


def _check_tables(memory: Memory, d_model: int) -> None:
    """ConfigError where rows have no whole blocks of FP8, or not those of a kernel."""
    if memory.table_mode == "fp8" and memory.kernel == "mosaic":
        raise ConfigError("memories.kernel", "mosaic", "another one for FP8 tables")
    for name, value, block in (
        ("table_mode", "fp8", FP8_BLOCK),
        ("kernel", "mosaic", MOSAIC_BLOCK),
    ):
        if getattr(memory, name) != value:
            continue
        for table, width in memory.table_widths(d_model).items():
            if width % block:
                want = f"for rows a multiple of {block} wide ({table} has {width})"
                raise ConfigError(f"memories.{name}", value, want)
