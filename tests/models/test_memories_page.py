"""The Python of docs/memories.md runs."""

import re
from pathlib import Path

import jax.numpy as jnp

from memjax.models.parameters import cost

PAGE = Path(__file__).parents[2] / "docs" / "memories.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_python_of_the_page_runs() -> None:
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    model, stream_BTD = names["model"], names["stream_BTD"]
    assert cost(model, 8).table_params > 128 * 128 * 128  # type: ignore[arg-type]
    assert isinstance(stream_BTD, jnp.ndarray)
    assert stream_BTD.shape == (2, 16, 32)
    assert bool(jnp.any(stream_BTD != names["x_BTD"]))
