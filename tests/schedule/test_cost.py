"""Costs: whole nanoseconds, and a guess for what nobody has measured."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from potluck._types import LinkMatrix
from potluck.schedule import planner
from potluck.schedule.algorithms.levels import AMONG, WITHIN
from potluck.schedule.cost import (
    DEFAULT_LATENCY,
    DEFAULT_RATE,
    ESTIMATES,
    NEAR,
    Costs,
    Host,
    Load,
    Network,
    completed,
    doubling_all_gather,
    doubling_all_reduce,
    doubling_barrier,
    price,
    timeline,
)
from potluck.schedule.schedule import Form
from potluck.schedule.task import AlgorithmSettings, Collective, Levels, Task

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


# --------------------------------------------------------------------------------------------------
# Estimates agree with walking the schedule, and are quick for a thousand ranks.

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
    layout = AlgorithmSettings(tuple(range(task.world_size)), shares, piece=piece)
    estimate = ESTIMATES[name, task.collective](task, layout, costs)
    return estimate, price(planner.schedule(name, task, layout), costs)


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


# --------------------------------------------------------------------------------------------------
# Estimates for doubling: hops for short vectors, bytes for long ones, and guests count.


def costs(size: int) -> Costs:
    """A home network."""
    return Costs(Network(LinkMatrix.uniform(size, rate=125_000_000, latency=100_000)))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8, 13])
@pytest.mark.parametrize("count", [1, 100_000, 1 << 22])
def test_an_all_reduce_is_near_its_schedule(size: int, count: int) -> None:
    """Also if some stand beyond the largest power of two: their hosts move one vector more."""
    task = Task.whole(Collective.ALL_REDUCE, size, count)
    estimate = doubling_all_reduce(task, AlgorithmSettings.plain(size), costs(size))
    walked = price(planner.schedule("doubling", task), costs(size))
    assert walked / 1.35 <= estimate <= walked * 1.35


@pytest.mark.parametrize("size", [2, 3, 7, 8, 9, 40])
def test_a_barrier_takes_a_hop_a_round(size: int) -> None:
    """⌈log₂ N⌉ of them."""
    task = Task.whole(Collective.BARRIER, size, 1)
    hop = costs(size).hop(0, 1, 0)
    assert (
        doubling_barrier(task, AlgorithmSettings.plain(size), costs(size))
        == (size - 1).bit_length() * hop
    )


@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_a_gather_moves_everything_once(size: int) -> None:
    """The bytes of all others, and a hop for each round."""
    task = Task.blocks(Collective.ALL_GATHER, [1000] * size)
    model = costs(size)
    hops = (size - 1).bit_length() * model.hop(0, 1, 0)
    moved = model.flow(0, 1, 4000 * (size - 1))
    found = doubling_all_gather(task, AlgorithmSettings.plain(size), model)
    assert found == pytest.approx(hops + moved, rel=0.001)


# --------------------------------------------------------------------------------------------------
# Loads: the busiest rank bounds the time of all.


def test_the_busiest_of_all_bounds_the_time() -> None:
    """Its way out, its way in, or its processor."""
    costs = Costs(Network(LinkMatrix((10**9, 1), (1, 10**9), ((0, 1), (1, 0)))))
    idle = ([0, 0], [0, 0], [0, 0], [0, 0])
    assert Load(*idle).bound(costs) == 0
    assert Load([0, 5], *idle[1:]).bound(costs) == 5_000_000_000
    assert Load(idle[0], [5, 0], *idle[2:]).bound(costs) == 5_000_000_000
    assert Load(*idle[:2], [3, 0], idle[3]).bound(costs) == 3 * costs.host.piece
    assert Load(*idle[:3], [0, 4_000_000]).bound(costs) == 1_000_000


# --------------------------------------------------------------------------------------------------
# Prices follow the physics: bytes over the slowest link, hops for short messages.

GIGABIT = 125_000_000
EVEN = LinkMatrix.uniform(4, rate=GIGABIT, latency=100_000)
SLOW = LinkMatrix(
    (GIGABIT, GIGABIT, GIGABIT, GIGABIT // 5),
    (GIGABIT, GIGABIT, GIGABIT, GIGABIT // 5),
    EVEN.latency,
)
SIXTEEN_MB = 4 << 20  # elements of four bytes


def seconds(name: str, links: LinkMatrix, count: int, **layout: object) -> float:
    """What an all-reduce costs."""
    plain = AlgorithmSettings.plain(links.size)
    knobs = AlgorithmSettings(plain.order, layout.get("shares", plain.shares))  # type: ignore[arg-type]
    task = Task.whole(Collective.ALL_REDUCE, links.size, count)
    return price(planner.schedule(name, task, knobs), Costs(Network(links))) / 1e9


@pytest.mark.parametrize("name", ["ring", "direct"])
def test_equal_links_are_used_to_the_full(name: str) -> None:
    """2(N−1)/N of the vector over each: 201 ms, and less than 2 % more."""
    bound = 1.5 * 4 * SIXTEEN_MB / GIGABIT
    assert bound <= seconds(name, EVEN, SIXTEEN_MB) <= 1.02 * bound


def test_one_slow_link_is_felt_less_with_fitting_shares() -> None:
    """What was measured on four hosts at 1, 1, 1 and 0.2 Gbit/s: 1.05 and 0.71 s; bound 0.67."""
    assert 1.0 <= seconds("ring", SLOW, SIXTEEN_MB) <= 1.05
    assert 0.67 <= seconds("direct", SLOW, SIXTEEN_MB, shares=(1, 1, 1, 0)) <= 0.71


def test_short_messages_cost_hops() -> None:
    """Two for doubling and the direct form, six round a ring of four."""
    hop = 0.000124
    assert seconds("doubling", EVEN, 1) == pytest.approx(2 * hop, rel=0.1)
    assert seconds("ring", EVEN, 1) == pytest.approx(6 * hop, rel=0.1)
    assert seconds("doubling", EVEN, 1) < seconds("direct", EVEN, 1) < seconds("ring", EVEN, 1)


def test_a_chain_is_as_fast_as_one_link() -> None:
    """Pieces follow each other: ten hops cost ten pieces more, not ten times the time."""
    links = LinkMatrix.uniform(10, rate=GIGABIT, latency=100_000)
    task = Task.whole(Collective.BROADCAST, 10, 16 << 20)
    chain = planner.schedule("ring", task)
    once = 4 * (16 << 20) / GIGABIT * 1e9
    assert once < price(chain, Costs(Network(links))) < 1.05 * once
    whole = Costs(Network(links), piece=1 << 30)
    assert price(chain, whole) > 8.9 * once


def test_wide_sums_cost_more_where_they_travel() -> None:
    """The ring sends partial sums; the direct form does not."""
    task = Task.whole(Collective.ALL_REDUCE, 4, SIXTEEN_MB)
    narrow = Costs(Network(EVEN), itemsize=2, wide=2)
    wide = Costs(Network(EVEN), itemsize=2, wide=4)
    ring, direct = (planner.schedule(name, task) for name in ("ring", "direct"))
    assert price(ring, wide) > 1.25 * price(ring, narrow)
    assert price(direct, wide) == price(direct, narrow)


def test_a_timeline_shows_every_transfer() -> None:
    """Each arrives after it left, and on one stream they keep their order."""
    task = Task.whole(Collective.ALL_REDUCE, 3, 600)
    costs = Costs(Network(LinkMatrix.uniform(3, rate=9, latency=5)))
    found = timeline(planner.schedule("ring", task), costs)
    assert len(found.transfers) == 12
    assert found.duration == max(transfer.arrives for transfer in found.transfers)
    assert {transfer.form for transfer in found.transfers} == {Form.DATA, Form.PARTIAL}
    for source in range(3):
        own = [transfer for transfer in found.transfers if transfer.source == source]
        assert all(transfer.leaves < transfer.arrives for transfer in own)
        assert all(a.leaves <= b.leaves for a, b in pairwise(own))


def test_a_step_waits_for_what_it_reads() -> None:
    """Of a span that another writes in part: before it, from its start, or in its middle."""
    links = LinkMatrix.uniform(5, rate=GIGABIT, latency=100_000)
    gather = Task.blocks(Collective.ALL_GATHER, [1 << 18] * 5)
    bound = 4 * 4 * (1 << 18) / GIGABIT * 1e9
    cost = price(planner.schedule("doubling", gather), Costs(Network(links)))
    assert bound < cost < 1.7 * bound


def test_alone_nothing_travels() -> None:
    """The price is that of a copy: nothing."""
    links = LinkMatrix.uniform(1, rate=GIGABIT, latency=0)
    for name, algorithm in planner.ALGORITHMS.items():
        if Collective.ALL_REDUCE in algorithm.offers:
            assert seconds(name, links, 1000) == 0


# --------------------------------------------------------------------------------------------------
# Several ranks on a machine share its cable.


def shared(*ranks: int) -> Network:
    """So many ranks on each machine, each behind 1 Gbit/s."""
    machines = tuple(sum(ranks[:place]) for place, count in enumerate(ranks) for _ in range(count))
    size = len(machines)
    links = LinkMatrix.uniform(size, rate=125_000_000, latency=50_000)
    return Network(replace(links, machines=machines))


def settings(network: Network, name: str) -> AlgorithmSettings:
    """Ranks in their own order; two levels with a ring among machines."""
    plain = AlgorithmSettings.plain(network.size, piece=1 << 40)
    if name == "levels":
        return replace(plain, levels=Levels(network.machines, "direct", "ring"))
    return replace(plain, piece=1 << 16) if name == "direct" else plain


FLOWS = {
    ("ring", (3, 3)): 5 / 3,
    ("ring", (4, 2, 1)): 12 / 7,
    ("direct", (3, 3)): 3.0,
    ("levels", (3, 3)): 1.0,
    ("levels", (4, 2, 1)): 4 / 3,
    ("levels", (2, 2, 2)): 4 / 3,
}


@pytest.mark.parametrize(("name", "ranks"), FLOWS)
def test_a_large_all_reduce_takes_what_its_busiest_cable_carries(
    name: str, ranks: tuple[int, ...]
) -> None:
    """Estimated, and walked: six ranks in a ring 1.67 times the vector, by machines once."""
    network = shared(*ranks)
    costs = Costs(network, piece=1 << 18)
    task = Task.whole(Collective.ALL_REDUCE, network.size, 16 << 20)
    least = FLOWS[name, ranks] * costs.up(0, 64 << 20)
    layout = settings(network, name)
    assert ESTIMATES[name, task.collective](task, layout, costs) == pytest.approx(least, rel=0.05)
    walked = price(planner.schedule(name, task, layout), costs)
    assert walked == pytest.approx(least, rel=0.08)


@pytest.mark.parametrize("ranks", [(3, 3), (4, 2, 1), (2, 2, 2, 2), (5, 1)])
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("among", list(AMONG))
@pytest.mark.parametrize("count", [1, 5_000, 1 << 20])
def test_the_estimate_of_two_levels_is_near_the_walk(
    ranks: tuple[int, ...], within: str, among: str, count: int
) -> None:
    """Whichever two: within a factor of 2.5, so that none is taken for what it is not."""
    network = shared(*ranks)
    costs = Costs(network, piece=1 << 17)
    task = Task.whole(Collective.ALL_REDUCE, network.size, count)
    layout = AlgorithmSettings.plain(network.size, piece=1 << 15)
    layout = replace(layout, levels=Levels(network.machines, within, among))
    estimate = ESTIMATES["levels", task.collective](task, layout, costs)
    walked = price(planner.schedule("levels", task, layout), costs)
    assert 0.5 < estimate / walked < 2.5


def test_a_machine_is_as_fast_as_the_best_that_its_ranks_have_seen() -> None:
    """They measured at once, so each may have seen a part; what is near crosses no cable."""
    links = LinkMatrix((10, 40, 25), (30, 20, 25), ((0, 1, 9), (1, 0, 9), (9, 9, 0)), (0, 0, 2))
    network = Network(links)
    assert (network.up, network.down) == ((40, 40, 25), (30, 30, 25))
    assert network.near.tolist() == [[False, True, False], [True, False, False], [False] * 3]
    assert network.among_machines.latency == ((0, 9), (9, 0))
    costs = Costs(network)
    assert costs.flow(0, 1, NEAR) == 10**9
    assert costs.flow(0, 2, 50) == costs.flow(1, 2, 50) == 2 * 10**9


@pytest.mark.parametrize("machines", [(0, 0, 0), (0, 1, 2)])
def test_one_machine_or_lone_ranks_cost_what_they_did(machines: tuple[int, ...]) -> None:
    """Each has its own way out: there is no cable to share."""
    links = LinkMatrix((10, 40, 25), (30, 20, 25), ((0, 1, 9), (1, 0, 9), (9, 9, 0)))
    known, told = Network(links), Network(replace(links, machines=machines))
    assert (known.up, known.down) == (told.up, told.down)
    assert not told.is_two_level
    assert not told.near.any()


def test_a_plan_for_machines_that_are_no_more_is_walked() -> None:
    """Its price is that of what it would do among the ranks as they are."""
    network = shared(2, 2)
    task = Task.whole(Collective.ALL_REDUCE, 4, 1 << 16)
    layout = settings(network, "levels")
    moved = Network(LinkMatrix.uniform(4, rate=125_000_000, latency=50_000))
    costs = Costs(moved)
    walked = price(planner.schedule("levels", task, layout), costs)
    assert ESTIMATES["levels", task.collective](task, layout, costs) == walked
