"""Engram over DeepSeek's vocabulary and its token classes, on three corpora.

    pip install -e ".[data,corpora,tokenizers]"
    memjax train experiments/engram_deepseek.py

Tokens of the DeepSeek-V3 tokenizer, n-grams over their 99092 classes (arXiv:2601.07372
section 2.2; one more for the document separator), 2 and 3 tokens long, 8 hash heads,
two blocks with tables of their own, 300 steps of 4 x 128 tokens of core28. The
vocabulary, not the model, is what a step costs here.
"""

from dataclasses import replace
from pathlib import Path

from memjax.data.config import CorpusConfig
from memjax.experiment import Experiment, load_experiment
from memjax.layers.engram import EngramConfig

QUICKSTART = Path(__file__).with_name("quickstart.py")
N_IDS, N_CLASSES = 129_281, 99_093  # with the separator


def config() -> Experiment:
    """The quickstart's backbone on other tokens and texts."""
    base = load_experiment(QUICKSTART).experiment
    memory = EngramConfig(
        layers=(0, 1),
        orders=(2, 3),
        n_heads=8,
        rows_per_head=20_000,
        row_width=16,
        n_token_classes=N_CLASSES,
        table_mode="rows",
    )
    model = replace(
        base.model, vocab_size=N_IDS, tie_embeddings=True, memories=(memory,)
    )
    data = replace(
        base.data,
        corpora=(CorpusConfig(name="core28"),),
        tokenizer="deepseek",
        context=128,
        batch_size=4,
        eval_stride=128,
        eval_batch_size=4,
    )
    train = replace(base.train, n_steps=300, save_every=100, health_every=100)
    return replace(base, name="engram_deepseek", model=model, data=data, train=train)
