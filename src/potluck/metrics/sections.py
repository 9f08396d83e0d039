"""Sections: what is counted about everything but collectives, one class for each layer.

Attributes that are plain numbers belong to one writer, the control thread of a node.
"""

from __future__ import annotations

import time
import weakref
from collections import deque

from potluck.metrics.cells import Counter, Gauge, Tally, hold
from potluck.metrics.operations import OperationMetrics
from potluck.metrics.snapshot import (
    CompressionSnapshot,
    DiscoverySnapshot,
    ElectionSnapshot,
    HealthSnapshot,
    RpcSnapshot,
    StateSnapshot,
    TrainingSnapshot,
    ViewSnapshot,
)

__all__ = [
    "CompressionMetrics",
    "DiscoveryMetrics",
    "ElectionMetrics",
    "HealthMetrics",
    "RpcMetrics",
    "StateMetrics",
    "TrainingMetrics",
    "ViewMetrics",
]

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
