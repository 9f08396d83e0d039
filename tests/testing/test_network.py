"""Simulated connections have the manners of TCP: order, closing, resets, silence without power."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from potluck._types import NodeId, ProcessId
from potluck.testing.clock import VirtualClock
from potluck.testing.network import HELD_MESSAGES, LinkQuality, LossyNetwork
from potluck.testing.process import ConnectionEnd, SimulatedProcess, join_ends


class Owner(SimulatedProcess):
    """Writes down what happens to its end; nothing runs in it."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.is_powered = True
        self.told: list[Any] = []

    def connection_opened(self, end: ConnectionEnd) -> None:
        """Write it down."""
        self.told.append("opened")

    def connection_closed(self, end: ConnectionEnd, cause: str) -> None:
        """Write it down."""
        self.told.append(cause)

    def connection_delivers(self, end: ConnectionEnd, message: Any) -> None:
        """Write it down."""
        self.told.append(message)


class Pair:
    """Two owners, and a connection that the first has dialled."""

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
            self.a.told.clear()
            self.b.told.clear()


def test_both_ends_know_each_other() -> None:
    """The hello carries the card; the dialler's end opens when the answer arrives."""
    pair = Pair(is_open=False)
    assert (pair.here.card, pair.there.card) == ("card of b", "card of a")
    pair.there.open_other()
    pair.there.open()
    assert (pair.a.told, pair.b.told) == ([], ["opened"])
    assert pair.here.is_in_use
    pair.clock.advance(1.0)
    assert pair.a.told == ["opened"]


def test_a_goodbye_arrives_after_what_was_said_before() -> None:
    """In order, and once."""
    pair = Pair()
    pair.here.send(1)
    pair.here.send(2)
    pair.here.close("goodbye")
    pair.here.close("again")
    pair.clock.advance(1.0)
    assert pair.b.told == [1, 2, "goodbye"]
    assert not pair.there.is_in_use


def test_whoever_speaks_to_a_closed_end_is_told() -> None:
    """As a machine answers with a reset for a connection it does not know."""
    pair = Pair()
    pair.there.drop()
    pair.here.send("anybody there?")
    pair.clock.advance(1.0)
    assert pair.b.told == []
    assert pair.a.told == ["the connection was reset"]


def test_a_machine_without_power_says_nothing() -> None:
    """Until it is back."""
    pair = Pair()
    pair.there.drop()
    pair.b.is_powered = False
    pair.here.send("anybody there?")
    pair.clock.advance(1.0)
    assert pair.a.told == []
    pair.b.is_powered = True
    pair.here.send("anybody there?")
    pair.clock.advance(1.0)
    assert pair.a.told == ["the connection was reset"]


def test_a_dialler_that_is_gone_resets_what_it_asked_for() -> None:
    """The answer to its hello finds nobody."""
    pair = Pair(is_open=False)
    pair.here.drop()
    pair.there.open_other()
    pair.there.open()
    pair.clock.advance(1.0)
    assert pair.b.told == ["opened", "the connection was reset"]
    assert pair.a.told == []


def test_an_answer_that_crosses_a_goodbye_opens_nothing() -> None:
    """The acceptor died before its answer arrived: the dialler never knew the connection."""
    pair = Pair(is_open=False)
    pair.there.open()
    pair.there.close("dying")
    pair.clock.advance(1.0)
    assert pair.a.told == []
    assert not pair.here.is_in_use


# --------------------------------------------------------------------------------------------------
# The lossy network: order within a flow, loss, delay, and cuts that keep or lose.


def network(seed: int = 1, quality: LinkQuality | None = None) -> LossyNetwork:
    """A network with a clock of its own."""
    return LossyNetwork(VirtualClock(), Random(seed), quality)


def test_a_flow_keeps_its_order() -> None:
    """However long each message takes, the next one does not overtake it."""
    seen: list[int] = []
    net = network(quality=LinkQuality(0.0, 1.0))
    flow = net.flow("a", "b")
    for number in range(100):
        flow.send(seen.append, number)
    net.clock.advance(1.0)
    assert seen == list(range(100))


def test_flows_overtake_each_other() -> None:
    """Two flows of one link arrive interleaved in another order than they were sent."""
    seen: list[int] = []
    net = network(quality=LinkQuality(0.0, 1.0))
    for number in range(20):
        net.flow("a", "b").send(seen.append, number)
    net.clock.advance(1.0)
    assert sorted(seen) == list(range(20))
    assert seen != list(range(20))


