"""random-k: the same places on all ranks, and right on average."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import MalformedFrame
from potluck.collective.compression import randomk
from potluck.collective.compression.base import Turn
from potluck.collective.compression.randomk import RandomK
from support.gradients import normal


@given(total=st.integers(1, 5000), part=st.floats(0.001, 1.0), seed=st.integers(0, 2**64 - 1))
def test_places_ascend_and_lie_within(total: int, part: float, seed: int) -> None:
    """One in each stretch."""
    count = max(1, int(total * part))
    places = randomk.draw(total, count, seed)
    assert places.size == count
    assert (np.diff(places) > 0).all()
    assert 0 <= places[0] <= places[-1] < total
    assert randomk.lengths(total, count).sum() == total


def test_a_seed_means_the_same_places_for_ever() -> None:
    """These are on the wire between machines with different versions of everything."""
    assert randomk.draw(1000, 4, seed=7).tolist() == randomk.draw(1000, 4, seed=7).tolist()
    assert randomk.seed_for(1, 2, "w") == randomk.seed_for(1, 2, "w") != randomk.seed_for(1, 3, "w")


def test_without_feedback_it_is_right_on_average() -> None:
    """The mean over many seeds is the gradient."""
    values = normal(64) + 2
    method = RandomK(0.25)
    total = np.zeros(64)
    for seed in range(3000):
        total += method.decode(method.encode(values, Turn((64,), seed)), 64)
    np.testing.assert_allclose(total / 3000, values, rtol=0.25)
    assert abs(total.sum() / 3000 / values.sum() - 1) < 0.01


def test_with_feedback_it_is_not_scaled() -> None:
    """What was drawn is the value itself: the rest comes later."""
    values = normal(64)
    method = RandomK(0.25)
    found = method.decode(method.encode(values, Turn((64,), 1, has_feedback=True)), 64)
    assert set(found[found != 0].tolist()) <= set(values.tolist())
    assert np.count_nonzero(found) == 16


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("has_feedback", [False, True])
def test_what_is_no_number_is_not_hidden(bad: float, *, has_feedback: bool) -> None:
    """Even where nothing is drawn: the step is spoiled, and shows it."""
    for place in range(64):
        values = normal(64)
        values[place] = bad
        method = RandomK(0.1)
        found = method.decode(method.encode(values, Turn((64,), 1, has_feedback)), 64)
        assert np.isnan(found).any()


def test_large_numbers_are_numbers() -> None:
    """Their sum may overflow, they do not."""
    values = np.full(64, 3e38, np.float32)
    with np.errstate(over="ignore"):
        drawn = RandomK(0.5).drawn(values, Turn((64,), 1, has_feedback=True))
    assert (drawn == values[:32]).all()


@given(st.binary(max_size=90), st.integers(0, 50))
def test_any_bytes_are_unpacked_or_refused(data: bytes, total: int) -> None:
    """Fuzzing."""
    with contextlib.suppress(MalformedFrame):
        assert randomk.unpack(np.frombuffer(data, np.uint8), total).dense().size == total


def test_more_values_than_places_are_refused() -> None:
    """Before they are drawn."""
    with pytest.raises(MalformedFrame, match="5 of 4 values"):
        randomk.unpack(randomk.pack(normal(5), seed=1), 4)
