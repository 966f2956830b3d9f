"""The guide to gradients by rows does what it says.

What: its Python blocks run from top to bottom as one script, with their own checks.
Why: people copy such blocks into loops of their own.
When not: the parts alone; tests/ops, tests/layers and tests/optim have those.
"""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

PAGE = Path(__file__).parent.parent / "docs" / "row_gradients.md"
TEXT = PAGE.read_text(encoding="utf-8")


def run_page() -> dict[str, Any]:
    """The names of the script; its lines are numbered as those of the page."""
    names: dict[str, Any] = {"__name__": "row_gradients"}
    for block in re.finditer(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        line = TEXT.count("\n", 0, block.start(1))
        source = "\n" * line + block[1]
        exec(compile(source, str(PAGE), "exec", dont_inherit=True), names)
    return names


@pytest.mark.multidevice
def test_the_page_runs() -> None:
    """Two different sets of losses: rows equal dense, and the model learns."""
    names = run_page()
    assert jax.device_count() == 8
    for rows, dense in (("losses", "dense_losses"), ("nnx_losses", "nnx_dense_losses")):
        np.testing.assert_allclose(names[rows], names[dense], rtol=1e-5)
        assert names[rows][-1] < 0.75 * names[rows][0]
    assert names["plain_squares"][-1] < 0.5 * names["plain_squares"][0]
    assert names["part"] == (253, 8), "the block over a mesh has run"
    assert len(names["refused"]) == 4
    for message in names["refused"]:
        assert "memjax.apply_updates" in message
    listed = re.search(r"^\| dense Adam \| (\S+) \| (\S+) \| (\S+) \|", TEXT, re.M)
    assert listed is not None
    np.testing.assert_allclose(
        names["dense_moves"], [float(cell) for cell in listed.groups()], atol=5e-5
    )


def test_links_lead_to_headings() -> None:
    """Links to a heading, of this page and of others, hit one."""
    found = 0
    for page in PAGE.parent.glob("*.md"):
        for target in re.findall(r"\]\(([^):]*#[^)]+)\)", page.read_text("utf-8")):
            name, anchor = target.split("#")
            other = page.parent / name if name else page
            headings = re.findall(r"^#+ (.*)$", other.read_text("utf-8"), re.M)
            slugs = [re.sub(r"[^\w\s-]", "", text).lower() for text in headings]
            assert anchor in [slug.replace(" ", "-") for slug in slugs], target
            found += 1
    assert found >= 6