def test_the_same_seed_takes_the_same_course() -> None:
    """Chance is repeated by its seed, and different for another."""

    def course(seed: int) -> list[tuple[float, int]]:
        seen: list[tuple[float, int]] = []
        net = network(seed, LinkQuality(0.0, 1.0, loss=0.5))
        for number in range(50):
            flow = net.flow("a", "b")
            flow.send(lambda n, now=net.clock: seen.append((now.now, n)), number)
        net.clock.advance(1.0)
        return seen

    assert course(3) == course(3)
    assert course(3) != course(4)


@pytest.mark.parametrize(("loss", "arrived"), [(0.0, 200), (1.0, 0)])
def test_loss_takes_its_share(loss: float, arrived: int) -> None:
    """Nothing is lost at 0, everything at 1; what is certain arrives all the same."""
    seen: list[int] = []
    net = network(quality=LinkQuality(loss=loss))
    flow = net.flow("a", "b")
    for number in range(200):
        flow.send(seen.append, number)
    net.clock.advance(1.0)
    assert len(seen) == arrived
    flow.send(seen.append, -1, certain=True)
    net.clock.advance(1.0)
    assert seen[-1] == -1


def test_a_machine_reaches_itself_without_loss() -> None:
    """The links' quality says nothing about what stays within a machine."""
    seen: list[int] = []
    net = network(quality=LinkQuality(1.0, 2.0, loss=1.0))
    net.flow("a", "a").send(seen.append, 1)
    net.clock.advance(0.1)
    assert seen == [1]


def test_a_link_can_have_a_quality_of_its_own() -> None:
    """One direction is shaped, the other is not; None takes it back."""
    net = network(quality=LinkQuality(0.0, 0.0))
    net.shape("a", "b", LinkQuality(1.0, 1.0, loss=1.0))
    assert net.delay("a", "b") == 1.0
    assert net.loses("a", "b")
    assert net.delay("b", "a") == 0.0
    net.shape("a", "b", None)
    assert net.delay("a", "b") == 0.0
    assert not net.loses("a", "b")


def test_a_cut_stops_what_is_under_way_and_keeps_it() -> None:
    """As TCP repeats what was not acknowledged: it arrives after the cut, in order."""
    seen: list[int] = []
    net = network()
    flow = net.flow("a", "b")
    flow.send(seen.append, 1)
    net.cut("a", "b")
    flow.send(seen.append, 2)
    net.clock.advance(1.0)
    assert seen == []
    assert net.cuts == (("a", "b"),)
    assert not net.reaches("a", "b")
    assert net.reaches("b", "a")
    assert not net.is_open("b", "a")
    net.heal("a", "b")
    net.heal("b", "a")
    flow.send(seen.append, 3)
    net.clock.advance(1.0)
    assert seen == [1, 2, 3]
    assert net.is_open("a", "b")


def test_a_cut_can_lose_what_it_stops() -> None:
    """As when the connection ended before the cut was mended."""
    seen: list[int] = []
    net = network()
    flow = net.flow("a", "b")
    net.cut("a", "b", keep=False)
    flow.send(seen.append, 1)
    net.clock.advance(1.0)
    net.heal("a", "b")
    net.clock.advance(1.0)
    assert seen == []


def test_what_is_kept_is_bounded() -> None:
    """A long cut holds as much as an outbox does, and loses the rest."""
    seen: list[int] = []
    net = network()
    flow = net.flow("a", "b")
    net.cut("a", "b")
    for number in range(HELD_MESSAGES + 10):
        flow.send(seen.append, number)
    net.clock.advance(1.0)
    net.heal_all()
    net.clock.advance(1.0)
    assert seen == list(range(HELD_MESSAGES))


def test_groups_are_separated_both_ways() -> None:
    """Links within a group stay open."""
    net = network()
    net.separate(["a", "b"], ["c"])
    assert not net.reaches("a", "c")
    assert not net.reaches("c", "b")
    assert net.is_open("a", "b")


@pytest.mark.parametrize("wrong", [(-1.0, 1.0, 0.0), (2.0, 1.0, 0.0), (0.0, 1.0, 1.5)])
def test_a_quality_that_cannot_be_is_refused(wrong: tuple[float, float, float]) -> None:
    """The error says what a link is."""
    with pytest.raises(ValueError, match="A link takes from 0 seconds up"):
        LinkQuality(*wrong)
