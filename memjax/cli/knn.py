"""The options of `memjax eval --knn`, and its table.

What: `KnnOptions`, which `Eval` extends; `knn_config` of them; `knn_text` of a result.
Why: nine options of one purpose would bury those of the command itself.
When not: what they mean; evaluate.knn says that.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from memjax.cli.arguments import Flag, UsageError
from memjax.report.text_table import text_table


@dataclass(frozen=True, kw_only=True)
class KnnOptions:
    """What --knn takes."""

    knn: Flag = False
    """Score the run mixed with nearest neighbours in its training text as well. The
    datastore is built in the run folder, and used again."""
    knn_k: int = 64
    """With --knn: neighbours of a token."""
    knn_lambda: Annotated[str, tyro.conf.arg(metavar="L[,L..]")] = "0.25"
    """With --knn: share of the neighbours in [0, 1]; several, parted by commas, are
    tried in one pass (on valid)."""
    knn_temperature: float = 1.0
    """With --knn: distances are divided by it."""
    knn_tokens: int | None = None
    """With --knn: tokens of the datastore; all of train by default."""
    knn_key: Literal["feed_forward", "final"] = "feed_forward"
    """With --knn: compare inputs of the last feed-forward, or of the head."""
    knn_dtype: Literal["float16", "float32"] = "float16"
    """With --knn: how keys are stored."""
    knn_index: Literal["exact", "faiss"] = "exact"
    """With --knn: exact search on the device, or faiss (the extra knn)."""
    knn_probe: int = 8
    """With --knn: lists that faiss looks into."""
    knn_rebuild: Flag = False
    """With --knn: build the datastore anew, in the place of the one that is there."""


def knn_config(options: KnnOptions) -> Any:
    """The KnnConfig they ask for; None without --knn.

    Raises UsageError for options of --knn without it, ConfigError for their values.
    """
    if not options.knn:
        for field in dataclasses.fields(KnnOptions):
            if getattr(options, field.name) != field.default:
                name = field.name.replace("_", "-")
                raise UsageError(f"--{name} belongs to --knn")
        return None
    from memjax.evaluate.knn import KnnConfig

    try:
        lambdas = tuple(float(word) for word in options.knn_lambda.split(","))
    except ValueError:
        raise UsageError(
            f"--knn-lambda {options.knn_lambda} is not allowed: numbers in [0, 1], "
            "parted by commas"
        ) from None
    return KnnConfig(
        k=options.knn_k,
        lambdas=lambdas,
        temperature=options.knn_temperature,
        n_tokens=options.knn_tokens,
        key=options.knn_key,
        key_dtype=options.knn_dtype,
        index=options.knn_index,
        probe=options.knn_probe,
    )


def knn_text(found: Mapping[str, Any], *, markdown: bool = False) -> str:
    """A line about the search and a table: model, neighbours, mixtures; by corpus.

    Args:
        found: see `memjax.evaluate.knn.score_knn`.
        markdown: a Markdown table instead of aligned text.
    """
    rows = [("model alone", found["lm"]), ("neighbours alone", found["knn"])]
    rows += [
        (f"mixture, lambda {mixture['lambda']:g}", mixture)
        for mixture in found["mixtures"]
    ]
    parts = list(found["lm"]["parts"])
    header = ["bits per byte", *parts]
    columns = [[row["parts"][part] for part in parts] for _, row in rows]
    if len(parts) > 1:
        header.append("all")
        columns = [
            [*cells, row["bpb"]] for cells, (_, row) in zip(columns, rows, strict=True)
        ]
    body = [
        [name, *map(_figure, cells)]
        for (name, _), cells in zip(rows, columns, strict=True)
    ]
    line = (
        f"{found['k']} neighbours among {found['n_entries']} training tokens; one of "
        f"them holds the target for {100 * found['in_neighbours']:.1f} % of "
        f"{found['n_targets']} tokens"
    )
    return line + "\n" + text_table(header, body, markdown=markdown)


def _figure(bits: float) -> str:
    return f"{bits:.4f}" if math.isfinite(bits) else str(bits)
