"""Matching: messages and receives of one key meet strictly in order, keys never wait."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from potluck.backend.messages import MatchQueue

Box = MatchQueue[str, str, str]
keys = st.sampled_from(["a", "b", "c"])


@given(st.lists(st.tuples(keys, st.sampled_from(["post", "arrive"]))))
def test_the_nth_message_meets_the_nth_receive(moves: list[tuple[str, str]]) -> None:
    """Within a key, whoever comes first, and whatever other keys do."""
    box = Box()
    count = {(key, move): itertools.count() for key in "abc" for move in ("post", "arrive")}
    for key, move in moves:
        mine = f"{key}{next(count[key, move])}"
        partner = box.post(key, mine) if move == "post" else box.arrive(key, mine)
        assert partner in {None, mine}


@pytest.mark.parametrize(("posted", "arrived"), [(2, 0), (0, 2)])
def test_one_that_waits_can_be_taken_back(posted: int, arrived: int) -> None:
    """Those behind it move up; what was never there, or has met its partner, stays gone."""
    box = Box()
    add = box.post if posted else box.arrive
    take_back = box.take_back_receive if posted else box.take_back_message
    for item in ("first", "second"):
        add("a", item)
    assert not take_back("a", "third")
    assert not take_back("b", "first")
    assert take_back("a", "first")
    assert not take_back("a", "first")
    assert (box.arrive if posted else box.post)("a", "partner") == "second"
    assert not take_back("a", "second")
    assert box.awaited_keys() == []
    assert box.waiting_messages() == []


def test_the_oldest_receive_can_be_taken_for_a_message_that_does_not_wait() -> None:
    """In order; where nobody waits, nothing is left behind."""
    box = Box()
    assert box.take_receive("a") is None
    assert box.awaited_keys() == []
    for receive in ("first", "second"):
        box.post("a", receive)
    assert box.take_receive("b") is None
    assert [box.take_receive("a") for _ in range(3)] == ["first", "second", None]
    assert box.awaited_keys() == []


def test_a_receive_whose_message_was_withdrawn_comes_first_again() -> None:
    """It was there before the others, so it gets the next message."""
    box = Box()
    box.post("a", "early")
    box.arrive("a", "withdrawn")
    box.post("a", "late")
    assert box.return_receive("a", "early") is None
    assert box.arrive("a", "next") == "early"


def test_a_receive_whose_message_was_withdrawn_may_find_the_next_one_waiting() -> None:
    """Then it has it at once."""
    box = Box()
    box.post("a", "early")
    box.arrive("a", "withdrawn")
    box.arrive("a", "next")
    assert box.return_receive("a", "early") == "next"


def test_a_message_whose_receive_gave_up_comes_first_again() -> None:
    """Nothing is lost and nothing overtakes it."""
    box = Box()
    box.arrive("a", "early")
    box.post("a", "gave up")
    box.arrive("a", "late")
    assert box.return_message("a", "early") is None
    assert box.waiting_messages() == ["early", "late"]
    assert box.post("a", "next") == "early"


def test_a_message_whose_receive_gave_up_may_find_the_next_one_waiting() -> None:
    """Then it is delivered at once."""
    box = Box()
    box.arrive("a", "early")
    box.post("a", "gave up")
    box.post("a", "next")
    assert box.return_message("a", "early") == "next"


def test_abandoning_ends_receives_and_keeps_messages() -> None:
    """A sender that is gone sends no more, but what it sent can still be read."""
    box = Box()
    for receive in ("one", "two"):
        box.post("a", receive)
    box.post("b", "three")
    box.arrive("c", "message")
    assert box.abandon(["a", "c", "nobody"]) == ["one", "two"]
    assert box.awaited_keys() == ["b"]
    assert box.post("c", "late") == "message"


class TwoQueues(RuleBasedStateMachine):
    """The mailbox beside the plainest model: two lists for each key."""

    def __init__(self) -> None:
        super().__init__()
        self.box: MatchQueue[str, int, int] = MatchQueue()
        self.receives: dict[str, list[int]] = {key: [] for key in "abc"}
        self.messages: dict[str, list[int]] = {key: [] for key in "abc"}
        self.paired: list[tuple[str, int, int]] = []  # (key, receive, message)
        self.numbers = itertools.count(1)

    def met(self, key: str, receive: int, message: int | None) -> None:
        """Remember who has met, for those rules that part them again."""
        if message is not None:
            self.paired.append((key, receive, message))

    @rule(key=keys)
    def post(self, key: str) -> None:
        """A receive takes the oldest message or waits at the end."""
        receive = next(self.numbers)
        expected = self.messages[key].pop(0) if self.messages[key] else None
        if expected is None:
            self.receives[key].append(receive)
        assert self.box.post(key, receive) == expected
        self.met(key, receive, expected)

    @rule(key=keys)
    def arrive(self, key: str) -> None:
        """A message takes the oldest receive or waits at the end."""
        message = next(self.numbers)
        expected = self.receives[key].pop(0) if self.receives[key] else None
        if expected is None:
            self.messages[key].append(message)
        assert self.box.arrive(key, message) == expected
        if expected is not None:
            self.met(key, expected, message)

    @rule(key=keys)
    def take_receive(self, key: str) -> None:
        """A message that never waits takes the oldest receive."""
        expected = self.receives[key].pop(0) if self.receives[key] else None
        assert self.box.take_receive(key) == expected
        if expected is not None:
            self.met(key, expected, next(self.numbers))

    @rule(key=keys, place=st.integers(0, 3))
    def take_back(self, key: str, place: int) -> None:
        """One that waits can be removed from any place, exactly once."""
        for queue, remove in (
            (self.receives[key], self.box.take_back_receive),
            (self.messages[key], self.box.take_back_message),
        ):
            if place < len(queue):
                item = queue.pop(place)
                assert remove(key, item)
                assert not remove(key, item)
            assert not remove(key, 0)

    @rule(data=st.data(), withdrawn=st.booleans())
    def part(self, data: st.DataObject, withdrawn: bool) -> None:
        """One of a pair gives up; the other is first in its queue, or meets the next at once."""
        if not self.paired:
            return
        index = data.draw(st.integers(0, len(self.paired) - 1))
        key, receive, message = self.paired.pop(index)
        if withdrawn:
            expected = self.messages[key].pop(0) if self.messages[key] else None
            if expected is None:
                self.receives[key].insert(0, receive)
            assert self.box.return_receive(key, receive) == expected
            self.met(key, receive, expected)
        else:
            successor = self.receives[key].pop(0) if self.receives[key] else None
            if successor is None:
                self.messages[key].insert(0, message)
            assert self.box.return_message(key, message) == successor
            if successor is not None:
                self.met(key, successor, message)

    @rule(gone=st.lists(keys, unique=True))
    def abandon(self, gone: list[str]) -> None:
        """All receives of the keys are given back, in order; messages stay."""
        expected = [receive for key in gone for receive in self.receives[key]]
        for key in gone:
            self.receives[key].clear()
        assert self.box.abandon(gone) == expected

    @invariant()
    def at_most_one_side_waits(self) -> None:
        """What waits is what the model says, and never both sides of one key."""
        assert set(self.box.awaited_keys()) == {key for key in "abc" if self.receives[key]}
        waiting = [message for key in "abc" for message in self.messages[key]]
        assert sorted(self.box.waiting_messages()) == sorted(waiting)
        assert not any(self.receives[key] and self.messages[key] for key in "abc")


TestTwoQueues = TwoQueues.TestCase
TestTwoQueues.settings = settings(stateful_step_count=25)


def test_a_message_that_waits_can_be_seen() -> None:
    """Until a receive takes it, and only under its own key."""
    box = Box()
    box.arrive("a", "message")
    assert (box.has_message("a"), box.has_message("b")) == (True, False)
    box.post("a", "receive")
    assert not box.has_message("a")
