"""int8: blocks, scales, rounding."""

import numpy as np
import pytest
from hypothesis import given

from potluck import MalformedFrame
from potluck.collective.compression.base import Floats, Octets
from potluck.collective.compression.int8 import BLOCK, SMALLEST, Int8
from potluck.collective.reduce import quiet
from support.gradients import normal, vectors


def decoded(data: Octets, count: int) -> Floats:
    """The values in some bytes."""
    values = np.empty(count, np.float32)
    Int8().decode(data, values)
    return values


@given(values=vectors())
def test_the_error_is_at_most_half_a_step_of_the_block(values: Floats) -> None:
    """Rounded to the nearest, not cut off; a step is the block's largest value / 127."""
    found = decoded(Int8().packed(values), values.size)
    for start in range(0, values.size, BLOCK):
        part = values[start : start + BLOCK].astype(np.float64)
        top = np.abs(part).max()
        allowed = top if top < SMALLEST else top / 127 * 0.50001
        assert np.abs(found[start : start + BLOCK] - part).max() <= allowed


def test_the_largest_value_of_a_block_is_kept() -> None:
    """So the range of a gradient does not shrink from hop to hop."""
    values = normal(BLOCK)
    place = np.abs(values).argmax()
    np.testing.assert_allclose(decoded(Int8().packed(values), BLOCK)[place], values[place], 1e-6)


def test_a_bad_block_spoils_no_other() -> None:
    """NaN in one block turns that block into NaN, and leaves its neighbours alone."""
    values = normal(3 * BLOCK)
    values[BLOCK + 5] = np.inf
    found = decoded(Int8().packed(values), values.size).reshape(3, BLOCK)
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize("odd", [None, np.nan, np.inf, 3.4e38, 1e-42])
@pytest.mark.parametrize("seed", [None, 5])
def test_what_is_left_behind_is_what_a_decoder_misses(odd: float | None, seed: int | None) -> None:
    """Also of a last block that is not full, and beside a block of odd numbers."""
    values = np.random.default_rng(1).normal(size=5 * BLOCK + 17).astype(np.float32)
    if odd is not None:
        values[BLOCK : 2 * BLOCK] = odd
    coded = np.empty(Int8.size(values.size), np.uint8)
    left, back = np.empty_like(values), np.empty_like(values)
    with quiet():
        is_finite = Int8(seed).encode_leaving(values, coded, left)
        Int8().decode(coded, back)
        expected = values - back
    assert (coded == Int8(seed).packed(values)).all()
    assert np.array_equal(left, expected, equal_nan=True)
    assert is_finite == (odd is None)


def test_rounding_by_chance_is_right_on_average() -> None:
    """The mean of many encodings comes as near to the value as chance allows; nearest does not."""
    values = np.full(BLOCK, 0.3, np.float32)
    values[0] = 127.0  # a step of 1
    codec = Int8(seed=5)
    by_chance = [decoded(codec.packed(values), BLOCK)[1:].mean() for _ in range(40)]
    assert abs(np.mean(by_chance) - 0.3) < 5 * (0.21 / (255 * 40)) ** 0.5
    assert decoded(Int8().packed(values), BLOCK)[1:].max() == 0.0


def test_the_same_seed_rounds_the_same() -> None:
    """Chance comes from the seed alone."""
    values = normal(1000)
    assert (Int8(seed=3).packed(values) == Int8(seed=3).packed(values)).all()
    assert (Int8(seed=3).packed(values) != Int8(seed=4).packed(values)).any()


@pytest.mark.parametrize("scale", [np.inf, -np.inf, -1.0, -0.0, 3e38, -np.nan])
def test_a_scale_that_no_encoder_writes_is_refused(scale: float) -> None:
    """Infinite, negative, too large, or another NaN than the agreed one."""
    data = Int8().packed(np.ones(BLOCK, np.float32))
    data[:4].view(np.float32)[0] = scale
    with pytest.raises(MalformedFrame, match="A scale of int8"):
        decoded(data, BLOCK)


def test_a_value_that_no_encoder_writes_is_refused() -> None:
    """−128 has no counterpart."""
    data = Int8().packed(np.ones(BLOCK, np.float32))
    data[-1] = 128
    with pytest.raises(MalformedFrame, match="−128"):
        decoded(data, BLOCK)
