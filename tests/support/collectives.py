"""Tasks, layouts and dice for tests of collectives."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from potluck.schedule import planner, verify
from potluck.schedule.schedule import Schedule
from potluck.schedule.task import AlgorithmSettings, Collective, Task
from potluck.schedule.verify import Dice

OFFERS = [
    (algorithm.name, collective)
    for algorithm in planner.ALGORITHMS.values()
    for collective in algorithm.offers
]
"""Every collective that some algorithm offers."""

ROOTED = [(name, collective) for name, collective in OFFERS if collective.has_root]


def dice(seed: int) -> Dice:
    """Dice that fall the same way for the same seed."""
    return random.Random(seed).randrange


def task(collective: Collective, size: int, count: int, root: int = 0) -> Task:
    """A task of about ``count`` elements; blocks are uneven, and some may be empty."""
    if collective is Collective.BARRIER:
        return Task.whole(collective, size, 1)
    if collective is Collective.ALL_TO_ALL:
        each = -(-count // size)
        matrix = [[(3 * a + 5 * b) % (each + 1) for b in range(size)] for a in range(size)]
        return Task.exchange(matrix)
    if collective.has_blocks:
        most = 2 * count // size
        return Task.blocks(collective, [(7 * rank + 1) % (most + 1) for rank in range(size)], root)
    return Task.whole(collective, size, count, root)


def layouts(size: int) -> st.SearchStrategy[AlgorithmSettings]:
    """Any layout of so many ranks, with short pieces."""
    return st.builds(
        AlgorithmSettings,
        order=st.permutations(range(size)).map(tuple),
        shares=st.tuples(*[st.integers(0, 3)] * size).filter(any),
        arity=st.integers(1, 4),
        piece=st.integers(1, 7),
    )


def check(schedule: Schedule) -> None:
    """Play a schedule from top to bottom and compare what comes out with what should."""
    work = schedule.task
    reducer = verify.exact(work)
    verify.compare(work, verify.play(schedule, verify.distinct(work), reducer), reducer)
