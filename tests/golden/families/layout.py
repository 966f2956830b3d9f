"""Family layout: multipliers, primes, offsets and totals from a configuration.

Also reads the two published spellings of a hash configuration for other families.
"""

from typing import Any

from memjax.ops.ngram_hash import NgramLayout, ngram_layouts
from tests.golden.case import Case, Settings

SIZE_KEYS = ("engram_compressed_vocab_size", "tokenizer_vocab_size_compressed")


def layouts_of(
    settings: Settings, vocab_size: int, pad_id: int
) -> dict[int, NgramLayout]:
    """Layouts by layer id, from settings in the demo's or in V4.1's spelling."""
    if "engram_layer_ids" in settings:
        spelling = dict(
            layer_ids=settings.take("engram_layer_ids"),
            rows_per_head=settings.take("engram_vocab_size"),
            n_heads=settings.take("engram_n_heads"),
        )
        largest = settings.take("engram_max_ngram_size")
        settings.take("engram_pad_id")
    else:
        spelling = dict(
            layer_ids=settings.take("layer_ids"),
            rows_per_head=settings.take("engram_vocab_size"),
            n_heads=settings.take("n_head_per_ngram"),
            seed=settings.take("hash_seed" if "hash_seed" in settings else "seed"),
        )
        largest = settings.take("max_ngram_size")
        settings.take("pad_id")
        settings.take("n_embed_per_ngram")
    made = ngram_layouts(
        vocab_size=vocab_size, pad_id=pad_id, orders=range(2, largest + 1), **spelling
    )
    return {layout.layer_id: layout for layout in made}


def vocab_size_of(values: dict[str, Any]) -> int | None:
    """The vocabulary size a settings dict or layout file names, if it does."""
    for key in SIZE_KEYS:
        if key in values:
            return values[key]
    return None


def run(case: Case) -> None:
    known = {
        "config",
        "layers",
        "pad_compressed_id",
        "token_map",
        "tokenizer_vocab_size_compressed",
    }
    case.expect_arrays(known)
    config = case.data["config"]
    recorded = case.data | config
    for key in case.settings.values:
        assert case.settings.take(key) == recorded.get(key), f"settings.{key} differs"
    vocab_size, pad_id = vocab_size_of(recorded), case.data["pad_compressed_id"]
    assert vocab_size is not None, "the case names no vocabulary size"
    settings = Settings(dict(config))
    layouts = layouts_of(settings, vocab_size, pad_id)
    settings.take("engram_compressed_vocab_size", default=vocab_size)
    settings.done()
    assert [str(layer) for layer in layouts] == list(case.data["layers"])
    for layer, want in case.data["layers"].items():
        layout = layouts[int(layer)]
        case.equal("multipliers", layout.multipliers, want.pop("multipliers"))
        case.equal("primes", layout.primes, want.pop("primes"))
        case.equal("offsets", layout.offsets, want.pop("offsets"))
        case.equal("total_rows", layout.n_rows, want.pop("total_rows"))
        assert not want, f"values without a meaning here: {sorted(want)}"
