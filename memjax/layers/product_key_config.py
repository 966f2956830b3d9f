"""Options of a product-key memory.

What: `ProductKeyConfig`, the settings of the published product-key memories as words.
Why: what two papers do differently is one changed field, and a setting that cannot work
    is an error when the model is built.
When not: Memory+ and PEER have their own configs, beside their layers.
"""

import math
from dataclasses import dataclass

from memjax.errors import ConfigError
from memjax.layers.join import check_gate
from memjax.layers.memory import MemoryConfig, TableSpec, check_fields, check_least
from memjax.layers.query_network import QUERIES, QUERY_INITS, QUERY_NORMS
from memjax.layers.sub_keys import KEY_INITS, check_key_init
from memjax.layers.table import check_table_size
from memjax.ops.product_keys import check_selection, slot_count
from memjax.ops.read_weights import ACTIVATIONS, OVERS, SUBTRACTS

VALUE_INITS = ("normal", "truncated_normal", "zeros")
VALUE_FANS = ("width", "reads", "slots")
_NORMAL_KEYS = ("normal", "truncated_normal")
_FLAGS = (
    "flat",
    "query_bias",
    "query_learned",
    "normalize_query",
    "detach_input",
    "input_norm",
    "key_normalized",
    "key_shared",
    "key_learned",
    "normalize",
    "slice_values",
    "output_norm",
)


