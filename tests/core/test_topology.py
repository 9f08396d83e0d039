"""The cluster as a graph: stable ids, measured links, a matrix for the planner."""

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import ClusterTopology, ConnectionProfile, NodeProfile
from potluck.core.topology_links import RateSource
from potluck.vocabulary import LinkMatrix, ProcessId, View
from support.health import process

A, B, C = map(process, "abc")
ROOM, HALL = ("10.0.0.2", 5000), ("10.0.1.2", 5000)


def view(*members: ProcessId) -> View:
    """A view of these, in this order."""
    return View("f" * 32, 1, members)


def three() -> ClusterTopology:
    """A knows B and C."""
    topology = ClusterTopology(A, now=1.0)
    topology.add_node(B, now=1.0)
    topology.add_node(C, now=1.0)
    return topology


# --- who is there ---


def test_whoever_is_told_of_is_there() -> None:
    """What is told later completes what was told before."""
    topology = ClusterTopology(A, NodeProfile(host="desk"))
    topology.add_node(B, now=1.0, profile=NodeProfile(host="attic"), addresses=[ROOM])
    topology.add_node(B, now=2.0)
    info = topology.node(B)
    assert (info.process, info.addresses, info.last_seen) == (B, (ROOM,), 2.0)
    assert info.profile == NodeProfile(host="attic")
    topology.add_node(B, now=1.0, profile=NodeProfile(host="cellar"), addresses=[HALL])
    info = topology.node(B)
    assert (info.addresses, info.last_seen) == ((HALL,), 2.0)
    assert info.profile == NodeProfile(host="cellar")
    assert list(topology) == [A, B]
    assert len(topology) == 2


def test_a_stranger_is_nobody() -> None:
    """Asking for one is an error, telling of one without introduction is ignored."""
    topology = ClusterTopology(A)
    topology.seen(B, now=1.0)
    topology.used(B, ROOM)
    topology.failed(B, ROOM, now=1.0)
    topology.remove_node(B)
    topology.add_connection(A, B, ConnectionProfile(latency=1))
    topology.add_connection(B, A, ConnectionProfile(latency=1))
    assert B not in topology
    assert topology.addresses(B, now=1.0) == ()
    assert topology.connection(A, B) is None
    with pytest.raises(KeyError):
        topology.node(B)


def test_removing_one_changes_nothing_for_the_others() -> None:
    """Ids are stable: the rest keeps its links, and a newcomer inherits none."""
    topology = three()
    topology.add_connection(A, C, ConnectionProfile(latency=7))
    topology.add_connection(B, C, ConnectionProfile(latency=8))
    topology.remove_node(B)
    assert topology.nodes == (A, C)
    assert topology.connection(A, C) == ConnectionProfile(latency=7)
    topology.add_node(B, now=2.0)
    assert topology.connection(B, C) is None
    topology.remove_node(A)
    assert A in topology  # nobody removes himself


def test_the_stale_are_pruned() -> None:
    """Whoever was not seen for a while, but never ourselves; a clock set back prunes nobody."""
    topology = three()
    topology.seen(C, now=50.0)
    assert topology.prune(now=-100.0, max_age=30.0) == ()
    assert topology.prune(now=60.0, max_age=timedelta(minutes=1)) == ()
    assert topology.prune(now=60.0, max_age=30.0) == (B,)
    assert topology.prune(now=60.0, max_age=30.0) == ()
    assert topology.remote_nodes == (C,)


def test_a_machine_counts_once_however_many_processes_it_runs() -> None:
    """Cores and memory add up over machines."""
    desk = NodeProfile(cores=8, memory=100)
    topology = ClusterTopology(A, desk)
    topology.add_node(ProcessId(A.node, 2), now=1.0, profile=desk)
    topology.add_node(B, now=1.0, profile=NodeProfile(cores=2, memory=50))
    topology.add_node(C, now=1.0)
    assert (topology.total_cores, topology.total_memory) == (10, 150)


# --- links ---


def test_addresses_are_ordered_by_what_was_measured() -> None:
    """And fail over to the next."""
    topology = ClusterTopology(A)
    topology.add_node(B, now=1.0, addresses=[ROOM, HALL])
    assert topology.addresses(B, now=1.0) == (ROOM, HALL)
    topology.add_connection(A, B, ConnectionProfile(latency=10**6, address=ROOM))
    topology.add_connection(A, B, ConnectionProfile(latency=10**5, address=HALL))
    assert topology.addresses(B, now=1.0) == (HALL, ROOM)
    best = topology.connection(A, B)
    assert best is not None
    assert best.address == HALL
    topology.failed(B, HALL, now=1.0)
    assert topology.addresses(B, now=1.5) == (ROOM, HALL)
    topology.used(B, HALL)
    assert topology.addresses(B, now=1.5) == (HALL, ROOM)


def test_a_link_to_oneself_is_none() -> None:
    """It is not kept."""
    topology = ClusterTopology(A)
    topology.add_connection(A, A, ConnectionProfile(latency=1))
    assert topology.connection(A, A) is None


