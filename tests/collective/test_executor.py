"""The survey: what ranks see of their links becomes the same matrix everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from potluck._types import LinkMatrix
from potluck.collective import executor
from potluck.collective.executor import (
    EVERY,
    LARGE,
    SEEN,
    LinkMemory,
    OperationTimes,
    agree,
    have_changed,
    sharing,
)
from potluck.collective.group import Group
from potluck.collective.pump import SequentialExecutor
from potluck.schedule.planner import Planner
from potluck.schedule.task import Collective, Task
from support.groups import LIMIT, in_world, sum_call

GIGABIT = 125_000_000


def seen(rates: list[list[int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """What ranks report: the rate from each (column) to each (row), and equal times."""
    size = len(rates)
    rows = np.zeros((size, SEEN, size), np.int64)
    rows[:, 0, :] = rates
    rows[:, 1, :] = 100_000
    rows[:, 2, :] = (rows[:, 0, :] == 0) & ~np.eye(size, dtype=bool)
    return rows


def test_a_slow_rank_is_found_in_both_directions() -> None:
    """The rates of a rank are the best that anybody saw."""
    rates = [
        [0, GIGABIT, GIGABIT, GIGABIT // 5],
        [GIGABIT, 0, GIGABIT, GIGABIT // 5],
        [GIGABIT, GIGABIT, 0, GIGABIT // 5],
        [GIGABIT // 5, GIGABIT // 5, GIGABIT // 5, 0],
    ]
    links = agree(seen(rates))
    assert links.up == links.down == (GIGABIT, GIGABIT, GIGABIT, GIGABIT // 5)
    plan = Planner(links).plan(Task.whole(Collective.ALL_REDUCE, 4, 4 << 20))
    assert (plan.algorithm, plan.shares) == ("direct", (1, 1, 1, 0))


def test_chance_is_not_taken_for_a_difference() -> None:
    """Rates that are nearly alike count as alike, and so do all that no link limits."""
    rates = [[0, 100, 90], [95, 0, 100], [100, 80, 0]]
    links = agree(seen([[rate * 1_000_000 for rate in row] for row in rates]))
    assert len(set(links.up)) == len(set(links.down)) == 1
    links = agree(seen([[0, 3 * 10**9], [12 * 10**9, 0]]))
    assert set(links.up) == {10**9}


def test_where_all_are_on_one_machine_all_are_alike() -> None:
    """There is no link: whatever the processors do just then, nobody gets less than others."""
    links = agree(seen([[0] * 3] * 3))
    assert set(links.up) == set(links.down) == {10**9}
    assert links.machines == (0, 0, 0)


def test_memory_is_shared_if_all_ranks_share_it() -> None:
    """One pair over a socket is enough for shorter pieces on all."""
    rows = seen([[0] * 3] * 3)
    rows[:, 2, :] = 2
    assert agree(rows).in_memory
    rows[0, 2, 1] = 1
    assert not agree(rows).in_memory
    assert agree(rows).machines == (0, 0, 0)


def test_a_machine_is_as_fast_as_its_link_to_others() -> None:
    """Not as its processes are among each other."""
    near = GIGABIT // 5
    rates = [
        [0, 0, GIGABIT, GIGABIT],
        [0, 0, GIGABIT, GIGABIT],
        [near, near, 0, 0],
        [near, near, 0, 0],
    ]
    links = agree(seen(rates))
    assert links.machines == (0, 0, 2, 2)
    assert links.up == (near, near, GIGABIT, GIGABIT)
    assert links.down == (GIGABIT, GIGABIT, near, near)


def test_ranks_of_a_machine_share_the_best_that_any_of_them_saw() -> None:
    """They measured at the same time, so most of them saw a part of their cable."""
    part = GIGABIT // 3
    rates = [
        [0, 0, part, GIGABIT],
        [0, 0, part, part],
        [part, part, 0, 0],
        [GIGABIT, part, 0, 0],
    ]
    links = agree(seen(rates))
    assert set(links.up) == set(links.down) == {GIGABIT}


def test_two_ranks_share_a_machine_if_both_say_so() -> None:
    """What one of them alone believes parts nobody, and joins nobody."""
    rows = seen([[0, 5, 5, 5], [5, 0, 5, 0], [5, 5, 0, 0], [5, 0, 0, 0]])
    assert sharing(rows) == (0, 1, 2, 1)  # 3 is with 1; that 2 is with 3 as well joins no more
    rows[1, 2, 3] = 0
    assert sharing(rows) == (0, 1, 2, 2)
    rows[3, 2, 2] = 0
    assert sharing(rows) == (0, 1, 2, 3)


def test_times_that_are_too_long_are_cut() -> None:
    """A matrix holds four seconds at most."""
    rows = seen([[0, 5], [5, 0]])
    rows[0, 1, 1] = 10**12
    assert agree(rows).latency[0][1] == (1 << 32) - 1


@pytest.mark.parametrize(
    ("changes", "expected"), [([100, 130, 80], False), ([100, 150], True), ([100, 60], True)]
)
def test_it_is_repeated_when_things_have_changed(changes: list[int], expected: bool) -> None:
    """On any rank, for better or worse."""
    assert have_changed(np.array(changes)) is expected


def test_experience_compares_the_last_with_the_first() -> None:
    """By their medians, at fixed numbers of operations."""
    experience, task = OperationTimes(), Task.whole(Collective.ALL_REDUCE, 2, 10)
    assert experience.change(task) == 100
    assert not experience.is_due
    for number in range(EVERY):
        experience.note(task, 1.0 if number < 20 else 2.0)
        assert experience.is_due is (number == EVERY - 1)
    assert experience.change(task) == 200


# --------------------------------------------------------------------------------------------------
# The surveyor: large operations run by plans that fit the links, agreed among all ranks.


def test_the_first_large_operation_is_preceded_by_a_survey() -> None:
    """All ranks then go by the same links; small operations do without."""

    def action(group: Group) -> list[Any]:
        plans = group._plans
        group.run(sum_call(np.ones(10, "f4"), 3), LIMIT)
        before = plans.is_surveyed
        group.run(sum_call(np.ones(LARGE, "f4"), 3), LIMIT)
        return [before, plans.is_surveyed, plans.links]

    first, *others = in_world(3, action)
    assert isinstance(first, list)
    assert first[:2] == [False, True]
    assert min(first[2].up) > 0
    assert others == [first, first]


def test_after_a_failure_the_links_are_surveyed_anew() -> None:
    """Somebody may not have learned what others have."""

    def action(group: Group) -> bool:
        call = sum_call(np.ones(LARGE, "f4"), 2)
        group.run(call, LIMIT)
        group.abort("try")
        return group._plans.is_surveyed

    assert False in in_world(2, action)


def test_ranks_that_differ_about_sharing_a_machine_measure_and_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a translated address only one end may see that both are on one machine."""
    monkeypatch.setattr(SequentialExecutor, "is_local", lambda _, peer: peer == 1)

    def action(group: Group) -> tuple[int, ...]:
        for _ in range(2):
            group.run(sum_call(np.ones(LARGE, "f4"), 2), LIMIT)
        return group.links.machines

    assert in_world(2, action) == [(0, 1), (0, 1)]


