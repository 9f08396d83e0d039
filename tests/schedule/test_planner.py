"""The order round a ring: optimal for few ranks, near it for many, the same everywhere."""

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._types import LinkMatrix
from potluck.errors import UnsupportedOperation
from potluck.net.unix_socket import SLOT_SIZE
from potluck.schedule import planner as schedule_planner
from potluck.schedule import verify
from potluck.schedule.algorithms import central
from potluck.schedule.cost import ESTIMATES, Costs, Host, Network, price
from potluck.schedule.planner import (
    EXACT,
    GAIN,
    PATIENCE,
    STEPS,
    Plan,
    Planner,
    besides,
    exact,
    improved,
    keeps,
    length,
    nearest,
    of_all_reduce,
    piece_for,
    rounded,
    shortest,
)
from potluck.schedule.schedule import Algorithm
from potluck.schedule.task import (
    AlgorithmSettings,
    AllReduceStrategy,
    Collective,
    ReduceStrategy,
    Strategy,
    Task,
)
from potluck.schedule.verify import VerifyLimits
from support.collectives import OFFERS, ROOTED, check, dice, layouts, task


def table(size: int, seed: int, *, symmetric: bool = True) -> npt.NDArray[np.int64]:
    """Distances between points of a plane; or there and back may differ."""
    chance = np.random.default_rng(seed)
    points = chance.random((size, 2))
    apart = np.sqrt(((points[:, None] - points[None]) ** 2).sum(axis=2)) * 1e6
    extra = 0 if symmetric else chance.random((size, size)) * 3e5
    found: npt.NDArray[np.int64] = (apart + extra).astype(np.int64)
    np.fill_diagonal(found, 0)
    return found


