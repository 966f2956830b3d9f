"""Slots of product keys: what fits 32 bits."""

import pytest

from memjax.errors import ConfigError
from memjax.ops.product_keys import slot_count


def test_p07_more_slots_than_32_bit_integers_is_an_error() -> None:
    """46341 sub-keys per half is 2147488281 slots, more than 2**31 - 1; the error says
    that 46340 is the largest."""
    with pytest.raises(ConfigError, match=r"46341 .* 46340 "):
        slot_count(46341)
    assert slot_count(46340) == 2147395600


def test_a_grid_has_a_slot_for_every_pair() -> None:
    assert [slot_count(n) for n in (1, 2, 1024)] == [1, 4, 1048576]
    with pytest.raises(ConfigError, match="sub_keys = 0"):
        slot_count(0)
