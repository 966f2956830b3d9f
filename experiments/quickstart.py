"""A byte-level language model with a hashed n-gram memory, on the King James Bible.

    memjax train experiments/quickstart.py

A 3-block decoder of width 128 reads, before block 1, a table of n-gram rows (orders 3
to 6, 370 k rows in all) mixed half and half with a dense path. The table is trained by
rows, by Sinkhorn momentum, the rest by AdamW. Cost: about 4 minutes on 2 CPU cores.
"""

from memjax.data.config import CorpusConfig, DataConfig
from memjax.experiment import Experiment
from memjax.layers.engram import EngramConfig
from memjax.models.config import ModelConfig
from memjax.optim.config import OptimConfig
from memjax.train.config import TrainConfig


def config() -> Experiment:
    """The run that the README shows."""
    memory = EngramConfig(
        layers=(1,),
        orders=(3, 4, 5, 6),
        n_heads=1,
        rows_per_head=(20_000, 50_000, 100_000, 200_000),
        row_width=32,
        mode="interpolate",
        cap=0.5,
        kernel_size=0,
        table_mode="rows",
    )
    return Experiment(
        name="quickstart",
        model=ModelConfig(
            n_layers=3,
            d_model=128,
            n_heads=2,
            n_kv_heads=2,
            d_ff=352,
            scan_layers=False,
            memories=(memory,),
        ),
        data=DataConfig(corpora=(CorpusConfig(name="kjv"),), context=256, batch_size=8),
        optim=OptimConfig(
            learning_rate=3e-3,
            table_learning_rate=2e-2,
            warmup_steps=50,
            end_frac=0.05,
        ),
        train=TrainConfig(
            n_steps=600, eval_every=None, save_every=200, health_every=200
        ),
    )