def sites(size: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Ranks at several sites, shuffled: near within one, far between two."""
    home = [rank % count for rank in range(size)]
    random.Random(seed).shuffle(home)
    where = np.array(home)
    found = np.where(where[:, None] == where, 100, 10_000)
    np.fill_diagonal(found, 0)
    return found


@given(st.integers(1, 6), st.integers(0, 10**6), st.booleans())
def test_few_ranks_are_ordered_beyond_doubt(size: int, seed: int, symmetric: bool) -> None:
    """As good as the best of all permutations."""
    distances = table(size, seed, symmetric=symmetric).tolist()
    best = min(length((0, *rest), distances) for rest in itertools.permutations(range(1, size)))
    found = exact(distances)
    assert sorted(found) == list(range(size))
    assert length(found, distances) == best


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("symmetric", [True, False])
def test_improving_comes_close_to_the_best(seed: int, symmetric: bool) -> None:
    """Within a tenth, for as many ranks as can be checked."""
    found = table(EXACT, seed, symmetric=symmetric)
    distances = found.tolist()
    better = improved(nearest(found), distances)
    best = length(exact(distances), distances)
    assert best <= length(better, distances) <= 1.1 * best
    assert better[0] == 0


@pytest.mark.parametrize("size", [4, 12, 30, 64])
def test_each_site_is_visited_once(size: int) -> None:
    """Whoever is near stands together: only as many long hops as there are sites."""
    found = sites(size, count=4 if size > 4 else 2, seed=size)
    tour = shortest(found)
    assert sorted(tour) == list(range(size))
    apart = 4 if size > 4 else 2
    assert length(tour, found.tolist()) == apart * 10_000 + (size - apart) * 100


def test_many_ranks_are_better_off_than_by_number() -> None:
    """64 points of a plane: the tour is less than a third of that in the order of ranks."""
    found = table(64, seed=5)
    distances = found.tolist()
    assert length(shortest(found), distances) < length(tuple(range(64)), distances) / 3
    assert length(shortest(found), distances) <= length(nearest(found), distances)


def test_64_ranks_come_close_to_an_optimum_that_is_known() -> None:
    """Points of a circle in their order; those of a chessboard within a twentieth."""
    chance = np.random.default_rng(3)
    angles = chance.permutation(64) * (2 * np.pi / 64)
    squares = np.array(list(itertools.product(range(8), repeat=2)), float)
    layouts = {
        64 * 2 * np.sin(np.pi / 64): np.stack([np.cos(angles), np.sin(angles)], axis=1),
        64.0: chance.permutation(squares),  # every step goes to the next square
    }
    for optimum, points in layouts.items():
        apart = np.sqrt(((points[:, None] - points[None]) ** 2).sum(axis=2)) * 1e6
        found = apart.astype(np.int64)
        assert length(shortest(found), found.tolist()) <= 1.05 * optimum * 1e6


def test_a_thousand_ranks_are_ordered_too() -> None:
    """From neighbour to neighbour."""
    found = sites(1000, count=10, seed=1)
    tour = shortest(found)
    assert sorted(tour) == list(range(1000))
    assert length(tour, found.tolist()) == 10 * 10_000 + 990 * 100


@pytest.mark.parametrize("size", [1, 2, 3, 12, 13, 64, 65])
def test_without_a_reason_ranks_keep_their_order(size: int) -> None:
    """All distances are equal."""
    even = np.full((size, size), 5) - 5 * np.eye(size, dtype=np.int64)
    assert shortest(even) == tuple(range(size))


# --------------------------------------------------------------------------------------------------
# The planner takes the cheapest way, says why, and does not change its mind too often.

GIGABIT = 125_000_000


def even(size: int, rate: int = GIGABIT, latency: int = 100_000) -> LinkMatrix:
    """Equal links."""
    return LinkMatrix.uniform(size, rate=rate, latency=latency)


def uneven(*rates: int) -> LinkMatrix:
    """Links of these rates, in Mbit/s."""
    speeds = tuple(rate * 125_000 for rate in rates)
    return LinkMatrix(speeds, speeds, even(len(rates)).latency)


def all_reduce(links: LinkMatrix, nbytes: int) -> Plan:
    """The plan for a sum of so many bytes."""
    return Planner(links).plan(Task.whole(Collective.ALL_REDUCE, links.size, nbytes // 4))


@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_short_vectors_take_few_hops(size: int) -> None:
    """Latency counts: recursive doubling."""
    assert all_reduce(even(size), 64).algorithm == "doubling"


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_long_vectors_among_few_go_straight(size: int) -> None:
    """Where the machines are the limit; at the same price a ring fills a cable more evenly."""
    for rate, algorithm in ((8 * GIGABIT, "direct"), (GIGABIT, "ring")):
        plan = all_reduce(even(size, rate=rate), 64 << 20)
        assert plan.algorithm == algorithm
        assert plan.shares == (1,) * size
        bound = 1e9 * 2 * (size - 1) / size * (64 << 20) / rate
        assert plan.price < bound * (1.04 if algorithm == "ring" else 1.6)


def test_long_vectors_among_many_go_round() -> None:
    """With as many bytes and far fewer connections."""
    assert all_reduce(even(64), 256 << 20).algorithm == "ring"


def test_a_slow_link_gets_no_share() -> None:
    """Hosts at 1, 1, 1 and 0.2 Gbit/s: the plan is near the limit, and says what it is about."""
    plan = all_reduce(uneven(1000, 1000, 1000, 200), 16 << 20)
    assert (plan.algorithm, plan.shares) == ("direct", (1, 1, 1, 0))
    assert plan.price < 1.05 * (16 << 20) / 25_000_000 * 1e9
    assert "shares 1:1:1:0" in plan.reason
    assert "rank 3 has the slowest link, 25 MB/s of at most 125 MB/s" in plan.reason
    assert re.search(r"takes about 67\d ms.*would take", plan.reason)


def test_a_ring_avoids_the_long_way() -> None:
    """Ranks at two sites, by turns: the ring goes from one site to the other once."""
    far = tuple(
        tuple(0 if a == b else 50_000 if a % 2 == b % 2 else 9_000_000 for b in range(6))
        for a in range(6)
    )
    links = LinkMatrix((GIGABIT,) * 6, (GIGABIT,) * 6, far)
    order = Planner(links).ring
    crossings = sum(order[place] % 2 != order[place - 1] % 2 for place in range(6))
    assert crossings == 2


def test_the_centre_is_where_nobody_is_far() -> None:
    """Or whose link is best, if bytes count more."""
    latency = tuple(
        tuple(0 if a == b else 10_000 if 1 in {a, b} else 900_000 for b in range(5))
        for a in range(5)
    )
    links = LinkMatrix((GIGABIT,) * 5, (GIGABIT,) * 5, latency)
    assert Planner(links).by_latency[0] == 1
    plan = Planner(links).plan(Task.whole(Collective.BARRIER, 5, 1))
    assert (plan.algorithm, plan.order[0]) == ("central", 1)
    assert Planner(uneven(10, 20, 1000, 20)).by_rate == (2, 1, 3, 0)


@pytest.mark.parametrize("collective", Collective)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_every_plan_can_be_carried_out(collective: Collective, size: int) -> None:
    """Whatever is asked, on whatever links, the schedule of the plan is right."""
    chance = random.Random(size)
    rates = tuple(chance.choice([10, 100, 1000]) for _ in range(size))
    planner = Planner(uneven(*rates))
    for count in (0, 1, 70):
        work = task(collective, size, count, root=size - 1)
        plan = planner.plan(work)
        assert plan.collective is collective
        check(schedule_planner.schedule(plan.algorithm, work, plan.layout(4)))


def matrices(size: int) -> st.SearchStrategy[LinkMatrix]:
    """Whatever the ranks may have measured."""
    rates = st.tuples(*[st.integers(0, (1 << 56) - 1)] * size)
    row = st.tuples(*[st.integers(0, (1 << 32) - 1)] * size)
    return st.builds(LinkMatrix, rates, rates, st.tuples(*[row] * size))


@given(st.integers(2, 6).flatmap(matrices), st.integers(0, 1 << 30))
def test_equal_links_give_equal_plans(links: LinkMatrix, count: int) -> None:
    """Whatever was measured; nothing depends on anything else."""
    work = Task.whole(Collective.ALL_REDUCE, links.size, count)
    first, second = (Planner(links).plan(work) for _ in range(2))
    assert first == second
    assert first.identity == second.identity
    assert isinstance(first.price, int)


def test_a_plan_is_told_from_one_that_would_not_fit() -> None:
    """By its identity; the price and the reason do not matter."""
    planner = Planner(uneven(1000, 1000, 1000, 200))
    work = Task.whole(Collective.ALL_REDUCE, 4, 4 << 20)
    plan = planner.plan(work)
    other = planner.plan(work, strategy=AllReduceStrategy.RING)
    same = Planner(uneven(1000, 1000, 1000, 190)).plan(work)
    assert plan.identity == same.identity
    assert plan.price != same.price
    assert plan.identity != other.identity
    assert plan.identity == 567504666  # the same on every machine and in every process


@pytest.mark.parametrize(
    ("strategy", "algorithm", "arity"),
    [
        (AllReduceStrategy.AUTO, "ring", 2),
        (AllReduceStrategy.DIRECT, "direct", 2),
        (AllReduceStrategy.RING, "ring", 2),
        (AllReduceStrategy.CENTRALIZED, "central", 2),
        (AllReduceStrategy.DOUBLING, "doubling", 2),
        (AllReduceStrategy.tree(arity=3), "tree", 3),
        (AllReduceStrategy.TREE, "tree", 2),
    ],
)
def test_a_strategy_is_followed(strategy: AllReduceStrategy, algorithm: str, arity: int) -> None:
    """The planner still chooses what the strategy leaves open."""
    work = Task.whole(Collective.ALL_REDUCE, 4, 1 << 20)
    plan = Planner(even(4)).plan(work, strategy=strategy)
    assert (plan.algorithm, plan.arity) == (algorithm, arity)
    if not strategy.is_auto:
        assert plan.reason.endswith("there is no other way")


def test_a_strategy_that_does_not_exist_is_refused() -> None:
    """Nobody reduces to one rank by doubling."""
    with pytest.raises(UnsupportedOperation, match="offers no reduce"):
        Planner(even(2)).plan(
            Task.whole(Collective.REDUCE, 2, 1), strategy=ReduceStrategy("doubling")
        )


def test_wide_sums_avoid_the_ring() -> None:
    """It would send them in 32 bits; the direct form adds them where they end."""
    planner = Planner(even(64))
    work = Task.whole(Collective.ALL_REDUCE, 64, 64 << 20)
    assert planner.plan(work, itemsize=2).algorithm == "ring"
    assert planner.plan(work, itemsize=2, wide=4).algorithm == "direct"


def test_a_new_algorithm_takes_part_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is priced by its schedule; nothing else has to know of it."""
    offers = {Collective.ALL_REDUCE: central.all_reduce}
    monkeypatch.setitem(schedule_planner.ALGORITHMS, "new", Algorithm("new", "a new idea", offers))
    work = Task.whole(Collective.ALL_REDUCE, 4, 1 << 20)
    assert Planner(even(4)).plan(work).algorithm == "ring"
    chosen = Planner(even(4)).plan(work, strategy=AllReduceStrategy("new"))
    assert chosen.algorithm == "new"
    assert chosen.reason.startswith("new (a new idea) for 4.19 MB takes about 10")


def test_links_of_another_group_are_refused() -> None:
    """They say nothing about this one."""
    with pytest.raises(ValueError, match="among 3 ranks, but a task for 4"):
        Planner(even(3)).plan(Task.whole(Collective.BARRIER, 4, 1))


def test_an_old_plan_has_a_price_on_new_links() -> None:
    """So that it can be compared with the best."""
    work = Task.whole(Collective.ALL_REDUCE, 4, 4 << 20)
    old = Planner(even(4)).plan(work)
    now = Planner(uneven(1000, 1000, 1000, 200))
    assert Planner(even(4)).reprice(old, work) == old.price
    assert now.reprice(old, work) > 1.4 * now.plan(work).price
    assert not keeps(now.reprice(old, work), now.plan(work).price, operations=PATIENCE)


def test_a_slower_processor_is_a_cost() -> None:
    """The numbers of the machines can be changed; they must be the same on all ranks."""
    work = Task.whole(Collective.ALL_REDUCE, 4, 1)
    slow = Planner(even(4), Host(piece=1_000_000)).plan(work)
    assert slow.price > 5 * Planner(even(4)).plan(work).price


@given(st.integers(1, 10**12), st.integers(1, 10**12), st.integers(0, 10**4))
def test_a_plan_changes_only_for_a_gain(current: int, best: int, operations: int) -> None:
    """Of a fifth or more, and not before it has served for a while."""
    gain = (current - best) / current
    if operations < PATIENCE or gain < GAIN / 100 - 1e-9:
        assert keeps(current, best, operations)
    elif gain > GAIN / 100 + 1e-9:
        assert not keeps(current, best, operations)


@pytest.mark.parametrize(
    ("nbytes", "links", "piece"),
    [
        (1 << 24, even(4), 1 << 16),  # half a millisecond at 1 Gbit/s
        (1 << 26, even(4), 1 << 18),  # one of many
        (1 << 28, even(4, rate=5_000_000_000), 1 << 19),  # the largest there is
        (1 << 22, even(4, rate=1_000_000), 1 << 16),  # the smallest there is
        (1 << 20, even(2), 1 << 16),  # eight for each half
        (1 << 30, even(64), 1 << 16),  # 63 of them fit into the staging
        (1 << 20, even(4, rate=1_000_000_000), 1 << 19),  # or it would be over too soon
        (4, even(2), 1 << 16),
        (0, even(1), 1 << 16),
    ],
)
def test_pieces_fit_vector_links_and_memory(nbytes: int, links: LinkMatrix, piece: int) -> None:
    """Long enough to be worth the work, short enough to overlap."""
    assert piece_for(nbytes, Network(links)) == piece


@pytest.mark.parametrize(
    ("nbytes", "size", "piece"),
    [
        (25 << 20, 4, 1 << 20),
        (1 << 30, 2, 1 << 20),  # the largest there is
        (1 << 30, 9, 1 << 19),  # 8 of them fit into the staging
    ],
)
def test_pieces_in_shared_memory_are_longer(nbytes: int, size: int, piece: int) -> None:
    """Python's work on them is what takes time there; over sockets they would need more memory."""
    near = replace(even(size, rate=1_000_000_000), machines=(0,) * size)
    assert piece_for(nbytes, Network(replace(near, in_memory=True))) == piece
    assert piece_for(nbytes, Network(near)) <= 1 << 19
    assert piece <= SLOT_SIZE


def test_a_plan_says_what_would_be_dearer() -> None:
    """In one sentence, for the log and for people."""
    plan = all_reduce(even(4), 16 << 20)
    assert plan.reason == (
        "ring (each rank hears its left neighbour and tells its right one) for 16.8 MB takes "
        "about 201 ms; direct would take 201 ms"
    )


@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.BROADCAST])
def test_a_thousand_nodes_can_be_planned(collective: Collective) -> None:
    """Long and short vectors, on unequal links."""
    chance = random.Random(4)
    rates = tuple(chance.choice([100, 1000, 1000]) for _ in range(1000))
    planner = Planner(uneven(*rates))
    short = planner.plan(Task.whole(collective, 1000, 4))
    long = planner.plan(Task.whole(collective, 1000, 64 << 20))
    assert short.price < 100_000_000 < long.price
    assert len(long.reason) < 300


