"""Lost members that are given up: those who wait are told before everybody has arrived.

What is promised once the silence of a lost member is certain: whoever is inside a barrier that it
never entered has failed, although others may still be far away; and one that said which barrier it
had passed before it left hinders nobody there, however soon it is given up.
"""

from __future__ import annotations

import random
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from support.barrier_hall import Hall

groups = st.lists(st.integers(0, 20), min_size=2, max_size=12, unique=True).map(sorted)
chances = st.integers(0, 2**32).map(random.Random)


def step(hall: Hall, chance: random.Random, *, enter: bool) -> bool:
    """Let one thing happen; False when there is nothing left that could."""
    moves = [partial(hall.deliver, link) for link in hall.pending()]
    moves += [partial(hall.exclude, *pair) for pair in hall.unsure()]
    if enter:
        moves += [partial(hall.enter, m) for m in sorted(hall.alive) if not hall.is_waiting(m)]
    if moves:
        chance.choice(moves)()
    return bool(moves)


@given(groups, chances, st.integers(0, 200))
def test_nobody_waits_for_one_that_never_came(
    members: list[int], chance: random.Random, steps: int
) -> None:
    """Even when those who would miss its token have not arrived; later all are told the same."""
    hall = Hall(members)
    for _ in range(steps):
        step(hall, chance, enter=True)
    lost = chance.choice(members)
    hall.lose(lost, lambda sent: chance.randint(0, sent))
    for _ in range(chance.randint(0, 30)):
        step(hall, chance, enter=True)
    while step(hall, chance, enter=False):
        pass
    for member in hall.alive:
        assert not hall.is_waiting(member) or hall.entered[lost] >= hall.entered[member]
    for _ in range(20_000):
        if hall.alive <= hall.failed.keys():
            break
        step(hall, chance, enter=True)
    assert all(hall.failed.get(member) == lost for member in hall.alive)


@given(groups, chances)
def test_one_that_passed_and_said_so_hinders_nobody(
    members: list[int], chance: random.Random
) -> None:
    """Members leave as soon as they have passed and are given up at once; the others still pass."""
    hall = Hall(members)
    for member in chance.sample(members, len(members)):
        hall.enter(member)
    while step(hall, chance, enter=False):
        for member in sorted(hall.alive):
            if hall.passed[member] and chance.random() < 0.5:
                hall.leave(member)
    assert set(hall.passed.values()) == {1}
    assert hall.failed == {}
