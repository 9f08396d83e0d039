"""Snapshots: all numbers at one moment, typed; they can be written as JSON as they are.

``msgspec.json.encode(snapshot)`` does.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = [
    "OPERATIONS",
    "CompressionSnapshot",
    "DiscoverySnapshot",
    "ElectionSnapshot",
    "HealthSnapshot",
    "MetricsSnapshot",
    "OperationSnapshot",
    "PeerSnapshot",
    "RpcSnapshot",
    "StateSnapshot",
    "TrainingSnapshot",
    "ViewSnapshot",
]


class _Section(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Numbers that belong together."""


class OperationSnapshot(_Section, frozen=True, kw_only=True):
    """One kind of operation at one moment; times in ms and the rate are of the last operations."""

    completed: int = 0
    failed: int = 0
    retried: int = 0
    bytes_processed: int = 0
    seconds: float = 0.0
    """Spent in all of them together."""
    bytes_per_second: float = 0.0
    mean_ms: float = 0.0
    p50_ms: float = 0.0
    p95_ms: float = 0.0
    p99_ms: float = 0.0
    errors: Mapping[str, float] = {}
    """How often each error was raised."""
    buckets: list[int] = []
    """Durations, in the buckets of a :class:`~potluck.metrics.Histogram`."""


class PeerSnapshot(_Section, frozen=True, kw_only=True):
    """One peer, by the name of its machine; of very many, the last ones together as ``other``."""

    peer: str
    rank: int = -1
    """In the present view; -1 for one that is in none, and for ``other``."""
    status: str = ""
    """healthy, degraded, suspect or dead; empty where nobody watches."""
    round_trip: float | None = None
    """Seconds, as heartbeats see it."""
    jitter: float | None = None
    loss: float = 0.0
    """Share of the heartbeats that did not come in time, from 0 to 1."""
    waiting: float = 0.0
    """Seconds that operations here have slept because bytes of this peer were missing."""


class CompressionSnapshot(_Section, frozen=True, kw_only=True):
    """Sums whose values travelled in fewer bytes."""

    operations: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times smaller; 1 where nothing was compressed."""
        return self.raw_bytes / self.sent_bytes if self.sent_bytes else 1.0


class HealthSnapshot(_Section, frozen=True, kw_only=True):
    """How the peers are."""

    peers: Mapping[str, int] = {}
    """How many have each status."""
    changes: Mapping[str, float] = {}
    """How often a peer got each status."""
    lateness: float = 0.0
    """Seconds by which this node's own loop ran late recently."""


class ElectionSnapshot(_Section, frozen=True, kw_only=True):
    """Who leads."""

    events: Mapping[str, float] = {}
    """How often each kind of event happened: started, elected, new leader, timeout …"""
    term: int = 0
    is_leader: bool = False


class ViewSnapshot(_Section, frozen=True, kw_only=True):
    """Who is in."""

    state: str = ""
    """joining, active, paused or left; empty outside of a cluster."""
    epoch: int = 0
    members: int = 0
    rank: int = -1
    installed: int = 0
    changes: Mapping[str, float] = {}
    """Views by what brought them: founded, joined, left, lost, merged, other."""
    events: Mapping[str, float] = {}
    """How often each kind of event of the membership happened."""
    pauses: int = 0
    paused_seconds: float = 0.0


class DiscoverySnapshot(_Section, frozen=True, kw_only=True):
    """Who is seen."""

    visible: int = 0
    arrivals: int = 0
    departures: int = 0
    strangers: int = 0
    """Seen, but of another namespace, job or protocol."""
    refused: int = 0
    """Callers that were sent away at the door: strangers, and who said nothing sensible."""
    attempts: int = 0
    """Connections that this process tried to open to others of its job."""
    unreachable: int = 0
    """Of these, the ones that failed."""


class RpcSnapshot(_Section, frozen=True, kw_only=True):
    """Remote calls: those made, and those answered."""

    calls: OperationSnapshot = OperationSnapshot()
    in_flight: int = 0
    served: OperationSnapshot = OperationSnapshot()


class TrainingSnapshot(_Section, frozen=True, kw_only=True):
    """Steps of training."""

    step: int = 0
    committed: int = 0
    repeated: int = 0
    """Averagings that had to be begun again, because somebody came or went."""
    discarded: int = 0
    """Steps whose gradients were for a state that is gone."""
    withdrawn: int = 0
    """Committed steps that were discarded when this member's cluster met another one."""
    samples: float = 0.0
    """Of all members together."""
    loss: float | None = None
    """As this member said last."""
    duration: OperationSnapshot = OperationSnapshot()
    samples_per_second: float = 0.0
    """Of all members together, over the last steps."""


class StateSnapshot(_Section, frozen=True, kw_only=True):
    """Exchanges of the state, and checkpoints."""

    syncs: int = 0
    received_bytes: int = 0
    sync_seconds: float = 0.0
    saved: int = 0
    failed: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0


class MetricsSnapshot(_Section, frozen=True, kw_only=True):
    """All numbers at one moment.

    >>> from potluck import DistributedMetrics
    >>> DistributedMetrics().snapshot().all_reduce.completed
    0
    """

    time: float = 0.0
    """Seconds since 1970."""
    uptime: float = 0.0
    """Seconds since counting began."""
    all_reduce: OperationSnapshot = OperationSnapshot()
    reduce: OperationSnapshot = OperationSnapshot()
    broadcast: OperationSnapshot = OperationSnapshot()
    all_gather: OperationSnapshot = OperationSnapshot()
    reduce_scatter: OperationSnapshot = OperationSnapshot()
    gather: OperationSnapshot = OperationSnapshot()
    scatter: OperationSnapshot = OperationSnapshot()
    all_to_all: OperationSnapshot = OperationSnapshot()
    barrier: OperationSnapshot = OperationSnapshot()
    peers: list[PeerSnapshot] = []
    compression: CompressionSnapshot = CompressionSnapshot()
    health: HealthSnapshot = HealthSnapshot()
    elections: ElectionSnapshot = ElectionSnapshot()
    views: ViewSnapshot = ViewSnapshot()
    discovery: DiscoverySnapshot = DiscoverySnapshot()
    rpc: RpcSnapshot = RpcSnapshot()
    training: TrainingSnapshot = TrainingSnapshot()
    state: StateSnapshot = StateSnapshot()

    @property
    def operations(self) -> dict[str, OperationSnapshot]:
        """Every kind of collective by its name."""
        return {name: getattr(self, name) for name in OPERATIONS}


OPERATIONS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"),
    *("gather", "scatter", "all_to_all", "barrier"),
)
"""The kinds of collectives."""