# --------------------------------------------------------------------------------------------------
# Every collective that an algorithm offers is right, for every number of ranks up to 64.

TO_THE_LAST_ROOT = (*range(1, 10), 16, 17, 33, 64)


def lengths(size: int) -> int:
    """Nothing, one element, fewer than ranks, an odd number, several for each: in turn."""
    return (0, 1, size - 1, 2 * size + 1, 5 * size - 3)[size % 5]


def roots_of(name: str, size: int) -> Sequence[int]:
    """Every rank; in large worlds only some, where a schedule has as many steps as pairs."""
    return range(size) if name != "direct" or size < 10 else (0, size // 2, size - 1)


@pytest.mark.parametrize(("name", "collective"), OFFERS, ids=str)
def test_it_is_right_for_every_world_size(name: str, collective: Collective) -> None:
    """From 1 to 64 ranks, also for empty vectors and for those shorter than the world."""
    for size in range(1, 65):
        work = task(collective, size, lengths(size), root=size // 3)
        check(schedule_planner.schedule(name, work, AlgorithmSettings.plain(size, piece=7)))


@pytest.mark.parametrize(("name", "collective"), ROOTED, ids=str)
def test_it_is_right_for_every_root(name: str, collective: Collective) -> None:
    """Whoever the root is, in small worlds, in large ones, and around powers of two."""
    for size in TO_THE_LAST_ROOT:
        for root in roots_of(name, size):
            check(schedule_planner.schedule(name, task(collective, size, size + 1, root)))


@pytest.mark.parametrize(("name", "collective"), OFFERS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 11])
def test_it_is_proved_right_with_the_least_room(
    name: str, collective: Collective, size: int
) -> None:
    """Streams of one element and the prescribed staging suffice; in place as well as beside."""
    work = task(collective, size, 2 * size + 1, root=size - 1)
    layout = AlgorithmSettings.plain(size, piece=2, arity=3)
    verify.prove(schedule_planner.schedule(name, work, layout), limits=VerifyLimits(piece=2))


@given(st.data())
@settings(max_examples=150)
def test_it_is_right_however_things_interleave(data: st.DataObject) -> None:
    """Any layout, any sizes of pieces and streams, any order of events."""
    name, collective = data.draw(st.sampled_from(OFFERS))
    size = data.draw(st.integers(1, 9))
    root = data.draw(st.integers(0, size - 1))
    layout = data.draw(layouts(size))
    work = task(collective, size, data.draw(st.integers(0, 40)), root)
    longer = data.draw(st.integers(0, 5))
    limits = VerifyLimits(layout.piece + longer, capacity=data.draw(st.integers(1, 12)))
    seed = data.draw(st.integers(0, 2**32))
    schedule = schedule_planner.schedule(name, work, layout)
    verify.prove(schedule, limits=limits, dice=dice(seed))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "collective"), OFFERS, ids=str)