@dataclass(frozen=True, kw_only=True)
class ProductKeyConfig(MemoryConfig):
    """Options of a product-key memory, beside those of `MemoryConfig`.

    The defaults are those of facebookresearch/XLM (arXiv:1907.05242).

    Attributes:
        n_sub_keys: sub-keys N of each half, N * N slots. With `flat`: keys, one a slot.
        key_width: width Q of a whole key; even, unless `flat`. None: the stream's.
        n_heads: heads H; each searches for itself, and their reads are summed.
        k: slots K read by a head. It may exceed N. None: all slots, without a search,
            by a matrix product with the table; the scores of the heads are then summed
            before the activation, which is another function than K = N * N
            (arXiv:2310.10837, every published product-key run of its release).
        flat: one key a slot instead of product keys (1907.05242, the baseline).
        value_width: width of a read; None: that of the stream.

        query, hidden_sizes, query_bias, query_init, query_norm, query_learned: `kind`,
            `hidden`, `use_bias`, `init_rule`, `norm` and `learned` of `QueryNetwork`.
            query_norm = "batch" looks across time and sequences while training.
        normalize_query: each half of a query (with `flat` the whole) gets length 1.
        detach_input: no gradient goes from the query to the stream.
        input_norm: LayerNorm of the stream before the query network
            (lucidrains/product-key-memory).

        key_init, key_normalized, key_shared, key_learned: `init`, `normalized`,
            `shared` and `learned` of `sub_keys`.
        key_std: of "normal" and "truncated_normal" keys; None: Q^-1/2 * init_scale.

        activation, over, temperature, subtract, normalize: as in `read_weights`.

        permutation_seed: None: slot i of every head is row i. A seed: every head sees
            the rows in an order of its own.
        modulo_rows: rows of the table when they are fewer than slots; slot i reads row
            i mod modulo_rows. None: one row a slot.
        slice_values: each head reads rows of width E / H, and reads are concatenated
            instead of summed (2310.10837).
        value_init: initial values, "normal", "truncated_normal" (cut at two deviations)
            or "zeros".
        value_std: their deviation; None: value_fan^-1/2 * init_scale, where value_fan
            is the "width" of a row (1907.05242), the "reads" K * H of a token or the
            number of "slots".
        init_scale: factor on the deviations above; 2310.10837 has sqrt(2 / L).
        output_norm: LayerNorm of the read (arXiv:2302.06461, lucidrains).

        input_dropout, query_dropout, value_dropout: of the stream before the query
            network, of the query, and of the read (1907.05242).
        weight_dropout: of the weights after re-scoring (lucidrains).
        score_noise: factor on Gumbel noise that is added to the scores of all sub-keys
            before the search, while training (lucidrains; there without a factor).

        gate: of the whole read, "none" or "sigmoid" (`layers.join.token_gate`).

    2310.10837's custom_init 0 to 5 are value_init "normal" for 0, 4, 5 and
    "truncated_normal" for 1, 2, 3 (key_init the same word), value_fan "width" for 0, 1,
    "reads" for 2, 4 and "slots" for 3, 5; its truncated normals are rescaled to the
    exact deviation of the sample, ours to that of the distribution. Not here: its
    head_merge_topk, approx, factorize, two_stage, head_exclusive and
    randomize_indices, its dropout of scores; lucidrains' mem_trainable_mask.
    """

    n_sub_keys: int = 512
    key_width: int | None = 256
    n_heads: int = 4
    k: int | None = 32
    flat: bool = False
    value_width: int | None = None
    query: str = "linear"
    hidden_sizes: tuple[int, ...] = ()
    query_bias: bool = True
    query_init: str = "uniform"
    query_norm: str = "none"
    query_learned: bool = True
    normalize_query: bool = False
    detach_input: bool = False
    input_norm: bool = False
    key_init: str = "uniform_half"
    key_std: float | None = None
    key_normalized: bool = False
    key_shared: bool = False
    key_learned: bool = True
    activation: str = "softmax"
    over: str = "head"
    temperature: float = 1.0
    subtract: str = "none"
    normalize: bool = False
    permutation_seed: int | None = None
    modulo_rows: int | None = None
    slice_values: bool = False
    value_init: str = "normal"
    value_std: float | None = None
    value_fan: str = "width"
    init_scale: float = 1.0
    output_norm: bool = False
    input_dropout: float = 0.0
    query_dropout: float = 0.0
    weight_dropout: float = 0.0
    value_dropout: float = 0.0
    score_noise: float = 0.0
    gate: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, {"n_sub_keys": 1, "n_heads": 1})
        check_fields(
            self,
            {
                "query": QUERIES,
                "query_init": QUERY_INITS,
                "query_norm": QUERY_NORMS,
                "key_init": KEY_INITS,
                "activation": ACTIVATIONS,
                "over": OVERS,
                "subtract": SUBTRACTS,
                "value_init": VALUE_INITS,
                "value_fan": VALUE_FANS,
                **dict.fromkeys(_FLAGS, (False, True)),
            },
        )
        check_gate(self, self.gate)
        self._check_slots()
        self._check_query()
        self._check_initial_values()
        self._check_weights()
        if self.k is None:
            self._check_all_slots()

    @property
    def n_slots(self) -> int:
        """Slots S that a head chooses from."""
        return self.n_sub_keys if self.flat else self.n_sub_keys**2

    @property
    def n_rows(self) -> int:
        """Rows R of the table."""
        return self.n_slots if self.modulo_rows is None else self.modulo_rows

    @property
    def n_reads(self) -> int:
        """Rows read per token."""
        return self.n_slots if self.k is None else self.k * self.n_heads

    def query_width(self, d_model: int) -> int:
        """Width Q of a whole key in a model of width D."""
        return d_model if self.key_width is None else self.key_width

    def key_deviation(self, d_model: int) -> float:
        """Standard deviation of normal keys."""
        default = self.init_scale * self.query_width(d_model) ** -0.5
        return default if self.key_std is None else self.key_std

    def row_width(self, d_model: int) -> int:
        """Width W of a row in a model of width D."""
        width = d_model if self.value_width is None else self.value_width
        return width // self.n_heads if self.slice_values else width

    def value_deviation(self, d_model: int) -> float:
        """Standard deviation of the initial values; 0 for zeros."""
        if self.value_init == "zeros":
            return 0.0
        if self.value_std is not None:
            return self.value_std
        fans = {
            "width": self.row_width(d_model),
            "reads": self.n_reads,
            "slots": self.n_slots,
        }
        return self.init_scale * fans[self.value_fan] ** -0.5

    def table_specs(self, d_model: int) -> dict[str, TableSpec]:
        """The value table."""
        truncated = self.value_init == "truncated_normal"
        return {
            "table": TableSpec(
                self.n_rows,
                self.row_width(d_model),
                self.value_deviation(d_model),
                self.n_reads,
                "truncated_normal" if truncated else "normal",
            )
        }

    def check_width(self, d_model: int) -> None:
        """ConfigError where query or read does not fit a stream of width D."""
        if self.value_width not in (None, d_model):
            raise ConfigError(
                "memories.value_width", self.value_width, f"None or {d_model}, d_model"
            )
        self.check_input_width(d_model)

    def check_input_width(self, d_model: int) -> None:
        """As `check_width`, for a layer whose read may have another width."""
        key_width = self.query_width(d_model)
        self._check_key_width(key_width)
        if self.query in ("identity", "shuffled") and key_width != d_model:
            raise ConfigError(
                "memories.key_width",
                key_width,
                f"None or {d_model}, d_model, when query = {self.query!r}",
            )
        # A width of b bits has no more than b - 1 factors of two.
        uneven = self.n_heads >= d_model.bit_length() or d_model % 2**self.n_heads
        if self.query == "shuffled" and self.n_heads > 1 and uneven:
            raise ConfigError(
                "memories.n_heads",
                self.n_heads,
                f"heads whose 2^H blocks divide d_model = {d_model} evenly",
            )
        width = d_model if self.value_width is None else self.value_width
        if self.slice_values and width % self.n_heads:
            raise ConfigError(
                "memories.slice_values", True, f"heads that divide the width {width}"
            )

    def _check_key_width(self, key_width: int) -> None:
        halved = self.query == "per_head_half" or self.query_norm == "layer"
        if key_width % 2 and (halved or not self.flat):
            raise ConfigError(
                "memories.key_width", key_width, "an even number, for two halves"
            )
        width = key_width if self.flat else key_width // 2
        check_key_init(self.key_init, self.n_sub_keys, width)

    def _check_slots(self) -> None:
        if self.flat:
            check_table_size("memories.n_sub_keys", self.n_sub_keys)
        else:
            try:
                slot_count(self.n_sub_keys)
            except ConfigError as error:
                raise ConfigError(
                    "memories.n_sub_keys", self.n_sub_keys, error.allowed
                ) from None
        if self.k is not None:
            check_least(self, {"k": 1})
            check_selection(self.k, self.n_slots, "memories.k")
        rows = self.modulo_rows
        if rows is not None and not (_whole(rows) and 1 <= rows <= self.n_slots):
            raise ConfigError(
                "memories.modulo_rows", rows, f"None or 1 to {self.n_slots}, the slots"
            )
        seed = self.permutation_seed
        if seed is not None and not (_whole(seed) and 0 <= seed < 2**32):
            raise ConfigError(
                "memories.permutation_seed", seed, "None or a seed of 32 bits"
            )
        if self.value_width is not None:
            check_least(self, {"value_width": 1})

    def _check_query(self) -> None:
        hidden = self.hidden_sizes
        if not isinstance(hidden, tuple) or any(not _whole(m) or m < 1 for m in hidden):
            raise ConfigError("memories.hidden_sizes", hidden, "a tuple of widths >= 1")
        layered = self.query in ("mlp", "per_head_half")
        if layered != bool(hidden):
            raise ConfigError(
                "memories.hidden_sizes",
                hidden,
                f"{'one width or more' if layered else '()'} when query = "
                f"{self.query!r}",
            )
        mapped = layered or self.query == "linear"
        if self.query_norm == "batch" and not mapped:
            raise ConfigError(
                "memories.query_norm",
                self.query_norm,
                f"'none' or 'layer' when query = {self.query!r}: no linear map",
            )
        if not (self.query_learned or mapped):
            raise ConfigError(
                "memories.query_learned",
                False,
                f"True when query = {self.query!r}, which has no parameters",
            )
        if self.query == "identity" and self.key_shared and self.n_heads > 1:
            raise ConfigError(
                "memories.key_shared",
                True,
                f"False when all {self.n_heads} heads have the same query",
            )

    def _check_initial_values(self) -> None:
        if self.key_width is not None:
            check_least(self, {"key_width": 1})
            self._check_key_width(self.key_width)
        if self.key_std is not None and self.key_init not in _NORMAL_KEYS:
            raise ConfigError(
                "memories.key_std",
                self.key_std,
                f"None unless key_init in {_NORMAL_KEYS}",
            )
        if self.value_std is not None and (
            self.value_init == "zeros" or self.value_fan != "width"
        ):
            raise ConfigError(
                "memories.value_std", self.value_std, "None with zeros or a value_fan"
            )
        if self.value_init == "zeros" and self.value_fan != "width":
            raise ConfigError(
                "memories.value_fan", self.value_fan, "'width' when values start at 0"
            )
        for field in ("key_std", "value_std", "init_scale", "temperature"):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"memories.{field}", value, "a finite number above 0")

    def _check_weights(self) -> None:
        if self.normalize and self.activation == "softmax" and self.subtract == "none":
            raise ConfigError(
                "memories.normalize",
                True,
                "False after a softmax without `subtract`, whose weights sum to 1",
            )
        if self.over == "joint" and (self.activation != "softmax" or self.slice_values):
            raise ConfigError(
                "memories.over",
                self.over,
                "'head' unless a softmax weighs heads that are summed",
            )
        for field in (
            "input_dropout",
            "query_dropout",
            "weight_dropout",
            "value_dropout",
        ):
            if not 0 <= getattr(self, field) < 1:
                raise ConfigError(
                    f"memories.{field}", getattr(self, field), "a share in [0, 1)"
                )
        if not 0 <= self.score_noise < math.inf:
            raise ConfigError(
                "memories.score_noise", self.score_noise, "a finite number >= 0"
            )

    def _check_all_slots(self) -> None:
        for field, needed in (
            ("table_mode", "dense"),
            ("permutation_seed", None),
            ("modulo_rows", None),
            ("slice_values", False),
            ("over", "head"),
        ):
            value = getattr(self, field)
            if value != needed:
                raise ConfigError(
                    f"memories.{field}", value, f"{needed!r} when k = None (all slots)"
                )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
