"""onebit: signs and mean magnitudes."""

import numpy as np
import pytest

from potluck import MalformedFrame
from potluck.collective.compression.onebit import BLOCK, OneBit
from support.gradients import normal


def test_values_become_the_mean_magnitude_with_their_sign() -> None:
    """In each block."""
    values = normal(2 * BLOCK + 3)
    found = np.empty_like(values)
    OneBit().decode(OneBit().packed(values), found)
    assert ((found < 0) == (values < 0)).all()
    for start in range(0, values.size, BLOCK):
        part = slice(start, start + BLOCK)
        np.testing.assert_allclose(np.abs(found[part]), np.abs(values[part]).mean(), rtol=1e-5)


def test_a_value_takes_a_bit() -> None:
    """And a block four bytes more."""
    assert OneBit().size(8 * BLOCK) == BLOCK + 4 * 8
    assert OneBit().size(9) == 2 + 4


def test_bits_that_stand_for_nothing_are_checked() -> None:
    """One vector has one encoding."""
    data = OneBit().packed(np.ones(9, np.float32))
    data[-1] |= 0x80
    with pytest.raises(MalformedFrame, match="stand for nothing"):
        OneBit().decode(data, np.empty(9, np.float32))


def test_the_largest_magnitudes_do_not_overflow() -> None:
    """The mean of the largest numbers is not infinite."""
    values = np.full(BLOCK, np.finfo(np.float32).max)
    found = np.empty_like(values)
    OneBit().decode(OneBit().packed(values), found)
    np.testing.assert_allclose(found, values, rtol=1e-4)
