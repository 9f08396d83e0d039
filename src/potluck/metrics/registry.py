"""DistributedMetrics: everything that a process counts, and its snapshot.

A section such as :class:`ViewMetrics` is counted in place, and copied into a snapshot.  Its plain
numbers belong to one writer, the control thread of a node, unless a method writes them.
``msgspec.json.encode(snapshot)`` makes JSON of a snapshot.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import Enum
from typing import Any, Self, TypeAlias, TypeVar

import msgspec

from potluck._decode import printable
from potluck.metrics.instruments import (
    OTHER,
    Gauge,
    OperationMetrics,
    OperationSnapshot,
    drain,
    hold,
)

OPERATIONS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"),
    *("gather", "scatter", "all_to_all", "barrier"),
)
"""The kinds of collectives."""

STATUSES = ("healthy", "degraded", "suspect", "dead")
CAUSES = ("founded", "joined", "left", "lost", "merged")
RECENT_STEPS = 64
"""Steps over which samples per second are taken."""

Agent = TypeVar("Agent")


class _Section(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Numbers that belong together."""

    def snapshot(self) -> Self:
        """A copy of the numbers as they are now."""
        with hold():
            fields = msgspec.structs.asdict(self)
            tables = {name: dict(each) for name, each in fields.items() if isinstance(each, dict)}
            return msgspec.structs.replace(self, **tables)


class CompressionMetrics(_Section):
    """Sums whose values were sent compressed."""

    operations: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times smaller; 1 where nothing was compressed."""
        return self.raw_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def note(self, raw: int, sent: int) -> None:
        """Count a sum: its bytes before and after compression."""
        with hold():
            self.operations += 1
            self.raw_bytes += raw
            self.sent_bytes += sent


class HealthMetrics(_Section):
    """The health of the peers."""

    peers: dict[str, int] = {}
    """The number of peers with each status."""
    changes: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(STATUSES, 0.0))
    """How often a peer got each status."""
    lateness: float = 0.0
    """The recent delay of this node's control loop, in seconds."""


class ElectionMetrics(_Section):
    """Elections of a leader."""

    events: dict[str, float] = {}
    """How often each kind of event happened: started, elected, new leader, timeout …"""
    term: int = 0
    is_leader: bool = False


class ViewMetrics(_Section):
    """The view of a cluster that this process is in."""

    state: str = ""
    """joining, active, paused or left; empty outside of a cluster."""
    epoch: int = 0
    members: int = 0
    rank: int = -1
    installed: int = 0
    changes: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    """Views by cause: founded, joined, left, lost, merged, other."""
    events: dict[str, float] = {}
    """How often each kind of membership event happened."""
    pauses: int = 0
    paused_seconds: float = 0.0
    paused_since: float | None = None
    """When the current pause began, on the monotonic clock; always None in a snapshot."""

    def pause(self, *, paused: bool) -> None:
        """Count the beginning of a pause, in which calls wait, or its end."""
        since, now = self.paused_since, time.monotonic()
        if paused and since is None:
            self.paused_since = now
            self.pauses += 1
        elif not paused and since is not None:
            self.paused_since = None
            self.paused_seconds += now - since

    def snapshot(self) -> Self:
        """A copy of the numbers as they are now, with the current pause counted."""
        found = super().snapshot()
        if found.paused_since is not None:
            found.paused_seconds += time.monotonic() - found.paused_since
            found.paused_since = None
        return found


class DiscoveryMetrics(_Section):
    """Processes that discovery sees, and connections to them."""

    visible: int = 0
    arrivals: int = 0
    departures: int = 0
    strangers: int = 0
    """Seen, but of another group, job or protocol."""
    refused: int = 0
    """Incoming connections that were refused."""
    attempts: int = 0
    """Connections that this process tried to open to others of its job."""
    unreachable: int = 0
    """Attempts that failed."""

    def add(
        self, *, arrivals: int = 0, departures: int = 0, attempts: int = 0, unreachable: int = 0
    ) -> None:
        """Count events, from any thread."""
        with hold():
            self.arrivals += arrivals
            self.departures += departures
            self.attempts += attempts
            self.unreachable += unreachable


class RpcSnapshot(_Section):
    """Remote calls that this process made, and those that it answered."""

    calls: OperationSnapshot = OperationSnapshot()
    in_flight: int = 0
    served: OperationSnapshot = OperationSnapshot()


