"""Estimates agree with walking the schedule, and are quick for a thousand ranks."""

import random

import pytest

from potluck.collective import registry
from potluck.collective.costs import Costs, Network
from potluck.collective.estimates import ESTIMATES
from potluck.collective.pricing import price
from potluck.collective.task import Collective, Layout, Task
from potluck.vocabulary import LinkMatrix

CASES = [pytest.param(*case, id=f"{case[0]}-{case[1].value}") for case in ESTIMATES]
SHARED = [Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST]


def links(size: int, seed: int) -> LinkMatrix:
    """Unequal links, as at home."""
    chance = random.Random(seed)
    rates = [25_000_000, 125_000_000, 125_000_000, 300_000_000]
    latency = [
        [0 if a == b else chance.randrange(50_000, 800_000) for b in range(size)]
        for a in range(size)
    ]
    return LinkMatrix(
        tuple(chance.choice(rates) for _ in range(size)),
        tuple(chance.choice(rates) for _ in range(size)),
        tuple(map(tuple, latency)),
    )


def work(collective: Collective, size: int, count: int) -> Task:
    """A task with even blocks."""
    if collective is Collective.ALL_TO_ALL:
        return Task.exchange([[count // size] * size] * size)
    if collective.has_blocks:
        return Task.blocks(collective, [count // size] * size)
    if collective is Collective.BARRIER:
        return Task.whole(collective, size, 1)
    return Task.whole(collective, size, count, root=size - 1)


def both(name: str, task: Task, costs: Costs, shares: tuple[int, ...]) -> tuple[int, int]:
    """The estimate, and the price of the schedule itself."""
    piece = 1 << 16 if name == "direct" else 1 << 40  # segments of a ring cost the same
    layout = Layout(tuple(range(task.world_size)), shares, piece=piece)
    estimate = ESTIMATES[name, task.collective](task, layout, costs)
    return estimate, price(registry.schedule(name, task, layout), costs)


@pytest.mark.parametrize(("name", "collective"), CASES)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_for_long_vectors_it_is_close(name: str, collective: Collective, size: int) -> None:
    """Within 5 %, links equal or not; within a factor of two where rounds overlap in part."""
    for costs in (
        Costs(Network(LinkMatrix.uniform(size, rate=125_000_000, latency=100_000))),
        Costs(Network(links(size, seed=size))),
    ):
        estimate, walked = both(name, work(collective, size, 8 << 20), costs, (1,) * size)
        rough = (name, collective) == ("doubling", Collective.ALL_GATHER)
        tolerance = 2 if rough else 1.2 if collective is Collective.BARRIER else 1.05
        assert walked / tolerance <= estimate <= walked * tolerance


@pytest.mark.parametrize(("name", "collective"), CASES)
@pytest.mark.parametrize("count", [40, 5000, 200_000])
def test_for_short_vectors_it_is_near(name: str, collective: Collective, count: int) -> None:
    """Within a factor of two: enough to tell hops from bytes."""
    for size in (2, 3, 5, 8):
        costs = Costs(Network(links(size, seed=size)))
        estimate, walked = both(name, work(collective, size, count), costs, (1,) * size)
        assert walked / 2 <= estimate <= walked * 2


@pytest.mark.parametrize("collective", SHARED)
def test_shares_are_counted(collective: Collective) -> None:
    """Also those of ranks that own nothing."""
    costs = Costs(Network(links(4, seed=9)))
    estimate, walked = both("direct", work(collective, 4, 8 << 20), costs, (2, 0, 1, 3))
    assert walked / 1.05 <= estimate <= walked * 1.05


@pytest.mark.parametrize(("name", "collective"), CASES)
def test_nothing_costs_nothing_or_a_few_hops(name: str, collective: Collective) -> None:
    """An empty vector has a price, and it is small."""
    costs = Costs(Network(LinkMatrix.uniform(4, rate=10**9, latency=1000)))
    estimate, _ = both(name, work(collective, 4, 0), costs, (1,) * 4)
    assert estimate < 1_000_000
