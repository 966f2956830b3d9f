"""The page on measurements: its Python runs, and it names the figures there are."""

import re
from pathlib import Path

import numpy as np

from memjax.evaluate.usage import usage_metrics

TEXT = (Path(__file__).parent.parent / "docs" / "measurements.md").read_text("utf-8")


def test_the_python_of_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        exec(compile(block, "measurements.md", "exec", dont_inherit=True), {})


def test_every_figure_of_usage_is_explained():
    ones = np.ones(4, np.int64)
    for name in usage_metrics(ones, ones.astype(float), ones > 0):
        if name != "n_reads":
            figure = name.removesuffix("_w").removesuffix("_u")
            assert f"`{figure}" in TEXT, name
