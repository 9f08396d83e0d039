"""One topology for several threads: changes whole, snapshots still."""

import itertools
import threading

import pytest

from potluck import ConnectionProfile, SharedTopology
from potluck.core.topology_links import RateSource
from potluck.runtime.bandwidth import Bandwidth
from potluck.vocabulary import LinkMatrix, NodeId, ProcessId, View
from support.health import process
from support.threads import together

A, B, C = map(process, "abc")
ROOM = ("10.0.0.2", 5000)


class Clock:
    """Pushed by the test."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        """What it shows."""
        return self.now


def shared(clock: Clock | None = None) -> SharedTopology:
    """A, who knows B."""
    clock = clock or Clock()
    topology = SharedTopology(A, clock=clock)
    topology.update(lambda known: known.add_node(B, now=clock(), addresses=[ROOM]))
    return topology


def test_a_snapshot_stands_still() -> None:
    """The same object as long as nothing changes, and never changed itself."""
    topology = shared()
    before = topology.snapshot()
    assert topology.snapshot() is before
    topology.update(lambda known: known.remove_node(B))
    assert list(before) == [A, B]
    assert list(topology) == [A]
    assert len(topology) == 1


def test_heartbeats_leave_a_sign_of_life_and_a_latency() -> None:
    """From a peer that is known; a stranger's are ignored."""
    clock = Clock()
    topology = shared(clock)
    clock.now = 20.0
    topology.heard(B)
    assert topology.snapshot().node(B).last_seen == 20.0
    topology.heard(B, round_trip=0.002, jitter=0.001, address=ROOM)
    assert topology.snapshot().connection(A, B) == ConnectionProfile(
        latency=1_000_000, jitter=500_000, measured_at=20.0, address=ROOM
    )
    topology.heard(C, round_trip=0.1)
    assert C not in topology.snapshot()
    assert topology.addresses(B) == (ROOM,)


def test_probes_and_collectives_fill_the_matrix() -> None:
    """In the order of ranks, whichever came first."""
    clock = Clock()
    topology = shared(clock)
    view = View("f" * 32, 1, (B, A))
    topology.rated(B, Bandwidth(up=100, down=50), address=ROOM)
    assert topology.link_matrix(view) == LinkMatrix((50, 100), (100, 50), ((0, 0), (0, 0)))
    best = topology.snapshot().connection(A, B)
    assert best is not None
    assert (best.rated_by, best.rated_at) == (RateSource.PROBE, 10.0)
    clock.now = 20.0
    links = LinkMatrix((70, 80), (90, 60), ((0, 5), (6, 0)))
    topology.learn(links, view)
    assert topology.link_matrix(view) == links


def test_the_stale_are_pruned() -> None:
    """After two minutes unless told otherwise."""
    clock = Clock()
    topology = shared(clock)
    clock.now = 100.0
    assert topology.prune() == ()
    clock.now = 131.0
    assert topology.prune() == (B,)


@pytest.mark.parametrize("size", [2, 12])
def test_the_ring_goes_the_shortest_way_round(size: int) -> None:
    """Members on a circle that joined in any order stand as they do on the circle."""
    members = tuple(ProcessId(NodeId(chr(ord("a") + n) * 32), 1) for n in range(size))
    place = {member: 5 * n % size if size > 2 else n for n, member in enumerate(members)}
    apart = [
        [min((place[a] - place[b]) % size, (place[b] - place[a]) % size) for b in members]
        for a in members
    ]
    links = LinkMatrix(
        (10**8,) * size,
        (10**8,) * size,
        tuple(tuple(hops * 10**6 for hops in row) for row in apart),
    )
    topology = SharedTopology(members[0])
    view = View("f" * 32, 1, members)
    topology.learn(links, view)
    ring = topology.ring_order(view)
    steps = [(place[b] - place[a]) % size for a, b in itertools.pairwise(ring)]
    assert sorted(ring) == sorted(members)
    assert set(steps) in ({1}, {size - 1})


def test_threads_do_not_step_on_each_other() -> None:
    """Writers and readers at once; nothing is lost, and nobody sees a change half done."""
    topology = SharedTopology(A)
    go = threading.Event()

    def write(letter: str) -> None:
        go.wait()
        for number in range(50):
            node = ProcessId(NodeId(letter * 32), number)
            topology.update(lambda known, node=node: known.add_node(node, now=1.0))  # type: ignore[misc]
            topology.heard(node, round_trip=0.001)

    def read() -> None:
        go.set()
        while len(snapshot := topology.snapshot()) < 151:
            assert all(snapshot.node(node).process == node for node in snapshot)

    together(*(lambda letter=letter: write(letter) for letter in "xyz"), read)
    assert all(topology.snapshot().connection(A, node) for node in topology if node != A)
