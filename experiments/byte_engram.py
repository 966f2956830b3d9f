"""FNV hashes of the last 3, 5 and 8 bytes, read as Engram reads, on the Bible.

    memjax train experiments/byte_engram.py

The quickstart with the addressing of sehaxe/dormouse: one FNV-1a hash by order, with
50 000, 100 000 and 200 000 rows of width 32, drawn from N(0, 0.02^2). Gate, mixing and
optimizer are the quickstart's, and so is about the cost.
"""

from dataclasses import replace
from pathlib import Path

from memjax.experiment import Experiment, load_experiment
from memjax.layers.byte_engram import ByteEngramConfig

QUICKSTART = Path(__file__).with_name("quickstart.py")


def config() -> Experiment:
    """The quickstart with other hashes."""
    base = load_experiment(QUICKSTART).experiment
    memory = ByteEngramConfig(
        layers=(1,),
        rows_per_head=(50_000, 100_000, 200_000),
        mode="interpolate",
        cap=0.5,
        kernel_size=0,
        table_mode="rows",
    )
    return replace(
        base, name="byte_engram", model=replace(base.model, memories=(memory,))
    )