# --- for the planner ---


def test_the_matrix_is_in_the_order_of_ranks() -> None:
    """Unknown links are zero, a latency counts for the way back too if nothing else is known."""
    topology = three()
    topology.add_connection(A, B, ConnectionProfile(latency=100, up=5, down=6, rated_at=1.0))
    topology.add_connection(B, A, ConnectionProfile(latency=300))
    topology.add_connection(C, B, ConnectionProfile(latency=1 << 40, up=1 << 70))
    assert topology.link_matrix(view(B, A)) == LinkMatrix((6, 5), (5, 6), ((0, 300), (100, 0)))
    links = topology.link_matrix(view(C, B, process("d")))
    assert links.up == ((1 << 63) - 1, 0, 0)
    assert links.down == (0, (1 << 63) - 1, 0)
    assert links.latency == ((0, (1 << 32) - 1, 0), ((1 << 32) - 1, 0, 0), (0, 0, 0))


def test_a_newer_probe_goes_before_what_was_agreed_earlier() -> None:
    """And what was agreed before an older probe."""
    topology = three()
    links = LinkMatrix((100, 100), (100, 100), ((0, 5), (5, 0)))
    topology.learn(links, view(A, B), now=10.0)
    old = ConnectionProfile(up=70, rated_at=9.0, rated_by=RateSource.PROBE, address=ROOM)
    topology.add_connection(A, B, old)
    assert topology.link_matrix(view(A, B)).up[0] == 100
    new = ConnectionProfile(up=80, rated_at=11.0, rated_by=RateSource.PROBE, address=ROOM)
    topology.add_connection(A, B, new)
    assert topology.link_matrix(view(A, B)).up == (80, 100)
    assert topology.link_matrix(view(A, B)).down == (100, 80)


def test_only_what_was_measured_is_learned() -> None:
    """Zeros change nothing; a matrix of another size is a mistake."""
    topology = three()
    links = LinkMatrix((9, 8), (7, 6), ((0, 5), (4, 0)))
    topology.learn(links, view(A, B), now=2.0)
    topology.learn(LinkMatrix.uniform(2, rate=0, latency=0), view(A, B), now=3.0)
    assert topology.link_matrix(view(A, B)) == links
    with pytest.raises(ValueError, match="2 ranks were measured, the view has 3 members"):
        topology.learn(links, view(A, B, C), now=3.0)


@settings(max_examples=30)
@given(st.data(), st.integers(1, 6))
def test_what_was_learned_is_given_back_for_any_part(data: st.DataObject, size: int) -> None:
    """For the same view the same matrix; for a part of it, in any order, the same figures."""
    members = tuple(map(process, "abcdef"[:size]))
    rates = st.lists(st.integers(1, 10**10), min_size=size, max_size=size).map(tuple)
    times = [
        tuple(0 if a == b else data.draw(st.integers(1, 10**9)) for b in range(size))
        for a in range(size)
    ]
    links = LinkMatrix(data.draw(rates), data.draw(rates), tuple(times))
    topology = ClusterTopology(A)
    topology.learn(links, view(*members), now=1.0)
    assert topology.link_matrix(view(*members)) == links
    part = data.draw(st.permutations(range(size)))[: data.draw(st.integers(1, size))]
    found = topology.link_matrix(view(*(members[rank] for rank in part)))
    assert found.up == tuple(links.up[rank] for rank in part)
    assert found.latency == tuple(tuple(links.latency[a][b] for b in part) for a in part)


# --- as a graph ---


def test_the_graph_is_a_copy_to_compute_with() -> None:
    """It knows profiles and connections, and may be changed without harm."""
    topology = three()
    topology.add_connection(A, B, ConnectionProfile(latency=100))
    graph = topology.graph
    assert sorted(graph.nodes) == [A, B, C]
    assert graph.nodes[B]["info"] == topology.node(B)
    assert graph.edges[A, B] == {"connection": ConnectionProfile(latency=100)}
    graph.remove_node(B)
    assert topology.connection(A, B) == ConnectionProfile(latency=100)


def test_islands_are_those_between_whom_nothing_is_known() -> None:
    """The largest first."""
    topology = three()
    topology.add_node(process("d"), now=1.0)
    topology.add_connection(B, C, ConnectionProfile(latency=100))
    assert topology.islands() == [frozenset({B, C}), frozenset({A}), frozenset({process("d")})]


def test_a_copy_lives_its_own_life() -> None:
    """Whatever happens to the one."""
    topology = three()
    topology.add_node(B, now=1.0, addresses=[ROOM, HALL])
    copy = topology.copy()
    topology.remove_node(C)
    topology.failed(B, ROOM, now=1.0)
    topology.add_connection(A, B, ConnectionProfile(latency=1))
    assert copy.nodes == (A, B, C)
    assert copy.addresses(B, now=1.5) == (ROOM, HALL)
    assert copy.connection(A, B) is None
    assert copy.me == A