class RpcMetrics:
    """Remote calls."""

    def __init__(self) -> None:
        self.calls = OperationMetrics()
        """Calls that this process made."""
        self.served = OperationMetrics()
        """Calls that it answered; the durations are those of its functions."""
        self._agents: weakref.WeakKeyDictionary[Any, Callable[[Any], int]]
        self._agents = weakref.WeakKeyDictionary()

    def follow(self, agent: Agent, in_flight: Callable[[Agent], int]) -> None:
        """Count the calls in flight of an agent for as long as it exists."""
        self._agents[agent] = in_flight

    def snapshot(self) -> RpcSnapshot:
        """The numbers as they are now."""
        return RpcSnapshot(
            calls=self.calls.snapshot(),
            in_flight=sum(read(agent) for agent, read in list(self._agents.items())),
            served=self.served.snapshot(),
        )


class TrainingSnapshot(_Section):
    """Training steps."""

    step: int = 0
    committed: int = 0
    repeated: int = 0
    """Averagings that were repeated because a member joined or left."""
    discarded: int = 0
    """Steps that discarded this member's gradients because they were out of date."""
    withdrawn: int = 0
    """Committed steps that were discarded when two parts of a split job merged."""
    samples: float = 0.0
    """Samples of all members together."""
    loss: float | None = None
    """The loss that this member reported last."""
    duration: OperationSnapshot = OperationSnapshot()
    samples_per_second: float = 0.0
    """Samples of all members together, over the last steps."""
    seconds_per_step: float = 0.0
    """From one step to the next, over the last steps; ``duration`` is that of the call alone."""


class TrainingMetrics:
    """Training steps; written by the training thread."""

    def __init__(self) -> None:
        self.steps = OperationMetrics()
        """Durations from submitting the gradients of a step to the end of its update."""
        self.loss = Gauge()
        self._counts = TrainingSnapshot()
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)

    def commit(self, step: int, samples: float, tries: int, *, counted: bool = True) -> None:
        """Count a step, with the samples of all members.

        ``counted`` is false if this member's gradients were out of date and not used.
        """
        counts = self._counts
        with hold():
            counts.repeated += max(0, tries - 1)
            counts.step = step
            if not counted:
                counts.discarded += 1
                return
            counts.committed += 1
            counts.samples += samples
            self._recent.append((time.monotonic(), counts.samples))

    def withdraw(self, steps: int) -> None:
        """Count committed steps that were discarded when another state replaced this member's."""
        with hold():
            self._counts.withdrawn += steps

    def snapshot(self) -> TrainingSnapshot:
        """The numbers as they are now."""
        found = self._counts.snapshot()
        found.duration, found.loss = self.steps.snapshot(), self.loss.value
        with hold():
            recent = list(self._recent)
        if len(recent) > 1:
            (began, before), (ended, after) = recent[0], recent[-1]
            found.samples_per_second = (after - before) / max(ended - began, 1e-9)
            found.seconds_per_step = (ended - began) / (len(recent) - 1)
        return found


class StateSnapshot(_Section):
    """Exchanges of the training state, and checkpoints."""

    syncs: int = 0
    received_bytes: int = 0
    sync_seconds: float = 0.0
    saved: int = 0
    failed: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0


class StateMetrics:
    """Exchanges of the training state, and checkpoints."""

    def __init__(self) -> None:
        self.syncs = OperationMetrics()
        self.saves = OperationMetrics()

    def snapshot(self) -> StateSnapshot:
        """The numbers as they are now."""
        syncs, saves = self.syncs.snapshot(), self.saves.snapshot()
        return StateSnapshot(
            syncs=syncs.completed,
            received_bytes=syncs.bytes_processed,
            sync_seconds=syncs.seconds,
            saved=saves.completed,
            failed=saves.failed,
            saved_bytes=saves.bytes_processed,
            save_seconds=saves.seconds,
        )


MAX_PEERS = 64
"""Peers that have their own label."""

MAX_LABEL = 63
"""Characters of a label, the limit of one part of a host name."""

MAX_WATCHES = 64
"""Groups whose waiting times are read; with more, the oldest ones are no longer read."""


