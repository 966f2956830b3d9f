"""Silence for libraries that talk on standard error.

What: `quiet_libraries`, called by programs when they start.
Why: a run prints its own lines and warnings, not those of its checkpoint library.
When not: at import; a notebook keeps its own logging.
"""

import logging


def quiet_libraries() -> None:
    """Only errors of absl, orbax and jax reach standard error."""
    for name in ("absl", "orbax", "jax"):
        logging.getLogger(name).setLevel(logging.ERROR)
