"""ReLU against softmax over the rows of a product-key read, and a search against none.

    memjax sweep experiments/relu_keys.py
    memjax table experiments/relu_keys.py

The quickstart's backbone, data and steps; block 1 has product keys instead of its
feed-forward, of 128 x 128 rows, 4 heads, 8 rows a head. Arms: softmax over a head's
rows (arXiv:1907.05242), softmax over all heads' rows together, ReLU with a LayerNorm of
the read (arXiv:2302.06461), ReLU with initial values scaled to the rows read
(arXiv:2310.10837), and, of 32 x 32 rows, ReLU with a search and over all slots without
one, which is what every published product-key run of 2310.10837's release computes.
Tables are dense, since a read of all slots has no rows. `memjax train` of this file is
the third arm. 18 cells of about 5 minutes on 2 CPU cores.
"""

from dataclasses import replace
from pathlib import Path

from memjax.experiment import Experiment, Sweep, axis, load_experiment, product
from memjax.layers.product_key_config import ProductKeyConfig

QUICKSTART = Path(__file__).with_name("quickstart.py")
MEMORIES = "model.memories"


def memory(**options: object) -> ProductKeyConfig:
    """The product keys of all arms."""
    common = ProductKeyConfig(
        layers=(1,),
        place="instead_of_feed_forward",
        n_sub_keys=128,
        key_width=64,
        n_heads=4,
        k=8,
    )
    return replace(common, **options)


def config() -> Experiment:
    """The quickstart with ReLU keys and Adam for the table."""
    base = load_experiment(QUICKSTART).experiment
    optim = replace(base.optim, table_optimizer="adam", table_learning_rate=1e-2)
    return replace(
        base,
        name="relu_keys",
        model=replace(
            base.model, memories=(memory(activation="relu", output_norm=True),)
        ),
        optim=optim,
    )


def sweep() -> Sweep:
    """Six ways to weigh what was found, three seeds."""
    relu = {"activation": "relu", "output_norm": True}
    arms = {
        "softmax": memory(),
        "softmax_joint": memory(over="joint"),
        "relu_norm": memory(**relu),
        "relu_scaled": memory(
            activation="relu",
            key_init="normal",
            value_fan="reads",
            init_scale=(2 / 3) ** 0.5,
        ),
        "relu_small": memory(**relu, n_sub_keys=32),
        "relu_all_slots": memory(**relu, n_sub_keys=32, k=None),
    }
    return product(
        axis(MEMORIES, **{name: (arm,) for name, arm in arms.items()}),
        axis("seed", 0, 1, 2),
        baseline={MEMORIES: "softmax"},
    )
