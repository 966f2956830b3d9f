"""Overrides: strict types, nearest field, tuples, unions."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from memjax.errors import ConfigError
from memjax.experiment import Experiment, flatten, override, set_path
from memjax.experiment.values import coerce, parse
from memjax.layers.engram import EngramConfig
from memjax.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class KeysConfig:
    n_keys: int = 4


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    sizes: tuple[int, ...] = (8, 8)


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    top_k: int = 8
    memories: tuple[KeysConfig | RowsConfig, ...] = (KeysConfig(), RowsConfig())
    table_sizes: tuple[int, int] = (64, 64)
    window: int | None = None
    kind: Literal["soft", "hard"] = "soft"

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ConfigError("top_k", self.top_k, "at least 1")


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    nesterov: bool = True
    rate: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Tree:
    model: ReadConfig = field(default_factory=ReadConfig)
    optim: StepConfig = field(default_factory=StepConfig)


def engram_experiment(**changes):
    return Experiment(
        name="small", model=ModelConfig(memories=(EngramConfig(),)), **changes
    )


def test_p27_overrides():
    """model.topk=16 suggests top_k; 16.5 and nothing are errors; booleans and floats
    are read as such; a tuple of the wrong length is an error."""
    tree = Tree()
    with pytest.raises(ConfigError, match=r"model\.topk = '16'.*did you mean.*top_k"):
        set_path(tree, "model.topk", "16")
    for text in ("16.5", ""):
        with pytest.raises(ConfigError, match=r"model\.top_k.*a whole number"):
            set_path(tree, "model.top_k", text)
    with pytest.raises(ConfigError, match=r"model\.top_k = 16\.5"):
        set_path(tree, "model.top_k", 16.5)
    assert set_path(tree, "model.top_k", "16").model.top_k == 16
    for text in ("False", "false"):
        assert set_path(tree, "optim.nesterov", text).optim.nesterov is False
    with pytest.raises(ConfigError, match=r"optim\.nesterov = '0'.*true or false"):
        set_path(tree, "optim.nesterov", "0")
    with pytest.raises(ConfigError, match=r"optim\.nesterov = 0 "):
        set_path(tree, "optim.nesterov", 0)
    rate = set_path(tree, "optim.rate", "1e-4").optim.rate
    assert type(rate) is float and rate == 1e-4
    with pytest.raises(ConfigError, match=r"model\.table_sizes.*exactly 2"):
        set_path(tree, "model.table_sizes", "64")
    with pytest.raises(ConfigError, match=r"model\.table_sizes.*exactly 2"):
        set_path(tree, "model.table_sizes", (64, 64, 64))


def test_p27_one_table_size_for_two_orders():
    """The same with the real model: two n-gram orders and one size in the tuple."""
    with pytest.raises(ConfigError, match=r"model\.memories\.0\.rows_per_head = \(64,"):
        set_path(engram_experiment(), "model.memories.0.rows_per_head", "(64,)")
    with pytest.raises(ConfigError, match="model.memories.0.n_head = '4'.*n_heads"):
        set_path(engram_experiment(), "model.memories.0.n-head", "4")


def test_changes_apply_together_and_not_one_after_the_other():
    experiment = engram_experiment()
    with pytest.raises(ConfigError, match=r"model\.n_heads"):
        set_path(experiment, "model.d_model", 130)
    changed = override(
        experiment,
        [("model.d_model", 130), ("model.n_heads", 5), ("model.n_kv_heads", 1)],
    )
    assert (changed.model.d_model, changed.model.n_heads) == (130, 5)
    assert experiment.model.d_model == 128


def test_dashes_indices_and_a_list_before_its_fields():
    tree = override(
        Tree(),
        [
            ("model.memories.1.sizes", "1, 2 3"),
            ("model.memories.0.n-keys", "16"),
            ("model.memories", (KeysConfig(n_keys=2), RowsConfig())),
        ],
    )
    assert tree.model.memories == (KeysConfig(n_keys=16), RowsConfig(sizes=(1, 2, 3)))
    assert set_path(tree, "model.memories", "()").model.memories == ()
    with pytest.raises(ConfigError, match=r"memories\.2.*2 entries, indices 0 to 1"):
        set_path(tree, "model.memories.2.n_keys", 3)
    with pytest.raises(ConfigError, match=r"memories\.first.*2 entries"):
        set_path(tree, "model.memories.first.n_keys", 3)
    with pytest.raises(ConfigError, match=r"model\.top_k\.x = 3.*model\.top_k is 8"):
        set_path(tree, "model.top_k.x", 3)


def test_the_nearest_field_is_found_one_level_down_too():
    with pytest.raises(ConfigError, match="d_model = '64'.*did you mean model.d_model"):
        set_path(engram_experiment(), "d-model", "64")
    with pytest.raises(ConfigError, match="sede = '1'.*did you mean seed"):
        set_path(engram_experiment(), "sede", "1")
    with pytest.raises(ConfigError, match="single dots"):
        set_path(engram_experiment(), "model.", "1")


def test_checks_of_a_config_name_the_whole_path():
    with pytest.raises(ConfigError, match=r"^model\.top_k = 0 is not allowed"):
        set_path(Tree(), "model.top_k", "0")
    with pytest.raises(ConfigError, match=r"^model\.memories\.0\.mode = 'adds'"):
        set_path(engram_experiment(), "model.memories.0.mode", "adds")
    with pytest.raises(ConfigError, match=r"^data\.corpora\.0\.weight = -1\.0"):
        set_path(engram_experiment(), "data.corpora.0.weight", "-1")


@pytest.mark.parametrize(
    ("text", "hint", "want"),
    [
        ("none", int | None, None),
        ("7", int | None, 7),
        ("1_000", int, 1000),
        ("-3", int, -3),
        ("2", float, 2.0),
        ("hard", Literal["soft", "hard"], "hard"),
        ("none", str, "none"),
        ("5", int | tuple[int, ...], 5),
        ("5,6", int | tuple[int, ...], (5, 6)),
        ("()", tuple[int, ...], ()),
        ("(3,)", tuple[int, ...], (3,)),
        ("[0.9, 0.95]", tuple[float, float], (0.9, 0.95)),
        (
            "(('a', 'b'), ('c', 'd'))",
            tuple[tuple[str, str], ...],
            (("a", "b"), ("c", "d")),
        ),
    ],
)
def test_texts(text, hint, want):
    value = parse(text, hint, "x")
    assert value == want and type(value) is type(want)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1e3", int),
        ("0x10", int),
        ("yes", bool),
        ("1", bool),
        ("none", int),
        ("nan?", float),
        ("", str),
        ("  ", float),
        ("softer", Literal["soft", "hard"]),
        ("1,a", tuple[int, ...]),
        ("((1, 2)", tuple[tuple[int, int], ...]),
        ("engram", KeysConfig),
    ],
)
def test_texts_that_are_refused(text, hint):
    with pytest.raises(ConfigError, match=r"^x"):
        parse(text, hint, "x")


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (True, int),
        (1.0, int),
        ("1", int),
        (True, float),
        (None, int),
        (1, str),
        (3, tuple[int, ...]),
    ],
)
def test_plain_data_is_never_converted_by_guess(value, hint):
    with pytest.raises(ConfigError, match=r"^x"):
        coerce(value, hint, "x")


def test_flatten_lists_every_leaf_once():
    leaves = flatten(Tree())
    assert leaves["model.memories.0.n_keys"] == 4
    assert leaves["model.memories.1.kind"] == "rows"
    assert leaves["model.table_sizes"] == (64, 64)
    assert leaves["model.window"] is None
    assert list(leaves)[-1] == "optim.rate"
