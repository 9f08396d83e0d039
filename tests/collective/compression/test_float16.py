"""float16 and bfloat16: saturation instead of overflow."""

import numpy as np
import pytest

from potluck.collective.compression.bfloat16 import BFloat16
from potluck.collective.compression.float16 import Float16
from potluck.collective.compression.sixteen import Sixteen


@pytest.mark.parametrize("codec", [Float16(), BFloat16()], ids=lambda codec: codec.name)
def test_too_large_becomes_the_largest(codec: Sixteen) -> None:
    """What is finite stays finite; infinity and NaN stay what they are."""
    largest = np.finfo(np.float32).max
    values = np.array([largest, -largest, 1.0, np.inf, -np.inf, np.nan], np.float32)
    found = np.empty_like(values)
    codec.decode(codec.packed(values), found)
    assert found[:5].tolist() == [codec.largest, -codec.largest, 1.0, np.inf, -np.inf]
    assert np.isnan(found[5])


def test_the_largest_numbers_are_those_of_the_types() -> None:
    """One more step would be infinite."""
    assert Float16.largest == float(np.finfo(np.float16).max)
    step = np.array([BFloat16.largest], np.float32).view(np.uint32) + 0x10000
    assert np.isinf(step.view(np.float32)[0])
