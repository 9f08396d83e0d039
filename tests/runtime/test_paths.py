"""Which address of a peer is tried first."""

import socket
import time
from collections.abc import Sequence

from potluck.core.topology_links import Endpoint
from potluck.messages import Peer
from potluck.runtime.paths import PathFinder, knock


def test_only_who_answers_has_a_time() -> None:
    """Not a closed port, nor what is no address; the same address is knocked at once."""
    with (
        socket.create_server(("127.0.0.1", 0)) as open_,
        socket.create_server(("127.0.0.1", 0)) as closed,
    ):
        here, gone = open_.getsockname(), closed.getsockname()
        closed.close()
        found = knock([here, here, gone, ("no number", 80)], within=5)
        assert list(found) == [here]
        assert 0 < found[here] < 5


def test_nobody_to_knock_at_takes_no_time() -> None:
    """An empty list is no reason to wait."""
    begin = time.monotonic()
    assert knock([], within=30) == {}
    assert time.monotonic() - begin < 10


class Network:
    """Answers knocks as told, and counts them."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.knocks = 0
        self.now = 0.0

    def knock(self, addresses: Sequence[Endpoint]) -> dict[Endpoint, float]:
        """How long each address takes; letters stand for hosts."""
        self.knocks += len(addresses)
        return {each: self.seconds[each[0]] for each in addresses if each[0] in self.seconds}

    def order(self, finder: PathFinder, hosts: str = "abc") -> str:
        """The order in which hosts are tried."""
        (peer,) = finder.sorted([Peer(list(hosts), 5000, "desk")])
        return "".join(peer.hosts)


def test_the_fastest_is_tried_first() -> None:
    """If it is clearly faster than the one by which the peer was reached; the silent last."""
    network = Network(b=0.004, c=0.0003)
    finder = PathFinder(lambda: network.now, network.knock)
    assert network.order(finder) == "cba"
    assert network.order(finder, "bc") == "cb"
    network = Network(a=0.0004, b=0.004, c=0.0003)
    assert network.order(PathFinder(lambda: network.now, network.knock)) == "acb"
    network = Network()
    assert network.order(PathFinder(lambda: network.now, network.knock)) == "abc"


def test_what_was_measured_holds_for_a_minute() -> None:
    """A view that changes often does not knock every time."""
    network = Network(a=0.004, b=0.0003)
    finder = PathFinder(lambda: network.now, network.knock)
    for network.now in (0.0, 30.0, 60.0):
        assert network.order(finder, "ab") == "ba"
    assert network.knocks == 2
    network.seconds = {"a": 0.0003, "b": 0.004}
    network.now = 61.0
    assert network.order(finder, "ab") == "ab"
    assert network.knocks == 4


def test_only_so_many_addresses_are_remembered() -> None:
    """Whoever comes and goes with ever new ones fills no memory; the latest count."""
    network = Network()
    finder = PathFinder(lambda: network.now, network.knock)
    for number in range(400):
        finder.sorted([Peer([f"x{number}", f"y{number}"], 5000, "desk")])
    assert network.knocks == 800
    finder.sorted([Peer(["x399", "y399"], 5000, "desk")])
    assert network.knocks == 800
    finder.sorted([Peer(["x0", "y0"], 5000, "desk")])
    assert network.knocks == 802


def test_whoever_has_no_choice_is_left_as_it_is() -> None:
    """A peer with one address, and one on this machine."""
    peers = [
        Peer(["10.99.0.1"], 5000, "far"),
        Peer(["127.0.0.1", "10.99.0.1"], 5000, "near"),
    ]
    assert PathFinder().sorted(peers) == peers
    assert PathFinder().sorted([]) == []
