"""The barrier without a network: nobody passes before all have arrived, and then all pass."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from potluck.backend.barrier import Announce, Barrier, BarrierFailed, BarrierPassed, Token
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
    assert barrier.enter([7]) == [BarrierPassed(1)]
    assert barrier.enter([7]) == [BarrierPassed(2)]
    assert barrier.announce() == []
    assert barrier.missing() == []


def test_tokens_that_come_before_we_enter_are_kept() -> None:
    """The other one is faster: its token waits for us, not the other way round."""
    barrier = Barrier(0)
    assert barrier.receive_token(1, 1, 0) == []
    assert barrier.enter([0, 1]) == [Token(1, 1, 0), BarrierPassed(1)]
    assert barrier.receive_token(1, 2, 0) == []
    assert barrier.receive_token(1, 1, 0) == []  # an old one, late: the new one stays
    assert barrier.number == 2
    assert barrier.enter([0, 1]) == [Token(1, 2, 0), BarrierPassed(2)]


def test_a_token_of_an_earlier_barrier_passes_nothing() -> None:
    """Late and repeated tokens are recognised by their number."""
    barrier = Barrier(0)
    barrier.receive_token(1, 1, 0)
    barrier.enter([0, 1])
    assert barrier.enter([0, 1]) == [Token(1, 2, 0)]
    assert barrier.receive_token(1, 1, 0) == []
    assert barrier.receive_token(1, 2, 0) == [BarrierPassed(2)]


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


# --------------------------------------------------------------------------------------------------
# Lost members that are given up: those who wait are told before everybody has arrived.
#
# What is promised once the silence of a lost member is certain: whoever is inside a barrier that it
# never entered has failed, although others may still be far away; and one that said which barrier
# it had passed before it left hinders nobody there, however soon it is given up.

exclusion_groups = st.lists(st.integers(0, 20), min_size=2, max_size=12, unique=True).map(sorted)
exclusion_chances = st.integers(0, 2**32).map(random.Random)


def step(hall: Hall, chance: random.Random, *, enter: bool) -> bool:
    """Let one thing happen; False when there is nothing left that could."""
    moves = [partial(hall.deliver, link) for link in hall.pending()]
    moves += [partial(hall.exclude, *pair) for pair in hall.unsure()]
    if enter:
        moves += [partial(hall.enter, m) for m in sorted(hall.alive) if not hall.is_waiting(m)]
    if moves:
        chance.choice(moves)()
    return bool(moves)


@given(exclusion_groups, exclusion_chances, st.integers(0, 200))
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


@given(exclusion_groups, exclusion_chances)
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


# --------------------------------------------------------------------------------------------------
# Members that die in, before or after a barrier: nobody waits for ever.
#
# What is promised, once every survivor has called the barrier and every message has arrived:
#
# - every survivor's call has ended: it passed, or it failed and names a member that is gone;
# - after a single loss all who failed name the same rank;
# - a survivor that passed the barrier in which others failed fails at the next one;
# - a member that passed and left hinders nobody at the barrier it passed.
#
# Some may pass a barrier that others fail: the lost one had entered it, so all had arrived.

losses_groups = st.lists(st.integers(0, 20), min_size=2, max_size=12, unique=True).map(sorted)
losses_chances = st.integers(0, 2**32).map(random.Random)


def wander(hall: Hall, chance: random.Random, steps: int) -> None:
    """Let members enter, one barrier after the other, and messages arrive, in random order."""
    for _ in range(steps):
        free = [m for m in sorted(hall.alive) if not hall.is_waiting(m)]
        choices: list[int | tuple[int, int]] = [*free, *hall.pending()]
        if not choices:
            return
        choice = chance.choice(choices)
        if isinstance(choice, int):
            hall.enter(choice)
        else:
            hall.deliver(choice)


def call_until_it_fails(hall: Hall, chance: random.Random) -> None:
    """Every survivor calls the barrier as long as it passes."""
    for _ in range(4):  # nobody can be further than two barriers from failing
        for member in sorted(hall.alive):
            if not hall.is_waiting(member) and member not in hall.failed:
                hall.enter(member)
        hall.settle(chance)


@given(losses_groups, losses_chances, st.integers(0, 200))
def test_after_a_loss_every_survivor_is_told_of_the_same_rank(
    members: list[int], chance: random.Random, steps: int
) -> None:
    """Whenever it dies, and whatever of its last words is lost, nobody hangs."""
    hall = Hall(members)
    wander(hall, chance, steps)
    lost = chance.choice(members)
    hall.lose(lost, lambda sent: chance.randint(0, sent))
    wander(hall, chance, chance.randint(0, 50))
    call_until_it_fails(hall, chance)
    assert hall.failed.keys() - {lost} == hall.alive
    assert {hall.failed[member] for member in hall.alive} <= {lost}
    last = max(hall.passed[member] for member in hall.alive)
    assert last <= hall.entered[lost]


@given(losses_groups, losses_chances, st.integers(0, 200), st.integers(1, 5))
def test_after_several_losses_nobody_hangs(
    members: list[int], chance: random.Random, steps: int, losses: int
) -> None:
    """Also when those die who were just telling others, each survivor names one that is gone."""
    hall = Hall(members)
    for _ in range(min(losses, len(members) - 1)):
        wander(hall, chance, chance.randint(0, steps))
        hall.lose(chance.choice(sorted(hall.alive)), lambda sent: chance.randint(0, sent))
    call_until_it_fails(hall, chance)
    assert hall.alive <= hall.failed.keys()


@given(losses_groups, losses_chances)
def test_one_that_passed_and_left_hinders_nobody(members: list[int], chance: random.Random) -> None:
    """Members leave as soon as they have passed; the others still pass."""
    hall = Hall(members)
    for member in chance.sample(members, len(members)):
        hall.enter(member)
    while pending := hall.pending():
        hall.deliver(chance.choice(pending))
        for member in sorted(hall.alive):
            if hall.passed[member] and chance.random() < 0.5:
                hall.lose(member)
    assert set(hall.passed.values()) == {1}
    assert hall.failed == {}


@given(losses_groups, losses_chances)
def test_one_that_never_comes_is_named_as_soon_as_it_is_lost(
    members: list[int], chance: random.Random
) -> None:
    """Everybody else waits inside; the loss wakes them all."""
    hall = Hall(members)
    lost = chance.choice(members)
    for member in members:
        if member != lost:
            hall.enter(member)
    hall.settle(chance)
    assert all(hall.is_waiting(member) for member in members if member != lost)
    hall.lose(lost)
    hall.settle(chance)
    assert hall.failed == {member: lost for member in members if member != lost}


def test_who_passed_a_broken_barrier_fails_at_the_next() -> None:
    """Otherwise it would wait there for those who failed and will never come.

    Rank 0 dies after the first of its two tokens.  Rank 2 misses the second and tells the others;
    rank 3 has everything it needs and passes.
    """
    hall = Hall(range(4))
    for member in hall.members:
        hall.enter(member)
    for link in ((0, 1), (1, 2), (2, 3), (1, 3)):
        hall.deliver(link)
    assert hall.passed[3] == 1
    hall.lose(0, lambda _: 0)
    for link in ((0, 2), (2, 1)):
        hall.deliver(link)
    assert hall.failed.keys() == {1, 2}
    hall.enter(3)
    hall.settle(random.Random(0))
    assert hall.failed == {1: 0, 2: 0, 3: 0}


def test_the_news_survives_the_death_of_who_brought_it() -> None:
    """Rank 0 dies; rank 4 notices, tells only 1 and 5, and dies as well.

    Ranks 2, 3, 6 and 7 have passed, and at the next barrier wait for 1 and 5 alone: those two have
    to pass the news on.
    """
    hall = Hall(range(8))
    for member in hall.members:
        hall.enter(member)
    for distance in (1, 2):
        for member in hall.members:
            hall.deliver((member, (member + distance) % 8))
    for link in ((2, 6), (6, 2), (3, 7), (7, 3)):
        hall.deliver(link)
    hall.lose(0, lambda _: 0)
    for link in ((0, 4), (4, 1), (4, 5)):
        hall.deliver(link)
    assert hall.failed.keys() == {1, 4, 5}
    hall.lose(4, lambda _: 0)
    for member in (2, 3, 6, 7):
        assert hall.passed[member] == 1
        hall.enter(member)
    hall.settle(random.Random(0))
    assert {hall.failed[member] for member in hall.alive} <= {0, 4}


def test_a_loss_is_told_once() -> None:
    """Each member that fails tells the others that are left, and repeats nothing."""
    barrier = Barrier(2)
    assert barrier.enter([0, 1, 2, 3]) == [Token(3, 1, 0)]
    assert barrier.lose(3) == []
    assert barrier.lose(1) == [Announce(0, 1, 1), BarrierFailed(1, 1)]
    assert barrier.enter([0, 1, 2, 3]) == [BarrierFailed(1, 1)]
    assert barrier.receive_failure(1, 1) == [BarrierFailed(1, 1)]
    assert barrier.receive_token(0, 1, 1) == [BarrierFailed(1, 1)]


def test_one_that_certainly_never_came_is_not_waited_for() -> None:
    """Rank 2 awaits no token of rank 3, and those who do may come much later."""
    barrier = Barrier(2)
    barrier.enter([0, 1, 2, 3])
    assert barrier.lose(3) == []
    assert barrier.exclude(3) == [Announce(0, 1, 3), Announce(1, 1, 3), BarrierFailed(1, 3)]


def test_one_that_had_come_is_not_missed() -> None:
    """It may have passed and left; at the next barrier it is missed at once."""
    barrier = Barrier(2)
    barrier.receive_arrival(3, 1)
    assert barrier.lose(3) == barrier.exclude(3) == []
    assert barrier.enter([0, 1, 2, 3]) == [Token(3, 1, 0)]
    barrier.receive_token(1, 1, 0)
    assert barrier.receive_token(0, 1, 1)[-1] == BarrierPassed(1)
    assert barrier.enter([0, 1, 2, 3])[-1] == BarrierFailed(2, 3)


def test_the_first_one_blamed_stays() -> None:
    """Older news that comes later does not change what the caller was told."""
    barrier = Barrier(0)
    barrier.receive_token(2, 1, 0)
    barrier.receive_token(1, 1, 1)
    barrier.enter([0, 1, 2])
    assert barrier.passed == 1
    barrier.enter([0, 1, 2])
    assert barrier.receive_failure(2, 1)[-1] == BarrierFailed(2, 1)
    assert barrier.receive_failure(1, 2) == [BarrierFailed(2, 1)]


def test_the_news_of_a_later_barrier_does_not_break_this_one() -> None:
    """Others may pass this one, go on, and lose somebody there."""
    barrier = Barrier(0)
    barrier.enter([0, 1, 2])
    barrier.receive_token(2, 1, 0)
    assert barrier.receive_failure(2, 1) == []
    effects = barrier.receive_token(1, 1, 1)
    assert [type(effect).__name__ for effect in effects] == ["BarrierPassed"]
    assert barrier.enter([0, 1, 2])[-1] == BarrierFailed(2, 1)


def test_news_that_comes_before_we_enter_is_kept() -> None:
    """We fail on arrival, without waiting for anybody, and tell all but the one it is about."""
    barrier = Barrier(0)
    assert barrier.receive_failure(1, 2) == []
    assert barrier.enter([0, 1, 2]) == [
        Token(1, 1, 0),
        Announce(1, 1, 2),
        BarrierFailed(1, 2),
    ]


class Deaths(RuleBasedStateMachine):
    """Hypothesis chooses who enters, what arrives, who dies and what of its words is lost."""

    @initialize(size=st.integers(2, 6))
    def gather(self, size: int) -> None:
        """A new group."""
        self.hall = Hall(range(size))

    @rule(data=st.data())
    def enter(self, data: st.DataObject) -> None:
        """Somebody calls the barrier, again or anew."""
        self.hall.enter(data.draw(st.sampled_from(sorted(self.hall.alive))))

    @precondition(lambda self: self.hall.pending())
    @rule(data=st.data(), copies=st.integers(1, 2))
    def deliver(self, data: st.DataObject, copies: int) -> None:
        """Some link delivers its oldest message."""
        self.hall.deliver(data.draw(st.sampled_from(sorted(self.hall.pending()))), copies)

    @rule(data=st.data())
    def announce(self, data: st.DataObject) -> None:
        """Somebody that waits says so."""
        member = data.draw(st.sampled_from(sorted(self.hall.alive)))
        if self.hall.is_waiting(member):
            self.hall.announce(member)

    @precondition(lambda self: len(self.hall.alive) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Somebody is gone, and perhaps its last words with it."""
        member = data.draw(st.sampled_from(sorted(self.hall.alive)))
        self.hall.lose(member, lambda sent: data.draw(st.integers(0, sent)))

    def teardown(self) -> None:
        """In the end everybody that is left passes, or fails because of one that is gone."""
        if not hasattr(self, "hall"):
            return
        hall, chance = self.hall, random.Random(0)
        complete = len(hall.alive) == len(hall.members)
        call_until_it_fails(hall, chance)
        assert not any(hall.is_waiting(member) for member in hall.alive)
        assert complete or hall.alive <= hall.failed.keys()


TestDeaths = Deaths.TestCase
TestDeaths.settings = settings(stateful_step_count=25)
