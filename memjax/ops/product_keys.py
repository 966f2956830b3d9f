"""Product keys: a grid of slots addressed by two halves of a key.

What: `slot_count`, the number of slots of a grid.
Why: slot numbers are 32-bit integers, and a product beyond them wraps without a word.
When not: tables whose rows are not pairs of sub-keys.
"""

import math

from memjax.errors import ConfigError

MAX_SLOTS = 2**31 - 1
MAX_SUB_KEYS = math.isqrt(MAX_SLOTS)


def slot_count(sub_keys: int) -> int:
    """Slots of a square grid: one for every pair of sub-keys, row i * N + j.

    Args:
        sub_keys: sub-keys N of each half.

    Raises:
        ConfigError: N is below 1, or N * N slots do not fit 32-bit integers.

    Source: arXiv:1907.05242, product keys.
    """
    if not 1 <= sub_keys <= MAX_SUB_KEYS:
        raise ConfigError(
            "sub_keys",
            sub_keys,
            f"1 to {MAX_SUB_KEYS} sub-keys a half ({MAX_SLOTS} slots at most)",
        )
    return sub_keys * sub_keys
