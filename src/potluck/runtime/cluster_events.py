"""What happens in a cluster, kept for whoever asks, and told to whoever wants to be called."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from potluck.core.cluster_events import MembershipChange, MembershipEvent
from potluck.core.election_events import ElectionEvent, ElectionKind
from potluck.core.health_records import HealthEvent
from potluck.vocabulary import ProcessId, View

__all__ = ["Bulletin", "ClusterEvent", "ViewChange"]

logger = logging.getLogger("potluck.cluster")

KEPT = 512
"""Events that are remembered."""

MAX_WAITING = 1024
"""Changes that wait for a slow callback; of more, the first are dropped."""

_GRAVE = frozenset(
    {
        MembershipChange.LOST,
        MembershipChange.REMOVED,
        MembershipChange.PAUSED,
        MembershipChange.REFUSED,
    }
)


@dataclass(frozen=True, slots=True)
class ViewChange:
    """The cluster went from one view to the next."""

    view: View
    previous: View | None
    """The view this node was in before; None if it was in none."""
    reason: str

    @property
    def joined(self) -> tuple[ProcessId, ...]:
        """Who is in now and was not before."""
        before = self.previous.members if self.previous else ()
        return tuple(each for each in self.view.members if each not in before)

    @property
    def left(self) -> tuple[ProcessId, ...]:
        """Who was in before and is not now."""
        before = self.previous.members if self.previous else ()
        return tuple(each for each in before if each not in self.view.members)

    def __str__(self) -> str:
        """One sentence."""
        count = len(self.view.members)
        return f"view {self.view.epoch} with {count} member{'s' * (count != 1)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something that happened, and when; its text is a sentence."""

    event: object
    time: float = field(default_factory=time.time)
    """Seconds since 1970, by the clock of this machine."""

    def __str__(self) -> str:
        """The sentence."""
        return str(self.event)


Callback: TypeAlias = Callable[[ViewChange], None]


class Bulletin:
    """The events of one node; callbacks run one after the other on a thread of their own."""

    def __init__(self) -> None:
        self._kept: deque[ClusterEvent] = deque(maxlen=KEPT)
        self._callbacks: list[Callback] = []
        self._waiting: queue.SimpleQueue[ViewChange | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def post(self, event: object, *, quietly: bool = False) -> None:
        """Keep an event and write it to the log; ``quietly`` what nobody needs to look at."""
        self._kept.append(ClusterEvent(event))
        logger.log(logging.DEBUG if quietly else _level(event), "%s", event)

    def changed(self, change: ViewChange) -> None:
        """Tell the callbacks of another view."""
        if self._thread is not None and self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(change)

    @property
    def events(self) -> list[ClusterEvent]:
        """What has happened, oldest first; the last few hundred."""
        return list(self._kept)

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Have something called at every change; what this returns ends that."""
        with self._lock:
            self._callbacks.append(callback)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="potluck-events", daemon=True
                )
                self._thread.start()

        def unsubscribe() -> None:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

        return unsubscribe

    def _run(self) -> None:
        while (change := self._waiting.get()) is not None:
            with self._lock:
                callbacks = list(self._callbacks)
            for callback in callbacks:
                try:
                    callback(change)
                except BaseException:  # also sys.exit(): the others are told all the same
                    logger.exception("A callback for view changes failed")

    def close(self, within: float) -> None:
        """Call nobody any more."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._waiting.put(None)
            thread.join(within)


def _level(event: object) -> int:
    if isinstance(event, HealthEvent):
        is_well = event.status.is_operational and event.previous.is_operational
        return logging.INFO if is_well else logging.WARNING
    if isinstance(event, MembershipEvent):
        return logging.WARNING if event.change in _GRAVE else logging.INFO
    if isinstance(event, ElectionEvent):
        return logging.ERROR if event.kind is ElectionKind.SPLIT_BRAIN else logging.INFO
    return logging.INFO
