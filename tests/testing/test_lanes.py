"""Lanes have the manners of connections: order, goodbyes, resets, and silence without power."""

from __future__ import annotations

from random import Random
from typing import Any

from potluck.testing.clock import VirtualClock
from potluck.testing.lanes import LaneEnd, join_ends
from potluck.testing.network import LossyNetwork
from potluck.vocabulary import NodeId, ProcessId


class Owner:
    """Writes down what happens to its end."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.is_powered = True
        self.seen: list[Any] = []

    def lane_opened(self, end: LaneEnd) -> None:
        """Write it down."""
        self.seen.append("opened")

    def lane_closed(self, end: LaneEnd, cause: str) -> None:
        """Write it down."""
        self.seen.append(cause)

    def lane_delivers(self, end: LaneEnd, message: Any) -> None:
        """Write it down."""
        self.seen.append(message)


class Pair:
    """Two owners, and a lane that the first has dialled."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.clock = VirtualClock()
        self.network = LossyNetwork(self.clock, Random(1))
        self.a, self.b = Owner("a"), Owner("b")
        ids = [ProcessId(NodeId(name * 32), 1) for name in "ab"]
        self.here, self.there = join_ends(
            self.network, (self.a, ids[0], "card of a"), (self.b, ids[1], "card of b")
        )
        if is_open:
            self.there.open_other()
            self.there.open()
            self.clock.advance(1.0)
            self.a.seen.clear()
            self.b.seen.clear()


def test_both_ends_know_each_other() -> None:
    """The hello carries the card; the dialler's end opens when the answer arrives."""
    pair = Pair(is_open=False)
    assert (pair.here.card, pair.there.card) == ("card of b", "card of a")
    pair.there.open_other()
    pair.there.open()
    assert (pair.a.seen, pair.b.seen) == ([], ["opened"])
    assert pair.here.is_in_use
    pair.clock.advance(1.0)
    assert pair.a.seen == ["opened"]


def test_a_goodbye_arrives_after_what_was_said_before() -> None:
    """In order, and once."""
    pair = Pair()
    pair.here.send(1)
    pair.here.send(2)
    pair.here.close("goodbye")
    pair.here.close("again")
    pair.clock.advance(1.0)
    assert pair.b.seen == [1, 2, "goodbye"]
    assert not pair.there.is_in_use


def test_whoever_speaks_to_a_closed_end_is_told() -> None:
    """As a machine answers with a reset for a connection it does not know."""
    pair = Pair()
    pair.there.drop()
    pair.here.send("anybody there?")
    pair.clock.advance(1.0)
    assert pair.b.seen == []
    assert pair.a.seen == ["the connection was reset"]


def test_a_machine_without_power_says_nothing() -> None:
    """Until it is back."""
    pair = Pair()
    pair.there.drop()
    pair.b.is_powered = False
    pair.here.send("anybody there?")
    pair.clock.advance(1.0)
    assert pair.a.seen == []
    pair.b.is_powered = True
    pair.here.send("anybody there?")
    pair.clock.advance(1.0)
    assert pair.a.seen == ["the connection was reset"]


def test_a_dialler_that_is_gone_resets_what_it_asked_for() -> None:
    """The answer to its hello finds nobody."""
    pair = Pair(is_open=False)
    pair.here.drop()
    pair.there.open_other()
    pair.there.open()
    pair.clock.advance(1.0)
    assert pair.b.seen == ["opened", "the connection was reset"]
    assert pair.a.seen == []


def test_an_answer_that_crosses_a_goodbye_opens_nothing() -> None:
    """The acceptor died before its answer arrived: the dialler never knew the lane."""
    pair = Pair(is_open=False)
    pair.there.open()
    pair.there.close("dying")
    pair.clock.advance(1.0)
    assert pair.a.seen == []
    assert not pair.here.is_in_use