def test_it_is_proved_right_for_every_world_size_and_root(
    name: str, collective: Collective
) -> None:
    """The proof with the least room, for all worlds up to 64 and all roots."""
    for size in range(1, 65):
        for root in roots_of(name, size) if collective.has_root else (0,):
            work = task(collective, size, size + 3, root)
            layout = AlgorithmSettings.plain(size, piece=1)
            verify.prove(
                schedule_planner.schedule(name, work, layout), limits=VerifyLimits(piece=1)
            )


def test_every_collective_is_offered_by_somebody() -> None:
    """There is nothing that can be asked for and not be done."""
    assert {collective for _, collective in OFFERS} == set(Collective)
    for collective in Collective:
        assert schedule_planner.offering(collective)


def test_an_unknown_algorithm_is_refused() -> None:
    """The error lists those that exist."""
    with pytest.raises(UnsupportedOperation, match=r"'star'.*direct, doubling, ring, levels, tree"):
        schedule_planner.find("star")


# --------------------------------------------------------------------------------------------------
# Shares fit the links: whoever is slow owns less, whoever is far too slow owns nothing.

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


# --------------------------------------------------------------------------------------------------
# Several ranks on a machine: what is compared, and what is chosen.


def on_machines(*ranks: int, rate: int = 125_000_000) -> LinkMatrix:
    """So many ranks on each machine, on equal cables; ways within a machine are short."""
    machines = tuple(sum(ranks[:place]) for place, count in enumerate(ranks) for _ in range(count))
    size = len(machines)
    latency = tuple(
        tuple(
            0 if a == b else 15_000 if machines[a] == machines[b] else 80_000 for b in range(size)
        )
        for a in range(size)
    )
    return LinkMatrix((rate,) * size, (rate,) * size, latency, machines)


