"""A cluster neither waits nor works without need: each bound is shown one that breaks it."""

from __future__ import annotations

import pytest

from potluck.core.cluster import ClusterState
from potluck.testing import SimulatedCluster
from potluck.testing.calm import BEATS_PER_PEER, ERRANDS, VIEWS_PER_FAULT, Calm
from potluck.testing.violation import Violation
from potluck.vocabulary import View


def formed() -> tuple[SimulatedCluster, Calm, View]:
    """Three in one view, quiet for a minute."""
    cluster = SimulatedCluster(1)
    cluster.start("a", "b", "c")
    cluster.run(60.0)
    view = cluster.view_of("a")
    assert view is not None
    return cluster, cluster.invariants.calm, view


def test_a_view_without_a_cause_is_found() -> None:
    """Nothing has happened for a minute; on a lossy network that proves nothing."""
    cluster, calm, view = formed()
    with pytest.raises(Violation, match=r"although nothing has happened for 60\.0 s"):
        calm.agreed(view)
    cluster.network.shape("a", "b", cluster.network.quality)
    calm.agreed(view)


def test_more_views_than_faults_are_found() -> None:
    """Each thing that happens is good for two."""
    _, calm, view = formed()
    calm.disturbed()
    calm.views = VIEWS_PER_FAULT * (calm.disturbances + 3)
    with pytest.raises(Violation, match="is number 15 after only 4 things"):
        calm.agreed(view)


def test_a_process_that_chatters_is_found() -> None:
    """Whatever happens to it."""
    cluster, calm, _ = formed()
    most = 2 * BEATS_PER_PEER + ERRANDS
    calm.counted(cluster.place("a"), most)
    with pytest.raises(Violation, match=f"a has sent {most + 1} messages within a second"):
        calm.counted(cluster.place("a"), most + 1)


def test_a_healthy_quorum_that_stays_paused_is_found() -> None:
    """Not if something happened to one of them, or to the link between them, meanwhile."""
    cluster, calm, view = formed()
    place = cluster.place("a")
    assert place.core is not None
    place.core._situation.state = ClusterState.PAUSED
    cluster.pause("c")
    calm._watch(place, view)
    since = cluster.clock.now
    with pytest.raises(Violation, match=r"a has been paused in view .* although"):
        calm._check_paused(place, since, view)
    cluster.cut(["a"], ["b"])
    cluster.heal()
    calm._check_paused(place, since, view)
