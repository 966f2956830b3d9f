"""The Engrams of published models, as memories to put into a model.

What: `engram_demo`, `engram_27b`, `v41_flash` and `hash_500k`.
Why: sizes that nobody has to copy out of papers, and layouts that find the same rows.
When not: a memory for a model of your own; begin with `EngramConfig`.

All are in table_mode "rows": a gradient as large as the table is not formed. With
`dataclasses.replace` they take other layers, sizes and modes. Their n-grams are made of
the token classes of the DeepSeek tokenizer where `n_token_classes` is set. What is not
here: rates, and initial projections, which are this project's own in all of them.
"""

from memjax.layers.engram import EngramConfig

DEEPSEEK_IDS = 129280
DEEPSEEK_CLASSES = 99092
_PAD_CLASS = 2


def engram_demo() -> EngramConfig:
    """The demo of arXiv:2601.07372.

    For a model of width 1024 with 4 residual streams, ids of DEEPSEEK_IDS.
    2 x 16 columns of 646400 rows and more, 64 wide: 1.3e9 parameters.

    Source: deepseek-ai/Engram engram_demo_v1.py (torch's initial values: the table
    N(0, 1), the convolution uniform).
    """
    return EngramConfig(
        layers=(1, 15),
        form="demo",
        orders=(2, 3),
        n_heads=8,
        rows_per_head=646400,
        row_width=64,
        n_token_classes=DEEPSEEK_CLASSES,
        pad_id=_PAD_CLASS,
        gate="signed_sqrt",
        norm_eps=1.1920929e-07,
        kernel_size=4,
        conv_norm_eps=1e-5,
        conv_init="uniform",
        table_std=1.0,
        n_branches=4,
        table_mode="rows",
    )


def engram_27b() -> EngramConfig:
    """Engram-27B of arXiv:2601.07372.

    2 x 16 columns of 2262400 rows and more, 80 wide: 5.8e9 parameters, beside a model
    with 4 residual streams. The paper prints a plain sigmoid as gate; its code and that
    of V4.1 have the signed square root, as here. The convolution begins at zero;
    table_std is ours.
    """
    return EngramConfig(
        layers=(2, 15),
        form="demo",
        orders=(2, 3),
        n_heads=8,
        rows_per_head=2262400,
        row_width=80,
        n_token_classes=DEEPSEEK_CLASSES,
        pad_id=_PAD_CLASS,
        gate="signed_sqrt",
        norm_eps=1.1920929e-07,
        kernel_size=4,
        conv_norm_eps=1e-5,
        conv_init="zero",
        table_std=0.02,
        n_branches=4,
        table_mode="rows",
    )


def v41_flash() -> EngramConfig:
    """DeepSeek-V4.1-Flash (arXiv:2609.19969).

    For a model of width 5120 with 4 residual streams, ids of DEEPSEEK_IDS. 24 columns
    of 16000000 rows and more, 256 wide, in each of two layers: 384006168 and 384016682
    rows, 197e9 parameters. The release holds them in table_mode "fp8", which cannot be
    trained. Its eps is 1e-20: a table of zeros has gradients of 1e10.

    Source: inference/engram.py and config.json of the release (initializer_range 0.02,
    rms_norm_eps 1e-20).
    """
    return EngramConfig(
        layers=(1, 14),
        form="v41",
        orders=(2, 3, 4),
        n_heads=8,
        rows_per_head=16000000,
        row_width=256,
        n_token_classes=DEEPSEEK_CLASSES,
        pad_id=_PAD_CLASS,
        gate="signed_sqrt_copysign",
        norm_eps=1e-20,
        kernel_size=0,
        table_std=0.02,
        n_branches=4,
        table_mode="rows",
    )


def hash_500k() -> EngramConfig:
    """The hashed table of arXiv:2601.16531 that its hot tier is compared with.

    2 x 2 columns of 500000 rows and more, 64 wide: 128e6 parameters, one table for all
    three layers, beside a small model with one residual stream. What the paper does not
    say is as in `EngramConfig`: form, gate, convolution, initial values; ids are hashed
    as they are.
    """
    return EngramConfig(
        layers=(2, 4, 6),
        form="demo",
        orders=(2, 3),
        n_heads=2,
        rows_per_head=500_000,
        row_width=64,
        shared_table="hash_500k",
        table_mode="rows",
    )