@pytest.mark.parametrize(
    ("ranks", "gain"), [((3, 3), 1.6), ((4, 2, 1), 1.25), ((4, 4, 4, 4), 1.2), ((8, 8), 1.8)]
)
@pytest.mark.parametrize("nbytes", [1 << 22, 1 << 24, 1 << 26])
def test_on_usual_cables_a_large_all_reduce_is_cheaper_by_machines(
    ranks: tuple[int, ...], gain: float, nbytes: int
) -> None:
    """By about what crosses the cable less; between two machines a chain in order does as well."""
    planner = Planner(on_machines(*ranks))
    plan = all_reduce(on_machines(*ranks), nbytes)
    prices = dict(plan.compared)
    assert prices["ring"] > gain * plan.price
    assert str(plan.strategy) == "tree:1" or plan.algorithm == "levels"
    assert len(ranks) == 2 or plan.algorithm == "levels"
    assert min(prices.values()) * 103 >= plan.price * 100
    assert planner.reprice(plan, Task.whole(Collective.ALL_REDUCE, sum(ranks), nbytes // 4)) == (
        plan.price
    )


@pytest.mark.parametrize("nbytes", [4, 1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26])
@pytest.mark.parametrize("ranks", [(3, 3), (4, 2, 1), (1, 5), (2, 1, 2, 1)])
@pytest.mark.parametrize("rate", [12_500_000, 125_000_000, 1_000_000_000])
def test_no_flat_plan_is_cheaper_than_the_plan(
    nbytes: int, ranks: tuple[int, ...], rate: int
) -> None:
    """Of any size, on any cable; and both were compared with it."""
    for collective in (Collective.ALL_REDUCE, Collective.REDUCE, Collective.BROADCAST):
        task = Task.whole(collective, sum(ranks), nbytes // 4, 0)
        plan = Planner(on_machines(*ranks, rate=rate)).plan(task)
        flat = [price for name, price in plan.compared if "/" not in name]
        assert any("/" in name for name, _ in plan.compared)
        assert plan.price <= 1.03 * min(flat)


def test_a_flat_ring_leaves_each_machine_once() -> None:
    """Whatever the numbers of ranks, and wherever they were put."""
    places = (0, 1, 2, 0, 1, 0, 2)
    machines = tuple(places.index(place) for place in places)
    links = replace(even(7), machines=machines)
    ring = Planner(links).ring
    leaves = sum(machines[a] != machines[b] for a, b in itertools.pairwise((*ring, ring[0])))
    assert leaves == 3
    chain = Planner(links).plan(
        Task.whole(Collective.BROADCAST, 7, 1 << 22), strategy=Strategy("tree", 1)
    )
    leaves = sum(machines[a] != machines[b] for a, b in itertools.pairwise(chain.order))
    assert leaves == 2


def test_one_machine_and_lone_ranks_have_one_level() -> None:
    """There is nothing to divide; a wish for two levels means the one there is."""
    wish = Strategy("tree", 2, Strategy("ring"))
    task = Task.whole(Collective.ALL_REDUCE, 4, 1 << 20)
    for machines, algorithm in (((0,) * 4, "tree"), ((0, 1, 2, 3), "ring"), ((), "ring")):
        planner = Planner(replace(even(4), machines=machines))
        assert all("/" not in name for name, _ in planner.plan(task).compared)
        assert planner.plan(task, strategy=wish).algorithm == algorithm


def test_a_plan_of_two_levels_says_so() -> None:
    """How many machines, what is done within them and among them, and what it was compared with."""
    links = on_machines(2, 2, 2)
    plan = all_reduce(links, 16 << 20)
    assert re.search(
        r"levels \(.*: \w+ on each of 3, ring among them\) for 16.8 MB takes about .*; "
        r"\w+ would take",
        plan.reason,
    )


@pytest.mark.parametrize("wish", ["doubling/ring", "direct/levels", "nothing/ring"])
def test_what_are_no_two_levels_is_refused(wish: str) -> None:
    """With the reason, also if a single call asks for it."""
    within, among = wish.split("/")
    with pytest.raises(UnsupportedOperation):
        Planner(on_machines(2, 2)).plan(
            Task.whole(Collective.ALL_REDUCE, 4, 100),
            strategy=Strategy(within, None, Strategy(among)),
        )


# --------------------------------------------------------------------------------------------------
# Machines that share a radio: what they move takes time from all of them.

RADIO = 25_000_000  # bytes per second


def on_air(air: tuple[int, ...]) -> LinkMatrix:
    """Links of which some share radios, as each is when it is alone."""
    rates = tuple(RADIO if number else GIGABIT for number in air)
    return LinkMatrix(rates, rates, even(len(air)).latency, air=air)


@pytest.mark.parametrize("air", [(0, 1, 1), (1, 0, 1, 0), (0, 1, 1, 2, 2), (0, 1, 1, 1, 1)])
def test_machines_on_cables_make_the_sums_for_those_on_a_radio(air: tuple[int, ...]) -> None:
    """Each of these sends its part and receives the sum, and nothing passes through it."""
    nbytes = 16 << 20
    plan = all_reduce(on_air(air), nbytes)
    assert plan.algorithm == "direct"
    assert [bool(share) for share in plan.shares] == [not number for number in air]
    busiest = max(air.count(number) for number in air if number)
    bound = 1e9 * 2 * busiest * nbytes / RADIO
    assert bound <= plan.price < 1.1 * bound
    radios = ", ".join(str(rank) for rank, number in enumerate(air) if number)
    assert f"on Wi-Fi, where all share the air: rank {radios}" in plan.reason


@pytest.mark.parametrize("collective", [Collective.REDUCE, Collective.BROADCAST])
def test_shares_are_passed_on_by_cable(collective: Collective) -> None:
    """Where there is one beside the root; else by those there are."""
    task = Task.whole(collective, 4, 4 << 20, root=0)
    strategy = Strategy("direct")
    plan = Planner(on_air((0, 0, 1, 1))).plan(task, strategy=strategy)
    assert plan.shares[1] > 0
    assert plan.shares[2:] == (0, 0)
    plan = Planner(on_air((0, 1, 1, 1))).plan(task, strategy=strategy)
    assert plan.shares[0] == 0
    assert all(plan.shares[1:])


def test_a_walk_and_an_estimate_price_the_air_alike() -> None:
    """A byte between two on one radio takes twice the time of one that leaves it."""
    task = Task.whole(Collective.ALL_REDUCE, 3, 4 << 20)
    for air in ((0, 1, 1), (1, 1, 1)):
        costs = Costs(Network(on_air(air)))
        for name in ("ring", "direct"):
            layout = AlgorithmSettings.plain(3, piece=1 << 16)
            walked = price(schedule_planner.schedule(name, task, layout), costs)
            estimated = ESTIMATES[name, task.collective](task, layout, costs)
            assert estimated == pytest.approx(walked, rel=0.1)


def machines_on_air(air: tuple[int, ...], ranks: int = 2) -> LinkMatrix:
    """So many ranks on each machine, of which some share radios."""
    links = on_air(tuple(number for number in air for _ in range(ranks)))
    return replace(links, machines=tuple(rank - rank % ranks for rank in range(links.size)))


def test_ranks_of_a_machine_share_its_radio_and_sum_up_before() -> None:
    """One share of each laptop goes up and one comes down, however many ranks it has."""
    nbytes = 16 << 20
    links = machines_on_air((0, 1, 1))
    assert Planner(links).network.rates == [GIGABIT] * 2 + [RADIO // 4] * 4
    plan = all_reduce(links, nbytes)
    assert str(plan.strategy) == "direct/direct"
    assert plan.levels is not None
    assert dict(zip((0, 2, 4), plan.levels.shares, strict=True)) == {0: 1, 2: 0, 4: 0}
    bound = 1e9 * 4 * nbytes / RADIO
    assert bound <= plan.price < 1.1 * bound
    flat = all_reduce(replace(links, machines=()), nbytes)
    assert flat.price > 1.9 * plan.price


def test_what_stays_within_a_machine_is_not_on_the_air() -> None:
    """Four ranks of one laptop plan as those of a desktop do."""
    task = Task.whole(Collective.ALL_REDUCE, 4, 4 << 20)
    laptop = replace(on_air((1, 1, 1, 1)), machines=(0,) * 4)
    assert Planner(laptop).plan(task) == Planner(replace(laptop, air=())).plan(task)


def test_a_walk_puts_on_the_air_what_leaves_the_machine() -> None:
    """Of a root that tells one rank beside it and one elsewhere, over a radio as fast as memory."""
    task = Task.whole(Collective.BROADCAST, 3, 4 << 20, root=0)
    links = replace(LinkMatrix.uniform(3, rate=10**9, latency=10_000), machines=(0, 0, 2))
    told = schedule_planner.schedule("central", task)
    wired, wireless = (
        price(told, Costs(Network(replace(links, air=air)))) for air in ((), (1, 1, 0))
    )
    assert wireless == wired


def test_a_walk_and_an_estimate_price_the_air_of_machines_alike() -> None:
    """In flat plans and in two levels."""
    task = Task.whole(Collective.ALL_REDUCE, 6, 4 << 20)
    planner = Planner(machines_on_air((0, 1, 1)))
    costs = Costs(planner.network, piece=1 << 18)
    for strategy in ("ring", "direct", "direct/direct", "direct/ring", "centralized/direct"):
        plan = planner.plan(task, strategy=AllReduceStrategy.named(strategy))
        layout = plan.layout(4)
        walked = price(schedule_planner.schedule(plan.algorithm, task, layout), costs)
        estimated = ESTIMATES[plan.algorithm, task.collective](task, layout, costs)
        assert estimated == pytest.approx(walked, rel=0.15), strategy
