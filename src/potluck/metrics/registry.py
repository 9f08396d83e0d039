"""DistributedMetrics: everything that a process counts, in one place."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import Enum
from typing import TypeAlias

from potluck.metrics.instruments import (
    OPERATIONS,
    OTHER,
    CompressionSnapshot,
    Counter,
    DiscoverySnapshot,
    ElectionSnapshot,
    Gauge,
    HealthSnapshot,
    MetricsSnapshot,
    OperationMetrics,
    PeerSnapshot,
    RpcSnapshot,
    StateSnapshot,
    Tally,
    TrainingSnapshot,
    ViewSnapshot,
    drain,
    hold,
)

# --------------------------------------------------------------------------------------------------
# Sections: what is counted about everything but collectives, one class for each layer.
#
# Attributes that are plain numbers belong to one writer, the control thread of a node.

STATUSES = ("healthy", "degraded", "suspect", "dead")
CAUSES = ("founded", "joined", "left", "lost", "merged")
RECENT_STEPS = 64
"""Steps over which samples per second are taken."""


class CompressionMetrics:
    """Sums whose values travelled in fewer bytes."""

    def __init__(self) -> None:
        self._operations, self._raw, self._sent = Counter(), Counter(), Counter()

    def note(self, raw: int, sent: int) -> None:
        """A sum of so many bytes travelled in so many."""
        with hold():
            self._operations.value += 1
            self._raw.value += raw
            self._sent.value += sent

    def snapshot(self) -> CompressionSnapshot:
        """The numbers as they are now."""
        with hold():
            return CompressionSnapshot(
                operations=self._operations.value,
                raw_bytes=self._raw.value,
                sent_bytes=self._sent.value,
            )


class HealthMetrics:
    """How the peers are; written by the control thread."""

    def __init__(self) -> None:
        self.changes = Tally(STATUSES)
        self.peers: dict[str, int] = {}
        self.lateness = 0.0

    def snapshot(self) -> HealthSnapshot:
        """The numbers as they are now."""
        return HealthSnapshot(
            peers=dict(self.peers), changes=self.changes.counts, lateness=self.lateness
        )


class ElectionMetrics:
    """Who leads; written by the control thread."""

    def __init__(self) -> None:
        self.events = Tally()
        self.term = 0
        self.is_leader = False

    def snapshot(self) -> ElectionSnapshot:
        """The numbers as they are now."""
        return ElectionSnapshot(events=self.events.counts, term=self.term, is_leader=self.is_leader)


class ViewMetrics:
    """Who is in; written by the control thread."""

    def __init__(self) -> None:
        self.installed = Counter()
        self.changes = Tally(CAUSES)
        self.events = Tally()
        self.state = ""
        self.epoch = self.members = 0
        self.rank = -1
        self._pauses = Counter()
        self._paused = 0.0
        self._since: float | None = None

    def pause(self, *, paused: bool) -> None:
        """Calls wait from now on, or no longer."""
        since, now = self._since, time.monotonic()
        if paused and since is None:
            self._since = now
            self._pauses.inc()
        elif not paused and since is not None:
            self._since = None
            self._paused += now - since

    def snapshot(self) -> ViewSnapshot:
        """The numbers as they are now."""
        since = self._since
        return ViewSnapshot(
            state=self.state,
            epoch=self.epoch,
            members=self.members,
            rank=self.rank,
            installed=self.installed.value,
            changes=self.changes.counts,
            events=self.events.counts,
            pauses=self._pauses.value,
            paused_seconds=self._paused + (0.0 if since is None else time.monotonic() - since),
        )


class DiscoveryMetrics:
    """Who is seen."""

    def __init__(self) -> None:
        self.visible = self.strangers = self.refused = 0
        self.arrivals, self.departures = Counter(), Counter()
        self.attempts, self.unreachable = Counter(), Counter()

    def snapshot(self) -> DiscoverySnapshot:
        """The numbers as they are now."""
        return DiscoverySnapshot(
            visible=self.visible,
            arrivals=self.arrivals.value,
            departures=self.departures.value,
            strangers=self.strangers,
            refused=self.refused,
            attempts=self.attempts.value,
            unreachable=self.unreachable.value,
        )


class RpcMetrics:
    """Remote calls."""

    def __init__(self) -> None:
        self.calls = OperationMetrics()
        """Those that this process made."""
        self.served = OperationMetrics()
        """Those that it answered; how long its functions took."""
        self._agents: weakref.WeakSet[object] = weakref.WeakSet()

    def follow(self, agent: object) -> None:
        """Ask this one, while it is there, for its number ``in_flight``."""
        self._agents.add(agent)

    def snapshot(self) -> RpcSnapshot:
        """The numbers as they are now."""
        return RpcSnapshot(
            calls=self.calls.snapshot(),
            in_flight=sum(int(getattr(each, "in_flight", 0)) for each in list(self._agents)),
            served=self.served.snapshot(),
        )


class TrainingMetrics:
    """Steps of training; written by the thread that trains."""

    def __init__(self) -> None:
        self.steps = OperationMetrics()
        """From the call of a step to its being applied."""
        self.committed, self.repeated, self.discarded = Counter(), Counter(), Counter()
        self.withdrawn = Counter()
        self.loss = Gauge()
        self.step = 0
        self._samples = 0.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)

    def commit(self, step: int, samples: float, tries: int, *, counted: bool = True) -> None:
        """A step is done; of all members together it had so many samples.

        It is not counted if this member's gradients were for a state that is gone.
        """
        with hold():
            self.repeated.value += max(0, tries - 1)
            self.step = step
            if not counted:
                self.discarded.value += 1
                return
            self.committed.value += 1
            self._samples += samples
            self._recent.append((time.monotonic(), self._samples))

    def withdraw(self, steps: int) -> None:
        """Committed steps were discarded: another cluster's state replaced this member's."""
        with hold():
            self.withdrawn.value += steps

    def snapshot(self) -> TrainingSnapshot:
        """The numbers as they are now."""
        steps = self.steps.snapshot()
        with hold():
            rate = 0.0
            if len(self._recent) > 1:
                (began, before), (ended, after) = self._recent[0], self._recent[-1]
                rate = (after - before) / max(ended - began, 1e-9)
            return TrainingSnapshot(
                step=self.step,
                committed=self.committed.value,
                repeated=self.repeated.value,
                discarded=self.discarded.value,
                withdrawn=self.withdrawn.value,
                samples=self._samples,
                loss=self.loss.value,
                duration=steps,
                samples_per_second=rate,
            )


class StateMetrics:
    """Exchanges of the state, and checkpoints."""

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


# --------------------------------------------------------------------------------------------------
# Peers in metrics: who they are in a bounded number of labels, how they are, who is waited for.
#
# A label is the name of a machine, not an id: those who restart keep theirs.  Only so many peers
# have one; the others, and those who are gone, are counted together.

MAX_PEERS = 64
"""Peers that have a label of their own."""

MAX_LABEL = 63
"""Characters of a label, as many as a part of a host name has."""

MAX_WATCHES = 64
"""Groups that count whom they wait for at once; of more, the oldest ones do it in vain."""


class PeerBook:
    """The peers of one process."""

    def __init__(self) -> None:
        self._labels: dict[Hashable, str] = {}
        self._health: dict[str, PeerSnapshot] = {}
        self._watches: list[tuple[Mapping[int, str], dict[int, float]]] = []
        self._settled: dict[str, float] = {}

    # -- labels ----------------------------------------------------------------------------------

    def label(self, peer: Hashable, name: str) -> str:
        """Under which label a peer is counted: its name, or a number behind it to tell two apart.

        >>> book = PeerBook()
        >>> book.label(1, "attic"), book.label(2, "attic"), book.label(1, "attic")
        ('attic', 'attic (2)', 'attic')
        """
        with hold():
            known = self._labels.get(peer)
            if known is not None:
                return known
            if len(self._labels) >= MAX_PEERS:
                return OTHER
            plain = "".join(each if each.isprintable() else "?" for each in name[:MAX_LABEL])
            label, taken, count = plain or "?", {*self._labels.values(), OTHER}, 1
            while label in taken:
                count += 1
                label = f"{plain} ({count})"
            self._labels[peer] = label
            return label

    def keep(self, peers: Iterable[Hashable]) -> None:
        """Forget all others: their labels are free, and what was counted for them is of others."""
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
        """A group with these labels writes there how many seconds it has waited for each rank."""
        with hold():
            self._watches.append((dict(labels), waited))
            while len(self._watches) > MAX_WATCHES:
                self._settle(*self._watches.pop(0))
        return waited

    def release(self, waited: dict[int, float]) -> None:
        """A group is over."""
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

    # -- how they are ----------------------------------------------------------------------------

    def see(self, peers: Iterable[PeerSnapshot]) -> None:
        """These are there now, and nobody else."""
        seen: dict[str, PeerSnapshot] = {}
        for each in peers:
            seen.setdefault(each.peer, each)
        with hold():
            self._health = seen

    def snapshot(self) -> list[PeerSnapshot]:
        """All of them, by rank and label, the others together at the end."""
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


# --------------------------------------------------------------------------------------------------


class DistributedMetrics:
    """What is counted, by all layers of a process; any number of contexts and threads may share it.

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
        """Collectives that ended well and are not counted yet: which, its seconds, its bytes."""
        self.tell: Callable[[str], None] = lambda _: None
        """Gets a sentence for each collective that has failed, for those who look on."""
        self.all_reduce = OperationMetrics(self.work_off)
        self.reduce = OperationMetrics(self.work_off)
        self.broadcast = OperationMetrics(self.work_off)
        self.all_gather = OperationMetrics(self.work_off)
        self.reduce_scatter = OperationMetrics(self.work_off)
        self.gather = OperationMetrics(self.work_off)
        self.scatter = OperationMetrics(self.work_off)
        self.all_to_all = OperationMetrics(self.work_off)
        self.barrier = OperationMetrics(self.work_off)
        self.peers = PeerBook()
        self.compression = CompressionMetrics()
        self.health = HealthMetrics()
        self.elections = ElectionMetrics()
        self.views = ViewMetrics()
        self.discovery = DiscoveryMetrics()
        self.rpc = RpcMetrics()
        self.training = TrainingMetrics()
        self.state = StateMetrics()
        self._began = time.monotonic()

    def work_off(self) -> None:
        """Count what is in the journal."""
        with hold():
            for kind, (seconds, sizes) in _by_kind(drain(self.journal)).items():
                operation: OperationMetrics = getattr(self, kind)
                operation.take(seconds, sizes)

    def adopt_cluster(self, other: DistributedMetrics) -> None:
        """Show here what ``other`` counts of a cluster: peers, health, elections, views, discovery.

        The two share these sections afterwards; collectives stay apart.
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
    """How long operations of each kind took, and their bytes."""
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
"""One registry given to several contexts; Python shares objects as they are."""
