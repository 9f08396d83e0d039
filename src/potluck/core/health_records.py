"""What health tells: a status with its reason, the event of a change, and the summary of all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from potluck.vocabulary import ProcessId

__all__ = ["HealthCause", "HealthEvent", "HealthStatus", "HealthSummary", "PeerHealth"]


class HealthStatus(Enum):
    """How a peer is, from best to worst.

    >>> HealthStatus.DEGRADED.is_operational, HealthStatus.DEAD.severity
    (True, 3)
    """

    HEALTHY = "healthy"
    """Heard in time over a good link."""
    DEGRADED = "degraded"
    """Heard in time, but the link is slow, uneven or loses heartbeats."""
    SUSPECT = "suspect"
    """Silent for longer than it ever is, or its connection has ended."""
    DEAD = "dead"
    """Silent for so long that, were it alive, it would have paused itself."""

    def __init__(self, word: str) -> None:
        self.is_operational = word in {"healthy", "degraded"}
        """Whether one can work with the peer now."""

    @property
    def severity(self) -> int:
        """0 for healthy to 3 for dead."""
        return list(HealthStatus).index(self)


class HealthCause(Enum):
    """Why a peer has its status: this status, and a number that tells the causes apart."""

    FINE = HealthStatus.HEALTHY, 0
    LOSSY = HealthStatus.DEGRADED, 1
    SLOW = HealthStatus.DEGRADED, 2
    UNEVEN = HealthStatus.DEGRADED, 3
    SILENT = HealthStatus.SUSPECT, 4
    LOST = HealthStatus.SUSPECT, 5
    GIVEN_UP = HealthStatus.DEAD, 6

    def __init__(self, status: HealthStatus, _: int) -> None:
        self.status = status
        self.is_operational = status.is_operational


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """The status of a peer changed, or its cause did (a silent peer's connection ends).

    >>> from potluck.vocabulary import NodeId
    >>> peer = ProcessId(NodeId("b" * 32), 1)
    >>> well, ill = HealthStatus.HEALTHY, HealthStatus.SUSPECT
    >>> print(HealthEvent(peer, "attic", well, ill, "its connection has ended", 7.5))
    attic is suspect: its connection has ended
    """

    peer: ProcessId
    name: str
    previous: HealthStatus
    status: HealthStatus
    reason: str
    time: float

    def __str__(self) -> str:
        """One sentence for the log, the command and the dashboard."""
        return f"{self.name} is {self.status.value}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PeerHealth:
    """All that is known of one peer's health.  Times in seconds; None where not measured yet."""

    peer: ProcessId
    name: str
    status: HealthStatus
    reason: str
    silence: float
    patience: float
    round_trip: float | None
    jitter: float | None
    loss: float
    """Share of the heartbeats that did not come in time, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class HealthSummary:
    """The health of all peers at one moment.

    >>> nobody = HealthSummary(peers=(), lateness=0.0)
    >>> nobody.is_cluster_healthy, nobody.health_percentage
    (True, 100.0)
    """

    peers: tuple[PeerHealth, ...]
    lateness: float
    """Seconds by which this node's own loop ran late recently; it adds to every patience."""

    @property
    def counts(self) -> dict[HealthStatus, int]:
        """How many peers have each status."""
        counted = Counter(peer.status for peer in self.peers)
        return {status: counted[status] for status in HealthStatus}

    @property
    def is_cluster_healthy(self) -> bool:
        """Whether one can work with every peer."""
        return all(peer.status.is_operational for peer in self.peers)

    @property
    def health_percentage(self) -> float:
        """Share of the peers one can work with, in per cent; 100 when there are none."""
        if not self.peers:
            return 100.0
        return 100.0 * sum(peer.status.is_operational for peer in self.peers) / len(self.peers)

    def __str__(self) -> str:
        """One line: how many of each, then the reason of each that is not healthy."""
        if not self.peers:
            return "no peers"
        numbers = ", ".join(
            f"{count} {status.value}" for status, count in self.counts.items() if count
        )
        reasons = [
            f"{peer.name} is {peer.status.value}: {peer.reason}"
            for peer in self.peers
            if peer.status is not HealthStatus.HEALTHY
        ]
        return "; ".join([numbers, *reasons])
