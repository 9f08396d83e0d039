"""The topology of a running cluster: put together from lanes, heartbeats and collectives."""

from __future__ import annotations

import numpy as np

from potluck import Cluster, HealthStatus, HealthSummary, NodeProfile
from potluck.core.health_records import PeerHealth
from potluck.core.topology_links import RateSource
from potluck.runtime.cluster_stage import Stage
from potluck.runtime.cluster_topology import Acquaintance, Facts, Topographer
from potluck.runtime.profile import local_profile
from potluck.vocabulary import View
from support.clusters import clusters, everywhere
from support.health import process
from support.threads import eventually

A, B, C = map(process, "abc")
ROOM, HALL = ("10.0.0.2", 5000), ("10.0.1.2", 5000)


def health(status: HealthStatus, round_trip: float | None) -> HealthSummary:
    """B is well or not; C is somebody without a lane."""
    told = [(B, status, round_trip), (C, HealthStatus.HEALTHY, 0.1)]
    peers = [
        PeerHealth(who, "B", how, "because", 0.0, 1.0, trip, trip and trip / 10, 0.0)
        for who, how, trip in told
    ]
    return HealthSummary(tuple(peers), 0.0)


def test_facts_become_a_topology() -> None:
    """Profiles and addresses as told, latencies by the address in use."""
    met = Acquaintance(B, NodeProfile(host="attic"), HALL, [ROOM, HALL])
    facts = [Facts([met], health(HealthStatus.HEALTHY, None))]
    topographer = Topographer(A, lambda: facts[0])
    topology = topographer.draw(None)
    assert list(topology) == [A, B]
    assert topology.snapshot().node(A).profile is not None
    assert topology.snapshot().node(B).profile == NodeProfile(host="attic")
    assert topology.addresses(B) == (HALL, ROOM)
    assert topology.snapshot().connection(A, B) is None
    facts[0] = Facts([met], health(HealthStatus.SUSPECT, 0.002))
    assert topographer.draw(Stage(View("f" * 32, 1, (A,)), 0)).snapshot().connection(A, B) is None
    facts[0] = Facts([met], health(HealthStatus.DEGRADED, 0.002))
    assert topographer.draw(None) is topology
    found = topology.snapshot().connection(A, B)
    assert found is not None
    assert (found.latency, found.jitter, found.address) == (1_000_000, 100_000, HALL)


def test_a_cluster_knows_its_machines_and_links() -> None:
    """What peers tell of themselves, what heartbeats take, what collectives have measured."""
    with clusters(2) as nodes:
        here, there = nodes
        before = here.topology
        assert before.link_matrix(_view(here)).up == (0, 0)
        told = before.snapshot().node(there.process)
        assert told.profile is not None
        assert told.profile.cores == local_profile().cores
        assert told.addresses[0][1] == before.addresses(there.process)[0][1]
        ends = here.process, there.process
        eventually(lambda: here.topology.snapshot().connection(*ends) is not None)
        everywhere(nodes, lambda node: node.all_reduce(np.ones(1 << 16, "f4")))
        first, second = (node.topology.link_matrix(_view(here)) for node in nodes)
        assert first == second
        assert min(first.up) > 0
        assert here.topology is before
        assert here.topology.link_matrix(_view(here)) == first
        assert sorted(here.topology.ring_order(_view(here))) == sorted(_view(here).members)


def test_the_links_of_a_cluster_can_be_measured_at_will() -> None:
    """All ranks together; the results are in the topology of each."""
    with clusters(2) as nodes:
        found = everywhere(nodes, lambda node: node.measure_links())
        first, second = (topology.link_matrix(_view(nodes[0])) for topology in found)
        assert (first.up, first.down) == (second.up, second.down)
        assert min(first.up + first.down) > 0
        best = found[0].snapshot().connection(nodes[0].process, nodes[1].process)
        assert best is not None
        assert best.rated_by is RateSource.PROBE


def _view(node: Cluster) -> View:
    view = node.view
    assert view is not None
    return view
