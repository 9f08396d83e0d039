"""Shares fit the links: whoever is slow owns less, whoever is far too slow owns nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.collective.shares import STEPS, besides, of_all_reduce, rounded

rates = st.lists(st.integers(1, 10**10), min_size=3, max_size=12)


def moved(shares: tuple[int, ...], rank: int) -> float:
    """What a rank moves out, and in, in vectors."""
    return 1 + (len(shares) - 2) * shares[rank] / sum(shares)


def time(shares: tuple[int, ...], speeds: list[int]) -> float:
    """How long the slowest takes."""
    return max(moved(shares, rank) / speed for rank, speed in enumerate(speeds))


def test_a_link_of_a_fifth_owns_nothing() -> None:
    """Hosts at 1, 1, 1 and 0.2 Gbit/s; measurements that vary a little change little."""
    assert of_all_reduce([125_000_000, 125_000_000, 125_000_000, 25_000_000]) == (1, 1, 1, 0)
    shares = of_all_reduce([124_100_000, 125_300_000, 122_900_000, 24_700_000])
    assert shares[3] == 0
    assert max(shares) < 1.05 * sorted(shares)[1]


def test_equal_links_own_equal_shares() -> None:
    """Written as ones."""
    assert of_all_reduce([7] * 5) == (1,) * 5
    assert of_all_reduce([3]) == (1,)


def test_with_two_shares_do_not_matter() -> None:
    """Both move the whole vector in any case, so both do half of the work."""
    assert of_all_reduce([125, 1]) == (1, 1)


@given(rates)
def test_no_other_shares_are_faster(speeds: list[int]) -> None:
    """Compared with equal shares, and with any small change."""
    shares = of_all_reduce(speeds)
    best = time(shares, speeds)
    slack = 1 + 2 / STEPS  # what rounding may cost
    assert best <= slack * time((1,) * len(speeds), speeds)
    for richer in range(len(speeds)):
        for poorer in range(len(speeds)):
            if shares[poorer] and richer != poorer:
                other = list(shares)
                other[richer] += 1
                other[poorer] -= 1
                assert best <= slack * time(tuple(other), speeds)


@given(rates)
def test_shares_are_small_numbers(speeds: list[int]) -> None:
    """None is negative and not all are zero."""
    shares = of_all_reduce(speeds)
    assert 0 <= min(shares) <= max(shares) <= STEPS
    assert any(shares)


@pytest.mark.parametrize(
    ("weights", "small"), [([5, 5], (1, 1)), ([64, 1, 0], (64, 1, 0)), ([1000, 1], (1, 0))]
)
def test_proportions_are_rounded(weights: list[int], small: tuple[int, ...]) -> None:
    """To multiples of the largest; what is too small for one becomes nothing."""
    assert rounded(weights) == small


def test_a_root_owns_nothing_beside_others() -> None:
    """It moves every share anyway; with only one other it is the root that does the work."""
    assert besides(1, [100, 100, 50]) == (2, 0, 1)
    assert besides(1, [100, 100]) == (0, 1)
    assert besides(0, [9]) == (1,)
