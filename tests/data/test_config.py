"""Every field of the configuration is checked, and the error names it."""

import dataclasses

import pytest

from memjax.data.config import CorpusConfig, DataConfig
from memjax.errors import ConfigError

BAD = {
    "corpora": [()],
    "tokenizer": ["", None],
    "context": [0, 2.0, True, "256"],
    "batch_size": [0, -1, 1.5],
    "seed": [-1, 2**63, 0.0],
    "shuffle_documents": ["yes", 1],
    "eval_stride": [0, 257, 1.0],
    "eval_batch_size": [0, None],
    "n_threads": [-1, 1.0],
    "n_workers": [-1, False],
}


@pytest.mark.parametrize(("field", "values"), BAD.items())
def test_a_wrong_value_names_its_field(field, values):
    for value in values:
        with pytest.raises(ConfigError) as caught:
            DataConfig(**{field: value})
        assert caught.value.field == f"data.{field}"
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), "1"])
def test_a_weight_is_a_positive_number(weight):
    with pytest.raises(ConfigError, match=r"data\.corpora\.weight"):
        CorpusConfig(name="kjv", weight=weight)


def test_a_corpus_has_a_name():
    with pytest.raises(ConfigError, match=r"data\.corpora\.name = ''"):
        CorpusConfig(name="")


def test_the_defaults_are_kjv_as_bytes():
    config = DataConfig()
    assert config.corpora == (CorpusConfig(name="kjv", weight=1.0),)
    assert (config.tokenizer, config.context, config.batch_size) == ("bytes", 256, 8)
    assert dataclasses.replace(config, eval_stride=256).eval_stride == config.context
