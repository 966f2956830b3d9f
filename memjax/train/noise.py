"""Silence for libraries that talk on standard error.

What: `quiet_libraries`, called by programs when they start.
Why: a run prints its own lines and warnings, not those of its checkpoint library.
When not: at import; a notebook keeps its own logging.
"""

import logging


def quiet_libraries() -> None:
    """Only errors of orbax and jax reach standard error.

    The checkpoint library logs each failure of its writing threads, in absl's and
    asyncio's name, and raises it as well: our error is enough.
    """
    for name in ("orbax", "jax"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
