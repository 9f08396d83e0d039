"""Token buckets: a burst, then a rate."""

from __future__ import annotations

import pytest

from potluck.core.buckets import TokenBucket


def test_a_burst_and_then_a_rate() -> None:
    """However often it is asked, no more than burst + rate × time are given."""
    bucket = TokenBucket(rate=4.0, burst=3, now=100.0)
    given = sum(bucket.take(100.0 + step / 100) for step in range(1001))
    assert given == 3 + 40


def test_it_never_holds_more_than_a_burst() -> None:
    """A long rest does not add up."""
    bucket = TokenBucket(rate=4.0, burst=3, now=0.0)
    assert [bucket.take(1e6) for _ in range(4)] == [True, True, True, False]


def test_looking_takes_nothing_and_says_when() -> None:
    """The next token comes when the rate says so."""
    bucket = TokenBucket(rate=2.0, burst=1, now=0.0)
    assert bucket.has(0.0)
    assert bucket.when(0.0) == 0.0
    assert bucket.take(0.0)
    assert not bucket.has(0.0)
    assert bucket.when(0.0) == pytest.approx(0.5)
    assert bucket.has(0.5)


def test_a_clock_that_is_set_back_gives_and_takes_nothing() -> None:
    """From there it counts on."""
    bucket = TokenBucket(rate=1.0, burst=1, now=100.0)
    assert bucket.take(100.0)
    assert not bucket.take(50.0)
    assert bucket.take(51.0)


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_what_could_never_give_is_refused(rate: float, burst: int) -> None:
    """A bucket without a rate or without room is a mistake."""
    with pytest.raises(ValueError, match="token bucket"):
        TokenBucket(rate, burst, now=0.0)


def test_the_next_token_is_foretold_with_what_was_gained_meanwhile() -> None:
    """And it is never in the past, however many there are."""
    bucket = TokenBucket(rate=2.0, burst=3, now=0.0)
    assert bucket.when(0.0) == 0.0
    for _ in range(3):
        bucket.take(0.0)
    assert bucket.when(0.25) == pytest.approx(0.5)
    assert bucket.when(9.0) == 9.0
