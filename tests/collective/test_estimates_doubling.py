"""Estimates for doubling: hops for short vectors, bytes for long ones, and guests count."""

import pytest

from potluck.collective import registry
from potluck.collective.costs import Costs, Network
from potluck.collective.estimates_doubling import (
    doubling_all_gather,
    doubling_all_reduce,
    doubling_barrier,
)
from potluck.collective.pricing import price
from potluck.collective.task import Collective, Layout, Task
from potluck.vocabulary import LinkMatrix


def costs(size: int) -> Costs:
    """A home network."""
    return Costs(Network(LinkMatrix.uniform(size, rate=125_000_000, latency=100_000)))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8, 13])
@pytest.mark.parametrize("count", [1, 100_000, 1 << 22])
def test_an_all_reduce_is_near_its_schedule(size: int, count: int) -> None:
    """Also if some stand beyond the largest power of two: their hosts move one vector more."""
    task = Task.whole(Collective.ALL_REDUCE, size, count)
    estimate = doubling_all_reduce(task, Layout.plain(size), costs(size))
    walked = price(registry.schedule("doubling", task), costs(size))
    assert walked / 1.35 <= estimate <= walked * 1.35


@pytest.mark.parametrize("size", [2, 3, 7, 8, 9, 40])
def test_a_barrier_takes_a_hop_a_round(size: int) -> None:
    """⌈log₂ N⌉ of them."""
    task = Task.whole(Collective.BARRIER, size, 1)
    hop = costs(size).hop(0, 1, 0)
    assert doubling_barrier(task, Layout.plain(size), costs(size)) == (size - 1).bit_length() * hop


@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_a_gather_moves_everything_once(size: int) -> None:
    """The bytes of all others, and a hop for each round."""
    task = Task.blocks(Collective.ALL_GATHER, [1000] * size)
    model = costs(size)
    hops = (size - 1).bit_length() * model.hop(0, 1, 0)
    moved = model.flow(0, 1, 4000 * (size - 1))
    found = doubling_all_gather(task, Layout.plain(size), model)
    assert found == pytest.approx(hops + moved, rel=0.001)