def test_operations_that_become_slow_lead_to_another_survey(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At fixed numbers of operations, and only if the ranks agree that something has changed."""
    monkeypatch.setattr(executor, "EVERY", 4)
    surveys: list[int] = []
    measure = executor.measure
    monkeypatch.setattr(
        "potluck.collective.executor.measure",
        lambda *args: surveys.append(args[1]) or measure(*args),  # type: ignore[func-returns-value]
    )
    monkeypatch.setattr(OperationTimes, "change", lambda *_: 300)

    def action(group: Group) -> None:
        for _ in range(9):
            group.run(sum_call(np.ones(LARGE, "f4"), 2), LIMIT)

    assert in_world(2, action) == [None, None]
    assert sorted(surveys) == [0, 0, 0, 1, 1, 1]


# --------------------------------------------------------------------------------------------------
# What ranks know already, and radios that some of them share.


def row(rank: int, size: int, rate: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """What a rank knows: the same of all others."""
    found = np.array([[rate] * size, [100_000] * size, [0] * size], np.int64)
    found[:, rank] = 0
    return found


@pytest.mark.parametrize("forgetful", [None, 1])
def test_links_are_measured_unless_all_ranks_know_theirs(
    monkeypatch: pytest.MonkeyPatch, forgetful: int | None
) -> None:
    """What is known goes into the survey; what was measured and agreed on is told to each rank."""
    measured: list[int] = []
    agreed: list[LinkMatrix] = []

    def find(messenger: object, rank: int, size: int, air: object) -> object:
        del messenger, air
        return row(rank, size, GIGABIT // 2)

    monkeypatch.setattr(executor, "measure", find)

    def action(group: Group) -> LinkMatrix:
        known = None if group.rank == forgetful else row(group.rank, 3, GIGABIT)
        memory = LinkMemory(
            known=lambda: known,
            measured=lambda found: measured.append(int(found.max())),
            agreed=agreed.append,
        )
        group._executor._surveyor._memory = memory
        group.run(sum_call(np.ones(LARGE, "f4"), 3), LIMIT)
        return group.links

    first, *others = in_world(3, action)
    assert isinstance(first, LinkMatrix)
    assert others == [first, first]
    assert agreed == [first] * 3
    rate = GIGABIT if forgetful is None else GIGABIT // 2
    assert set(first.up) == set(first.down) == {rate}
    assert measured == ([] if forgetful is None else [rate] * 3)


def test_ranks_tell_each_other_which_radio_they_are_on() -> None:
    """Then all know who shares the air; each on it is measured with one on a cable."""

    def action(group: Group) -> tuple[LinkMatrix, list[int]]:
        rates: list[int] = []
        cell = (0, 0) if group.rank == 1 else (7, 9)
        group._executor._surveyor._memory = LinkMemory(
            air=lambda: cell, measured=lambda found: rates.extend(found[0].tolist())
        )
        group.run(sum_call(np.ones(LARGE, "f4"), 3), LIMIT)
        return group.links, rates

    found = in_world(3, action)
    links = [each[0] for each in found if isinstance(each, tuple)]
    assert [each.air for each in links] == [(1, 0, 1)] * 3
    assert links[0] == links[1] == links[2]
    rates = [each[1] for each in found if isinstance(each, tuple)]
    assert [[rate > 0 for rate in each] for each in rates] == [
        [False, True, False],
        [True, False, True],
        [False, True, False],
    ]
    assert rates[0][2] == rates[2][0] == executor.UNMEASURED


def test_what_passes_between_two_on_one_radio_shows_half_of_it() -> None:
    """It crosses the air twice; what was not measured counts for nothing."""
    rates = [[0, 50, executor.UNMEASURED], [50, 0, 80], [executor.UNMEASURED, 90, 0]]
    million = [[rate * 1_000_000 if rate > 0 else rate for rate in line] for line in rates]
    links = agree(seen(million), (1, 1, 0))
    assert links.air == (1, 1, 0)
    assert set(links.up) == set(links.down) == {100_000_000}
    assert agree(seen(million), (1, 2, 0)).up == (50_000_000, 90_000_000, 90_000_000)


def test_ranks_of_a_machine_share_its_radio() -> None:
    """Its rate is what any of them saw, doubled where the other end was on the same air."""
    rate = 50_000_000
    left_out = executor.UNMEASURED
    rates = [
        [0, 0, rate, left_out],
        [0, 0, rate, left_out],
        [rate, rate, 0, 0],
        [left_out] * 2 + [0, 0],
    ]
    links = agree(seen(rates), (1, 1, 1, 1))
    assert (links.machines, links.air) == ((0, 0, 2, 2), (1, 1, 1, 1))
    assert set(links.up) == set(links.down) == {2 * rate}