class PeerSnapshot(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One peer, by the name of its machine; peers beyond a limit are together in ``other``."""

    peer: str
    rank: int = -1
    """In the current view; -1 for a peer outside it, and for ``other``."""
    status: str = ""
    """healthy, degraded, suspect or dead; empty where health is not monitored."""
    round_trip: float | None = None
    """Seconds, as heartbeats measure it."""
    jitter: float | None = None
    loss: float = 0.0
    """Share of the heartbeats that did not arrive in time, from 0 to 1."""
    waiting: float = 0.0
    """Seconds that operations of this process have waited for data from this peer."""


class PeerCounters:
    """The peers of one process: their labels, their health, and how long they were waited for.

    A label is the name of a machine, not an id: a process that restarts gets the same label again.
    The number of labels is bounded; further peers, and peers that have left, count as ``other``.
    """

    def __init__(self) -> None:
        self._labels: dict[Hashable, str] = {}
        self._health: dict[str, PeerSnapshot] = {}
        self._watches: list[tuple[Mapping[int, str], dict[int, float]]] = []
        self._settled: dict[str, float] = {}

    # -- labels ----------------------------------------------------------------------------------

    def label(self, peer: Hashable, name: str) -> str:
        """The label of a peer: its name, with a number if another peer has the same name.

        >>> peers = PeerCounters()
        >>> peers.label(1, "attic"), peers.label(2, "attic"), peers.label(1, "attic")
        ('attic', 'attic (2)', 'attic')
        """
        with hold():
            known = self._labels.get(peer)
            if known is not None:
                return known
            if len(self._labels) >= MAX_PEERS:
                return OTHER
            plain = printable(name[:MAX_LABEL])
            label, taken, count = plain or "?", {*self._labels.values(), OTHER}, 1
            while label in taken:
                count += 1
                label = f"{plain} ({count})"
            self._labels[peer] = label
            return label

    def keep(self, peers: Iterable[Hashable]) -> None:
        """Forget all other peers: their labels become free, and their counts move to ``other``."""
        wanted = set(peers)
        with hold():
            gone = {label for peer, label in self._labels.items() if peer not in wanted}
            self._labels = {peer: each for peer, each in self._labels.items() if peer in wanted}
            for label in gone:
                self._health.pop(label, None)
                self._add(OTHER, self._settled.pop(label, 0.0))
            self._watches = [
                ({rank: OTHER if each in gone else each for rank, each in labels.items()}, waited)
                for labels, waited in self._watches
            ]

    # -- waiting ---------------------------------------------------------------------------------

    def watch(self, labels: Mapping[int, str], waited: dict[int, float]) -> dict[int, float]:
        """Read waiting times from ``waited``, where a group adds seconds for each of its ranks."""
        with hold():
            self._watches.append((dict(labels), waited))
            while len(self._watches) > MAX_WATCHES:
                self._settle(*self._watches.pop(0))
        return waited

    def release(self, waited: dict[int, float]) -> None:
        """Stop reading the waiting times of a group that has ended, and keep their sum."""
        with hold():
            for watch in [each for each in self._watches if each[1] is waited]:
                self._watches.remove(watch)
                self._settle(*watch)

    def _settle(self, labels: Mapping[int, str], waited: dict[int, float]) -> None:
        for rank, seconds in list(waited.items()):
            self._add(labels.get(rank, OTHER), seconds)

    def _add(self, label: str, seconds: float) -> None:
        if seconds:
            self._settled[label] = self._settled.get(label, 0.0) + seconds

    # -- health ----------------------------------------------------------------------------------

    def see(self, peers: Iterable[PeerSnapshot]) -> None:
        """Replace the health of all peers."""
        seen: dict[str, PeerSnapshot] = {}
        for each in peers:
            seen.setdefault(each.peer, each)
        with hold():
            self._health = seen

    def snapshot(self) -> list[PeerSnapshot]:
        """All peers, by rank and label, with ``other`` at the end."""
        with hold():
            waited = dict(self._settled)
            for labels, seconds in self._watches:
                for rank, amount in list(seconds.items()):
                    label = labels.get(rank, OTHER)
                    waited[label] = waited.get(label, 0.0) + amount
            ranks = {label: rank for labels, _ in self._watches for rank, label in labels.items()}
            seen = dict(self._health)
        lines = [
            PeerSnapshot(
                peer=label,
                rank=-1 if label == OTHER else each.rank if each else ranks.get(label, -1),
                status=each.status if each else "",
                round_trip=each.round_trip if each else None,
                jitter=each.jitter if each else None,
                loss=each.loss if each else 0.0,
                waiting=waited.get(label, 0.0),
            )
            for label in {**waited, **seen}
            for each in (seen.get(label) if label != OTHER else None,)
        ]
        return sorted(lines, key=lambda one: (one.peer == OTHER, one.rank < 0, one.rank, one.peer))


class MetricsSnapshot(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
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
    compression: CompressionMetrics = msgspec.field(default_factory=CompressionMetrics)
    health: HealthMetrics = msgspec.field(default_factory=HealthMetrics)
    elections: ElectionMetrics = msgspec.field(default_factory=ElectionMetrics)
    views: ViewMetrics = msgspec.field(default_factory=ViewMetrics)
    discovery: DiscoveryMetrics = msgspec.field(default_factory=DiscoveryMetrics)
    rpc: RpcSnapshot = msgspec.field(default_factory=RpcSnapshot)
    training: TrainingSnapshot = msgspec.field(default_factory=TrainingSnapshot)
    state: StateSnapshot = msgspec.field(default_factory=StateSnapshot)

    @property
    def operations(self) -> dict[str, OperationSnapshot]:
        """Every kind of collective by its name."""
        return {name: getattr(self, name) for name in OPERATIONS}


class DistributedMetrics:
    """Everything that a process counts; any number of contexts and threads may share it.

    >>> metrics = DistributedMetrics()
    >>> metrics.all_reduce.completed.inc()
    >>> metrics.snapshot().all_reduce.completed
    1
    """

    __slots__ = (
        *OPERATIONS,
        *("peers", "compression", "health", "elections", "views", "discovery", "rpc"),
        *("training", "state", "journal", "tell", "_began"),
    )

    def __init__(self) -> None:
        self.journal: list[tuple[Enum, float, int]] = []
        """Collectives that succeeded and are not counted yet: kind, seconds, bytes."""
        self.tell: Callable[[str], None] = lambda _: None
        """Receives a sentence for each collective that has failed, for observers."""
        self.all_reduce = OperationMetrics(self.count_journal)
        self.reduce = OperationMetrics(self.count_journal)
        self.broadcast = OperationMetrics(self.count_journal)
        self.all_gather = OperationMetrics(self.count_journal)
        self.reduce_scatter = OperationMetrics(self.count_journal)
        self.gather = OperationMetrics(self.count_journal)
        self.scatter = OperationMetrics(self.count_journal)
        self.all_to_all = OperationMetrics(self.count_journal)
        self.barrier = OperationMetrics(self.count_journal)
        self.peers = PeerCounters()
        self.compression = CompressionMetrics()
        self.health = HealthMetrics()
        self.elections = ElectionMetrics()
        self.views = ViewMetrics()
        self.discovery = DiscoveryMetrics()
        self.rpc = RpcMetrics()
        self.training = TrainingMetrics()
        self.state = StateMetrics()
        self._began = time.monotonic()

    def count_journal(self) -> None:
        """Count the journal."""
        with hold():
            for kind, (seconds, sizes) in _by_kind(drain(self.journal)).items():
                operation: OperationMetrics = getattr(self, kind)
                operation.take(seconds, sizes)

    def adopt_cluster(self, other: DistributedMetrics) -> None:
        """Share the sections about the cluster: peers, health, elections, views, discovery.

        The counts of collectives stay separate.
        """
        for name in ("peers", "health", "elections", "views", "discovery"):
            setattr(self, name, getattr(other, name))

    def snapshot(self) -> MetricsSnapshot:
        """All numbers as they are now."""
        return MetricsSnapshot(
            time=time.time(),
            uptime=time.monotonic() - self._began,
            peers=self.peers.snapshot(),
            compression=self.compression.snapshot(),
            health=self.health.snapshot(),
            elections=self.elections.snapshot(),
            views=self.views.snapshot(),
            discovery=self.discovery.snapshot(),
            rpc=self.rpc.snapshot(),
            training=self.training.snapshot(),
            state=self.state.snapshot(),
            **{name: getattr(self, name).snapshot() for name in OPERATIONS},
        )


def _by_kind(
    journal: Iterable[tuple[Enum, float, int]],
) -> dict[str, tuple[list[float], list[int]]]:
    """The durations and the bytes of the operations of each kind."""
    kinds: dict[str, tuple[list[float], list[int]]] = {}
    last: Enum | None = None
    times: list[float] = []
    sizes: list[int] = []
    for kind, seconds, nbytes in journal:
        if kind is not last:  # most programs repeat themselves
            last = kind
            times, sizes = kinds.setdefault(kind.value, ([], []))
        times.append(seconds)
        sizes.append(nbytes)
    return kinds


SharedMetrics: TypeAlias = DistributedMetrics
"""Another name for the same class: one registry may be given to several contexts."""
