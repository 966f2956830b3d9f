"""Two Engrams of DeepSeek-V4.1-Flash on a pod: to be planned, not to be tried here.

    memjax show experiments/v41_pod.py --chip v5p --chips 128
    memjax train experiments/v41_pod.py --debug

384006168 and 384016682 rows of 256 (arXiv:2609.19969, `models.presets.v41_flash`),
4 residual streams of width 5120, 2^22 tokens a step. The backbone is a dense one with
about as many weights as the release uses for a token, 10e9; the release has a mixture
of experts, which changes nothing about the tables. The text is bytes, so that a plan
needs no tokenizer; DeepSeek's vocabulary would add 6 % to weights and arithmetic.
Tables are bfloat16 and trained by rows; `docs/planner.md` works through the plan.
"""

from dataclasses import replace

from memjax.data.config import DataConfig
from memjax.experiment import Experiment
from memjax.layers.block import HyperConfig
from memjax.layers.precision import PrecisionConfig
from memjax.models.config import ModelConfig
from memjax.models.presets import v41_flash
from memjax.optim.config import OptimConfig
from memjax.train.config import TrainConfig


def config() -> Experiment:
    """40 blocks of 5120, the published tables."""
    memory = replace(v41_flash(), n_token_classes=None, pad_id=None, norm_eps=1e-6)
    model = ModelConfig(
        n_layers=40,
        d_model=5120,
        n_heads=40,
        n_kv_heads=8,
        d_ff=12288,
        tie_embeddings=True,
        remat=True,
        memories=(memory,),
        hyper=HyperConfig(n_streams=4, form="single_pass"),
        precision=PrecisionConfig(compute="bfloat16", tables="bfloat16"),
    )
    return Experiment(
        name="v41_pod",
        model=model,
        data=DataConfig(
            context=4096,
            batch_size=1024,
            eval_stride=4096,
            eval_batch_size=256,
        ),
        optim=OptimConfig(
            optimizer="muon",
            embedding="sinkhorn_momentum",
            table_optimizer="sinkhorn_momentum",
            table_stochastic_rounding=True,
        ),
        train=TrainConfig(accumulate_steps=4, n_steps=10_000),
    )
