"""How the blocks of a model are run: which together, and for how many tokens.

What: `runs`, equal neighbouring blocks; `n_decoder_tokens`, for what the decoder of a
    causal encoder-decoder is run.
Why: compile time must not grow with depth, nor a prompt cost the decoder all of it.
When not: what a block is; see `layers.block`.
"""

from collections.abc import Iterator

from memjax.errors import ConfigError
from memjax.models.config import ModelConfig
from memjax.models.memories import Placed, looks_back, placed


def runs(config: ModelConfig) -> Iterator[tuple[int, int, tuple[Placed, ...]]]:
    """(first block, number of blocks, memories) of each run of equal blocks.

    Blocks with a memory stand alone, since each owns a table of its own size.
    """
    start = 0
    while start < config.n_layers:
        here = placed(config.memories, start)
        end = start + 1
        if not here and config.scan_layers:
            while (
                end < config.n_layers
                and not placed(config.memories, end)
                and config.has_experts(end) == config.has_experts(start)
                and config.decodes(end) == config.decodes(start)
            ):
                end += 1
        yield start, end - start, here
        start = end


def n_decoder_tokens(
    config: ModelConfig, last: int | None, n_tokens: int, cached: bool
) -> int:
    """Last tokens that the decoder runs for, so that `last` of them are exact.

    A local window of w tokens makes a token of a decoder block depend on w - 1 before
    it in the block below: bounded replay (arXiv:2609.19969 section 2.2).

    Raises:
        ConfigError: `last` out of range, with a cache, with the "probability"
            arrangement, or where a memory of the decoder looks back by itself.
    """
    if last is None:
        return n_tokens
    if cached or not 1 <= last <= n_tokens:
        raise ConfigError("last", last, f"1 to {n_tokens}, without a cache")
    if config.arrangement == "probability":
        raise ConfigError("last", last, "None when arrangement = 'probability'")
    if config.ced is None:
        return n_tokens
    for memory in config.memories:
        if looks_back(memory) and config.decodes(memory.layers[-1]):
            raise ConfigError("last", last, f"None with {type(memory).__name__} there")
    window = config.ced.local_window or 1
    n_blocks = config.n_layers - config.ced.first_decoder
    return min(last + (window - 1) * n_blocks, n_tokens)
