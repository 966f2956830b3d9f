"""The quickstart with ten times the rows, kept in host memory.

    memjax train experiments/host_table.py
    memjax train experiments/host_table.py train.host_tables=run

The device holds the rows in play (459 k of 3.7 M) and the host the rest; `run` keeps it
in files of the run folder, mapped into memory. Training, losses and checkpoints are
those of `table_mode = "rows"`. Cost: about 5 minutes on 2 CPU cores, and 1 GB.
"""

from dataclasses import replace
from pathlib import Path

from memjax.experiment import Experiment, load_experiment

QUICKSTART = Path(__file__).with_name("quickstart.py")


def config() -> Experiment:
    """The run of the docstring."""
    base = load_experiment(QUICKSTART).experiment
    (memory,) = base.model.memories
    sizes = (200_000, 500_000, 1_000_000, 2_000_000)
    memory = replace(memory, rows_per_head=sizes, table_mode="host")
    return replace(
        base, name="host_table", model=replace(base.model, memories=(memory,))
    )
