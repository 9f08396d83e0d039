"""The barrier without a network: nobody passes before all have arrived, and then all pass."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.barrier import Announce, Barrier, Passed, Token
from support.barrier_hall import Hall

groups = st.lists(st.integers(0, 200), min_size=1, max_size=64, unique=True).map(sorted)
small_groups = st.lists(st.integers(0, 20), min_size=2, max_size=9, unique=True).map(sorted)
chances = st.integers(0, 2**32).map(random.Random)


@given(groups, chances, st.integers(1, 3))
def test_everybody_passes_once_all_have_arrived(
    members: list[int], chance: random.Random, barriers: int
) -> None:
    """In any group of 1 to 64, whatever order the links deliver in, several barriers in a row.

    That nobody passes earlier is checked by the hall at every step.
    """
    hall = Hall(members)
    for number in range(1, barriers + 1):
        for member in chance.sample(members, len(members)):
            assert hall.passed[member] == number - 1
            hall.enter(member)
            for link in hall.pending()[: chance.randint(0, 5)]:
                hall.deliver(link)
        hall.settle(chance)
        assert set(hall.passed.values()) == {number}


@given(small_groups, chances)
def test_members_that_do_not_wait_for_each_other_run_through_many_barriers(
    members: list[int], chance: random.Random
) -> None:
    """Some are a barrier ahead and their tokens come early; no round is taken for another."""
    hall = Hall(members)
    while min(hall.passed.values()) < 5:
        free = [m for m in members if not hall.is_waiting(m) and hall.passed[m] < 5]
        choices: list[int | tuple[int, int]] = [*free, *hall.pending()]
        choice = chance.choice(choices)
        if isinstance(choice, int):
            hall.enter(choice)
        else:
            hall.deliver(choice)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 33, 64])
def test_the_number_of_tokens_is_logarithmic(size: int) -> None:
    """One for each member and round, ⌈log₂ n⌉ rounds, and nothing else."""
    hall = Hall(range(size))
    for member in hall.members:
        hall.enter(member)
    hall.settle(random.Random(size))
    assert len(hall.sent) == size * (size - 1).bit_length()
    assert set(hall.passed.values()) == {1}


def test_alone_one_passes_at_once() -> None:
    """There is nobody to wait for and nobody to tell."""
    barrier = Barrier(7)
    assert barrier.enter([7]) == [Passed(1)]
    assert barrier.enter([7]) == [Passed(2)]
    assert barrier.announce() == []
    assert barrier.missing() == []


def test_tokens_that_come_before_we_enter_are_kept() -> None:
    """The other one is faster: its token waits for us, not the other way round."""
    barrier = Barrier(0)
    assert barrier.receive_token(1, 1, 0) == []
    assert barrier.enter([0, 1]) == [Token(1, 1, 0), Passed(1)]
    assert barrier.receive_token(1, 2, 0) == []
    assert barrier.receive_token(1, 1, 0) == []  # an old one, late: the new one stays
    assert barrier.number == 2
    assert barrier.enter([0, 1]) == [Token(1, 2, 0), Passed(2)]


def test_a_token_of_an_earlier_barrier_passes_nothing() -> None:
    """Late and repeated tokens are recognised by their number."""
    barrier = Barrier(0)
    barrier.receive_token(1, 1, 0)
    barrier.enter([0, 1])
    assert barrier.enter([0, 1]) == [Token(1, 2, 0)]
    assert barrier.receive_token(1, 1, 0) == []
    assert barrier.receive_token(1, 2, 0) == [Passed(2)]


@given(small_groups, chances)
def test_repeated_tokens_change_nothing(members: list[int], chance: random.Random) -> None:
    """Every message may come up to three times."""
    hall = Hall(members)
    for number in (1, 2, 3):
        for member in chance.sample(members, len(members)):
            hall.enter(member)
        hall.settle(chance, most_copies=3)
        assert set(hall.passed.values()) == {number}
    assert len(hall.sent) == 3 * len(members) * (len(members) - 1).bit_length()


@given(small_groups, chances)
def test_whoever_gave_up_goes_on_where_it_stopped(
    members: list[int], chance: random.Random
) -> None:
    """Calling again keeps the number and sends nothing twice, however often and whenever."""
    hall = Hall(members)
    for member in chance.sample(members, len(members)):
        hall.enter(member)
        for link in hall.pending()[: chance.randint(0, 5)]:
            hall.deliver(link)
        for retry in members:
            if hall.is_waiting(retry):
                hall.enter(retry)
    while pending := hall.pending():
        hall.deliver(chance.choice(pending))
        for retry in members:
            if hall.is_waiting(retry):
                hall.enter(retry)
    assert set(hall.passed.values()) == {1}
    assert len(hall.sent) == len(members) * (len(members) - 1).bit_length()


@given(small_groups, chances, st.integers(0, 2))
def test_whoever_gives_up_can_name_exactly_the_absent(
    members: list[int], chance: random.Random, before: int
) -> None:
    """After those who wait have said so, each of them knows who is missing and nobody else."""
    hall = Hall(members)
    for _ in range(before):
        for member in members:
            hall.enter(member)
        hall.settle(chance)
    present = chance.sample(members, chance.randint(1, len(members) - 1))
    for member in present:
        hall.enter(member)
    for member in present:
        hall.announce(member)
    hall.settle(chance)
    absent = [member for member in members if member not in present]
    for member in present:
        assert hall.barriers[member].missing() == absent
    for member in absent:
        hall.enter(member)
    hall.settle(chance)
    assert set(hall.passed.values()) == {before + 1}


def test_an_announcement_goes_to_everybody_else() -> None:
    """It names the barrier we wait in."""
    barrier = Barrier(4)
    barrier.enter([2, 4, 9])
    assert barrier.announce() == [Announce(2, 1), Announce(9, 1)]
    assert barrier.missing() == [2, 9]
    barrier.receive_arrival(9, 1)
    assert barrier.missing() == [2]
    barrier.receive_arrival(9, 0)  # an old one, late
    assert barrier.missing() == [2]
