"""The model of an experiment as sampling goes on with it.

What: `decoding`: parts -> the functions that `evaluate.generate` keeps a text with.
Why: neither the model nor sampling should know how a run keeps its parameters.
When not: several rows at once; take `models.decode`.
"""

from typing import Any

from jax import Array

from memjax.build.parts import Parts
from memjax.errors import ConfigError
from memjax.evaluate.generate import Decoding
from memjax.layers.decode_piece import CACHE
from memjax.models.decode import check_decodes, decoder, init_cache
from memjax.models.parameters import split_variables


def decoding(parts: Parts, context: int) -> Decoding | None:
    """Start and step of one row of at most `context` tokens; None without a cache.

    Of the models, those whose fast weights are shared have none (`check_decodes`).
    """
    config = parts.experiment.model
    try:
        check_decodes(config)
    except ConfigError:
        return None
    model = decoder(parts.model, context)

    def step(
        params: Any, cache: Any, tokens_1T: Array, segments_1T: Array
    ) -> tuple[Array, Any]:
        variables = split_variables(params, config) | {CACHE: cache}
        logits_1TV, found = model.apply(
            variables, tokens_1T, segments_1T, mutable=[CACHE]
        )
        return logits_1TV, found[CACHE]

    return Decoding(lambda: init_cache(model, 1), step)
