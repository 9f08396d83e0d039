"""The words in which health is told."""

from potluck import HealthEvent, HealthStatus, HealthSummary
from potluck.core.health_records import PeerHealth
from potluck.vocabulary import NodeId, ProcessId

PEER = ProcessId(NodeId("a" * 32), 1)


def peer(name: str, status: HealthStatus, reason: str) -> PeerHealth:
    """The health of somebody."""
    return PeerHealth(PEER, name, status, reason, 0.1, 0.6, 0.001, 0.0001, 0.0)


def test_one_can_work_with_the_healthy_and_the_degraded() -> None:
    """The four statuses, from best to worst."""
    working = [status for status in HealthStatus if status.is_operational]
    assert working == [HealthStatus.HEALTHY, HealthStatus.DEGRADED]
    assert [status.severity for status in HealthStatus] == [0, 1, 2, 3]


def test_an_event_is_one_sentence() -> None:
    """Who, what, and why."""
    event = HealthEvent(PEER, "attic", HealthStatus.HEALTHY, HealthStatus.DEAD, "no word", 3.0)
    assert str(event) == "attic is dead: no word"


def test_a_summary_counts_and_explains() -> None:
    """Healthy peers are only counted; for the others it says why."""
    summary = HealthSummary(
        (
            peer("desk", HealthStatus.HEALTHY, "fine"),
            peer("attic", HealthStatus.DEGRADED, "slow"),
            peer("sofa", HealthStatus.DEAD, "silent"),
            peer("hall", HealthStatus.HEALTHY, "fine"),
        ),
        lateness=0.0,
    )
    assert (
        str(summary)
        == "2 healthy, 1 degraded, 1 dead; attic is degraded: slow; sofa is dead: silent"
    )
    assert summary.counts[HealthStatus.SUSPECT] == 0
    assert summary.health_percentage == 75.0
    assert not summary.is_cluster_healthy


def test_a_node_alone_is_well() -> None:
    """Nobody is missed where nobody is expected."""
    summary = HealthSummary((), lateness=0.0)
    assert str(summary) == "no peers"
    assert summary.is_cluster_healthy
    assert summary.health_percentage == 100.0
