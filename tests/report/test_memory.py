"""Tables of measurements: every section, blanks for the undefined, small numbers."""

import numpy as np
import pytest

from memjax.evaluate.usage import usage_metrics
from memjax.report.memory import memory_text

NAN = float("nan")
LOSS = {"n_tokens": 3, "share": 1.0, "nats": 1.5, "nats_without": 2.0, "gain": 0.5}


def measured(**memory):
    empty = {"n_tokens": 0, "share": 0.0}
    empty |= dict.fromkeys(("nats", "nats_without", "gain"), NAN)
    return {
        "loss": LOSS,
        "frequency": {
            "order": 8,
            "exact": False,
            "buckets": [{"bucket": "cut", **empty}, {"bucket": "0", **LOSS}],
        },
        "memories": {"layer_1": memory},
        "gradient_share": {
            "backbone": 0.00001,
            "memory": 0.25,
            "tables": 0.74999,
            "norm": 12.5,
        },
    }


def test_all_sections_with_their_numbers():
    unread = usage_metrics(np.zeros(4, np.int64), np.zeros(4), np.zeros(4, bool))
    text = memory_text(
        measured(
            gate={
                "quantiles": {"q50": 2e-5, "mean": 0.5},
                "buckets": [{"bucket": "0 to 1", "low": 0.0, "high": 1.0, **LOSS}],
            },
            usage={"all": unread},
            non_finite_scores=7,
            collisions=[
                {
                    "order": 2,
                    "head": 0,
                    "n_rows": 11,
                    "n_tokens": 9,
                    "distinct_ngrams": 8,
                    "distinct_rows": 6,
                    "shared_frac": 0.5,
                    "shared_tokens_frac": 0.4,
                    "expected_shared_frac": 0.487,
                }
            ],
        )
    )
    for line in (
        "loss in nats per token, with the memories and without",
        "layer_1  2.0e-05  0.5000",
        "0 to 1       3  1.0000",
        "scores that were not finite: 7",
        "the token's 8-gram stands in train, told apart by a 64-bit mix",
        "cut         0  0.0000",
        "    2     0    11        8          6",
        " 1.0e-05  0.2500  0.7500  12.5000",
    ):
        assert line in text, f"{line!r} in\n{text}"
    assert "nan" not in text


@pytest.mark.parametrize("markdown", [False, True])
def test_a_memory_that_records_nothing_leaves_its_sections_out(markdown):
    text = memory_text(measured(), markdown=markdown)
    assert "gate" not in text.replace("told", "") and "usage" not in text
    assert ("| all tokens |" in text) == markdown
