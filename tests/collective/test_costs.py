"""Costs: whole nanoseconds, and a guess for what nobody has measured."""

import pytest

from potluck.collective.costs import (
    DEFAULT_LATENCY,
    DEFAULT_RATE,
    Costs,
    Host,
    Network,
    completed,
)
from potluck.vocabulary import LinkMatrix

LINKS = LinkMatrix((1000, 500), (250, 2000), ((0, 7), (9, 0)))
COSTS = Costs(Network(LINKS), piece=100, host=Host(piece=3, reduce_rate=1_000_000_000))


def test_bytes_take_time_on_the_slower_end() -> None:
    """Out of one rank and into the other; latency and handling come on top."""
    assert COSTS.up(0, 100) == 100_000_000
    assert COSTS.down(0, 100) == 400_000_000
    assert COSTS.flow(0, 1, 100) == 100_000_000  # out at 1000, in at 2000
    assert COSTS.flow(1, 0, 100) == 400_000_000  # out at 500, in at 250
    assert COSTS.hop(0, 1, 10) == 7 + 10_000_000 + 6
    assert COSTS.adding(5) == 5


def test_only_the_first_piece_counts_for_a_hop() -> None:
    """The rest follows while the first is on its way further."""
    assert COSTS.hop(1, 0, 100) == COSTS.hop(1, 0, 100_000) == 9 + 400_000_000 + 6
    assert [COSTS.pieces(size) for size in (0, 1, 100, 101)] == [0, 1, 1, 2]


@pytest.mark.parametrize("size", [0, 1, 50, 1000])
def test_all_hops_at_once_are_the_same_as_one_by_one(size: int) -> None:
    """And nobody is far from itself."""
    table = COSTS.hops(size)
    assert table.tolist() == [[0, COSTS.hop(0, 1, size)], [COSTS.hop(1, 0, size), 0]]


def test_known_links_are_left_alone() -> None:
    """There is nothing to guess."""
    assert completed(LINKS) is LINKS
    assert Network(LINKS).rates == [250, 500]


def test_what_is_unknown_is_like_the_usual() -> None:
    """Rates like those of others in that direction, latencies like those of the way back."""
    links = LinkMatrix((8, 0, 4), (0, 0, 0), ((0, 5, 0), (0, 0, 0), (6, 0, 0)))
    known = completed(links)
    assert known.up == (8, 8, 4)
    assert known.down == (8, 8, 8)
    assert known.latency == ((0, 5, 6), (5, 0, 6), (6, 6, 0))


def test_where_nothing_is_known_a_home_network_is_assumed() -> None:
    """Ethernet with 1 Gbit/s."""
    known = completed(LinkMatrix.uniform(2, rate=0, latency=0))
    assert known == LinkMatrix.uniform(2, rate=DEFAULT_RATE, latency=DEFAULT_LATENCY)
