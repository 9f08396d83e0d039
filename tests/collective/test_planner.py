"""The planner takes the cheapest way, says why, and does not change its mind too often."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.collective import central, registry
from potluck.collective.algorithm import Algorithm
from potluck.collective.costs import Host, Network
from potluck.collective.planner import GAIN, PATIENCE, Plan, Planner, keeps, piece_for
from potluck.collective.strategies import AllReduceStrategy, ReduceStrategy
from potluck.collective.task import Collective, Task
from potluck.errors import UnsupportedOperation
from potluck.vocabulary import LinkMatrix
from support.collectives import check, task

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
        check(registry.schedule(plan.algorithm, work, plan.layout(4)))


def rows(size: int) -> st.SearchStrategy[list[bytes]]:
    """What so many ranks may tell each other."""
    length = 16 + 4 * size
    row = st.binary(min_size=length, max_size=length)
    return st.lists(row, min_size=size, max_size=size)


@given(st.integers(2, 6).flatmap(rows), st.integers(0, 1 << 30))
def test_equal_bytes_give_equal_plans(sent: list[bytes], count: int) -> None:
    """Whatever the ranks have told each other; nothing depends on anything else."""
    sent = [row[:7] + b"\0" + row[8:15] + b"\0" + row[16:] for row in sent]  # rates of 56 bits
    work = Task.whole(Collective.ALL_REDUCE, len(sent), count)
    first, second = (Planner(LinkMatrix.from_rows(sent)).plan(work) for _ in range(2))
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
    monkeypatch.setitem(registry.ALGORITHMS, "new", Algorithm("new", "a new idea", offers))
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
