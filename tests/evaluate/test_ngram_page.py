"""The page on n-gram memories: its Python runs, and its figures are those of today."""

import re
from pathlib import Path

import numpy as np

from memjax.evaluate.collisions import collision_excess
from memjax.models.memories import KINDS
from memjax.ops.modular_hash import ModularLayout

TEXT = (Path(__file__).parents[2] / "docs" / "ngram_memories.md").read_text("utf-8")


def test_the_python_of_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "ngram_memories.md", "exec", dont_inherit=True), {})


def test_the_collisions_are_what_it_says():
    vocab, rng = 60, np.random.default_rng(0)
    share = 1 / np.arange(1, vocab + 1)
    tokens = rng.choice(vocab, size=(4, 2000), p=share / share.sum())
    found = []
    for multiple in (120, 300):
        for extra in (0, 25):
            size = multiple * vocab + extra
            layout = ModularLayout(
                vocab_size=vocab, orders=(3,), column_rows=((size,),)
            )
            found.append(collision_excess(tokens, np.ones_like(tokens), layout))
    row = next(line for line in TEXT.splitlines() if line.startswith("| excess |"))
    assert row == "| excess | " + " | ".join(f"{x:.2f}" for x in found) + " |"


def test_it_names_every_memory_of_the_family():
    for kind in KINDS:
        name = kind.__name__.removesuffix("Config")
        if "Ngram" in name or "Engram" in name:
            spelt = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
            assert f"`{spelt}`" in TEXT, spelt
