"""The survey: what ranks see of their links becomes the same matrix everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from potluck.collective.planner import Planner
from potluck.collective.task import Collective, Task
from potluck.runtime.survey import EVERY, Experience, agree, have_changed

GIGABIT = 125_000_000


def seen(rates: list[list[int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """What ranks report: the rate from each (column) to each (row), and equal times."""
    size = len(rates)
    rows = np.zeros((size, 2, size), np.int64)
    rows[:, 0, :] = rates
    rows[:, 1, :] = 100_000
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
    assert links.up == (near, near, GIGABIT, GIGABIT)
    assert links.down == (GIGABIT, GIGABIT, near, near)


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
    experience, task = Experience(), Task.whole(Collective.ALL_REDUCE, 2, 10)
    assert experience.change(task) == 100
    assert not experience.is_due
    for number in range(EVERY):
        experience.note(task, 1.0 if number < 20 else 2.0)
        assert experience.is_due is (number == EVERY - 1)
    assert experience.change(task) == 200
