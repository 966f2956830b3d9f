"""The page on nearest neighbours: its Python runs, and it names every option.

What: the blocks of docs/knn.md, and the options of the command.
Why: a page that no longer runs is worse than none.
When not: what it claims about results; the other tests of kNN.
"""

import dataclasses
import re
from pathlib import Path

from memjax.cli.knn import KnnOptions

TEXT = (Path(__file__).parents[2] / "docs" / "knn.md").read_text("utf-8")


def test_the_python_of_the_page_runs():
    (block,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    exec(compile(block, "knn.md", "exec", dont_inherit=True), {})


def test_every_option_is_explained():
    for field in dataclasses.fields(KnnOptions):
        assert f"--{field.name.replace('_', '-')}" in TEXT, field.name
        if not isinstance(field.default, bool) and field.default is not None:
            row = next(
                x
                for x in TEXT.splitlines()
                if x.startswith(f"| `--knn-{field.name[4:]}`")
            )
            default = str(field.default).removesuffix(".0")
            assert row.split("|")[2].strip(" `") == default, row
