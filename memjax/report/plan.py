"""What a run is going to train, in a few lines before it starts.

What: `plan_text(description)` from the plain data that describes an experiment.
Why: the wrong size, or a table that eats the memory, shows before the first step.
When not: every field and every shape; that is `memjax show`.
"""

from collections.abc import Mapping
from typing import Any


def count_text(number: float) -> str:
    """1234 -> "1.23 k", 5_600_000 -> "5.60 M"; below 1000 the number itself."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number:g}"


def bytes_text(number: int) -> str:
    """Bytes in powers of 1024: "512 B", "1.5 MiB"."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def plan_text(description: Mapping[str, Any]) -> str:
    """The lines printed before training.

    Args:
      description: `params_dense`, `params_table`, `bytes_dense`, `bytes_table` (of the
        parameters), `on_host` (path of a table there -> its `rows`, and `slots`, the
        rows that a device holds), `flops_per_token`, `table_bytes_per_token`,
        `tokens_per_step`, `n_steps`.
    """
    tokens = description["tokens_per_step"] * description["n_steps"]
    lines = [
        ("dense weights", "params_dense", "bytes_dense"),
        ("memory tables", "params_table", "bytes_table"),
    ]
    text = [
        f"{name}: {count_text(description[params])} parameters, "
        f"{bytes_text(description[size])}"
        for name, params, size in lines
    ]
    text += [
        f"{path}: on the host, {count_text(table['rows'])} rows; "
        f"the device holds {count_text(table['slots'])} of them"
        for path, table in description["on_host"].items()
    ]
    text.append(
        f"each token: {count_text(description['flops_per_token'])} FLOPs forward, "
        f"{bytes_text(description['table_bytes_per_token'])} read from tables"
    )
    text.append(
        f"each step: {description['tokens_per_step']} tokens; "
        f"{description['n_steps']} steps, {count_text(tokens)} tokens in all"
    )
    return "\n".join(text)
