"""The lossy network: order within a flow, loss, delay, and cuts that keep or lose."""

from random import Random

import pytest

from potluck.testing.clock import VirtualClock
from potluck.testing.network import HELD_MESSAGES, LinkQuality, LossyNetwork


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
