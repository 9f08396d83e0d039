"""Two levels: right for every layout of machines, and no more on a cable than there must be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._types import lowest_of_each
from potluck.errors import UnsupportedOperation
from potluck.schedule import verify
from potluck.schedule.algorithms.levels import AMONG, LEVELS, WITHIN
from potluck.schedule.planner import refusals
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.schedule import Schedule
from potluck.schedule.task import AlgorithmSettings, Collective, Levels, Span, Strategy, Task
from potluck.schedule.verify import VerifyLimits
from support.collectives import check, dice, task

PAIRS = [
    (collective, within, among)
    for collective in LEVELS.offers
    for within in WITHIN
    for among in AMONG
    if collective in AMONG[among].offers
    if not list(refusals(collective.value, Strategy(within), Strategy(among)))
]


def layouts(size: int, within: str, among: str) -> st.SearchStrategy[AlgorithmSettings]:
    """Ranks thrown onto machines, in any order, with any shares and short pieces."""
    places = st.lists(st.integers(0, 4), min_size=size, max_size=size)
    shares = st.tuples(*[st.integers(0, 3)] * size)
    levels = st.builds(
        lambda machines, shares, arity: Levels(
            machines, within, among, shares[: len(set(machines))], arity
        ),
        places.map(lambda where: lowest_of_each(where, size)),
        st.tuples(*[st.integers(1, 3)] * size),
        st.integers(1, 3),
    )
    return st.builds(
        AlgorithmSettings,
        order=st.permutations(range(size)).map(tuple),
        shares=shares.filter(any),
        arity=st.integers(1, 3),
        piece=st.integers(1, 9),
        levels=levels,
    )


def of_machines(*ranks: int, within: str = "direct", among: str = "ring") -> AlgorithmSettings:
    """Ranks in their own order, so many on each machine."""
    places = [place for place, count in enumerate(ranks) for _ in range(count)]
    size = len(places)
    levels = Levels(lowest_of_each(places, size), within, among)
    return AlgorithmSettings(tuple(range(size)), (1,) * size, levels=levels)


def crossing(schedule: Schedule) -> list[int]:
    """Elements that each machine sends to others."""
    assert schedule.layout.levels is not None
    machines = schedule.layout.levels.machines
    sent = dict.fromkeys(machines, 0)
    for program in schedule.programs:
        for step in program.steps:
            away = sum(machines[peer] != machines[program.rank] for peer in step.to)
            sent[machines[program.rank]] += step.length * away
    return list(sent.values())


@pytest.mark.parametrize("collective", LEVELS.offers)
@given(st.data())
def test_it_is_proved_right_for_every_layout_of_machines(
    collective: Collective, data: st.DataObject
) -> None:
    """Odd lengths, lone ranks, empty shares, any order of events: with the least room there is."""
    pairs = [pair for pair in PAIRS if pair[0] is collective]
    _, within, among = data.draw(st.sampled_from(pairs))
    size, count = data.draw(st.integers(1, 7)), data.draw(st.integers(0, 29))
    layout = data.draw(layouts(size, within, among))
    work = task(collective, size, count, data.draw(st.integers(0, size - 1)))
    schedule = LEVELS.schedule(work, layout)
    limits = VerifyLimits(piece=layout.piece)
    verify.prove(schedule, limits=limits, dice=dice(data.draw(st.integers(0, 99))))
    check(schedule)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 12, 24])
@pytest.mark.parametrize("per_machine", [1, 2, 3, 8])
def test_it_is_right_for_every_world_size(size: int, per_machine: int) -> None:
    """Also where the last machine has fewer ranks than the others."""
    machines = tuple(rank - rank % per_machine for rank in range(size))
    for collective, within, among in PAIRS:
        layout = AlgorithmSettings.plain(size, piece=5)
        levels = Levels(machines, within, among)
        layout = AlgorithmSettings(layout.order, layout.shares, 2, 5, levels)
        check(LEVELS.schedule(task(collective, size, size + 3, size - 1), layout))


@given(st.data())
def test_all_ranks_get_the_same_bits(data: st.DataObject) -> None:
    """Whatever the numbers and their width: one rank rounds, or all do alike; and so every time."""
    size = data.draw(st.integers(2, 7))
    _, within, among = data.draw(
        st.sampled_from([pair for pair in PAIRS if pair[0] is Collective.ALL_REDUCE])
    )
    layout = data.draw(layouts(size, within, among))
    work = Task.whole(Collective.ALL_REDUCE, size, data.draw(st.integers(1, 40)))
    dtype = data.draw(st.sampled_from(["f2", "f4", "f8"]))
    reducer, inputs = Reducer.of(ReduceOp.MEAN, dtype), verify.rough(work, dtype)
    schedule = LEVELS.schedule(work, layout)
    seen = {
        each.tobytes()
        for seed in range(3)
        for each in verify.run(
            *(schedule, inputs, reducer), limits=VerifyLimits(layout.piece), dice=dice(seed)
        )
    }
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("ranks", "among", "most"),
    [
        ((3, 3), "ring", 1.0),
        ((3, 3), "direct", 1.0),
        ((3, 3), "doubling", 1.0),
        ((4, 2, 1), "ring", 4 / 3),
        ((4, 2, 1), "direct", 4 / 3),
        ((2, 2, 2, 2), "ring", 3 / 2),
    ],
)
@pytest.mark.parametrize("within", WITHIN)
def test_a_cable_carries_what_one_rank_per_machine_would_need(
    ranks: tuple[int, ...], among: str, most: float, within: str
) -> None:
    """And not what a ring of all ranks does: 1.67 for six ranks, 1.71 for seven."""
    work = Task.whole(Collective.ALL_REDUCE, sum(ranks), 1200)
    sent = crossing(LEVELS.schedule(work, of_machines(*ranks, within=within, among=among)))
    assert sent == [1200 * most] * len(ranks)


def test_one_rank_of_a_machine_tells_others_if_it_owns_all() -> None:
    """The others send their numbers to it and hear the result from it."""
    work = Task.whole(Collective.ALL_REDUCE, 6, 60)
    schedule = LEVELS.schedule(work, of_machines(3, 3, within="central"))
    peers = [{*program.incoming, *program.outgoing} for program in schedule.programs]
    assert peers == [{1, 2, 3}, {0}, {0}, {0, 4, 5}, {3}, {3}]


def test_all_ranks_of_a_machine_have_a_part_of_the_cable_if_they_own_one() -> None:
    """Each speaks to the owner of the same elements on the other machine."""
    work = Task.whole(Collective.ALL_REDUCE, 6, 60)
    schedule = LEVELS.schedule(work, of_machines(3, 3))
    away = [
        {peer for peer in each.outgoing if peer // 3 != each.rank // 3}
        for each in schedule.programs
    ]
    assert away == [{3}, {4}, {5}, {0}, {1}, {2}]


def test_a_root_stands_for_its_machine() -> None:
    """What it needs crosses the cable once, to it and to no other rank."""
    for collective in (Collective.REDUCE, Collective.BROADCAST):
        work = Task.whole(collective, 6, 60, root=4)
        schedule = LEVELS.schedule(work, of_machines(3, 3, within="tree", among="tree"))
        assert sum(crossing(schedule)) == 60
        pairs = {
            (program.rank, peer)
            for program in schedule.programs
            for peer in program.outgoing
            if peer // 3 != program.rank // 3
        }
        assert pairs == ({(0, 4)} if collective is Collective.REDUCE else {(4, 0)})


def test_a_reduction_to_a_root_stores_nothing_on_the_way() -> None:
    """The input of all but the root is left alone."""
    work = Task.whole(Collective.REDUCE, 7, 60, root=5)
    for within, among in (("central", "ring"), ("tree", "tree"), ("ring", "central")):
        schedule = LEVELS.schedule(work, of_machines(4, 2, 1, within=within, among=among))
        for program in schedule.programs:
            assert not program.needs_sum
            assert program.rank == 5 or all(step.into is None for step in program.steps)


def test_without_machines_every_rank_has_its_own() -> None:
    """What remains is the algorithm among machines."""
    work = Task.whole(Collective.ALL_REDUCE, 4, 10)
    program = LEVELS.schedule(work).program(0)
    assert program.output == Span(0, 10)
    assert not program.needs_sum


def test_unknown_levels_are_refused() -> None:
    """With those there are."""
    work = Task.whole(Collective.ALL_REDUCE, 2, 10)
    for within, among in (("doubling", "ring"), ("direct", "levels")):
        with pytest.raises(UnsupportedOperation, match="cannot be"):
            LEVELS.schedule(work, of_machines(1, 1, within=within, among=among))
