"""The quickstart's memory over classes of bytes instead of bytes, on the Bible.

    memjax train experiments/engram_classes.py

The n-grams of the table are made of classes of tokens (arXiv:2601.07372 section 2.2):
letters lose their case and accents, and 257 ids become 228. Everything else is the
quickstart.
"""

from dataclasses import replace
from pathlib import Path

from memjax.experiment import Experiment, load_experiment

QUICKSTART = Path(__file__).with_name("quickstart.py")


def config() -> Experiment:
    """The quickstart, hashing classes."""
    base = load_experiment(QUICKSTART).experiment
    (memory,) = base.model.memories
    model = replace(base.model, memories=(replace(memory, n_token_classes=228),))
    return replace(base, name="engram_classes", model=model)
