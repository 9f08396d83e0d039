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
from potluck.logs import get_logger
from potluck.vocabulary import ProcessId, View

__all__ = ["Bulletin", "ClusterEvent", "ViewChange"]

logger = get_logger("potluck.cluster")

KEPT = 512
"""Events that are remembered."""

ONCE_WITHIN, RECENT = 60.0, 32
"""Seconds, and events, within which the same failure is not kept again."""

KEPT_VIEWS = 64
"""Changes of the view that are remembered, which events may crowd out."""

MAX_WAITING = 1024
"""Changes that wait for a slow callback; of more, the first are dropped."""

_GRAVE = frozenset(
    {
        MembershipChange.LOST,
        MembershipChange.EXPELLED,
        MembershipChange.REMOVED,
        MembershipChange.PAUSED,
        MembershipChange.REFUSED,
    }
)


@dataclass(frozen=True, slots=True)
class ViewChange:
    """The cluster went from one view to the next.

    >>> from potluck.vocabulary import NodeId
    >>> me, you = (ProcessId(NodeId(letter * 32), 1) for letter in "ab")
    >>> alone, both = View("f" * 32, 1, (me,)), View("f" * 32, 2, (me, you))
    >>> change = ViewChange(both, alone, "attic has come")
    >>> change.joined == (you,), str(change)
    (True, 'view 2 with 2 members: attic has come')
    """

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
    """Something that happened, and when; its text is a sentence.

    >>> print(ClusterEvent("attic has left", time=0.0, number=3))
    attic has left
    """

    event: object
    time: float = field(default_factory=time.time)
    """Seconds since 1970, by the clock of this machine."""
    number: int = 0
    """Counts the events of this process, from 1."""
    level: int = logging.INFO
    """How much it matters, in the numbers of :mod:`logging`."""

    def __str__(self) -> str:
        """The sentence."""
        return str(self.event)


Callback: TypeAlias = Callable[[ViewChange], None]


class Bulletin:
    """The events of one node; callbacks run one after the other on a thread of their own."""

    def __init__(self) -> None:
        self._kept: deque[ClusterEvent] = deque(maxlen=KEPT)
        self._count = 0
        self._views: deque[tuple[float, ViewChange]] = deque(maxlen=KEPT_VIEWS)
        self._callbacks: list[Callback] = []
        self._waiting: queue.SimpleQueue[ViewChange | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def post(self, event: object, *, quietly: bool = False) -> None:
        """Keep an event and write it to the log; ``quietly`` what nobody needs to look at."""
        level = logging.DEBUG if quietly else _level(event)
        self.keep(event, level)
        logger.log(level, "%s", event, extra=_fields(event))

    def keep(self, event: object, level: int) -> None:
        """Keep an event that is in the log already."""
        self._count += 1
        self._kept.append(ClusterEvent(event, number=self._count, level=level))

    def keep_once(self, event: object, level: int) -> None:
        """The same, unless the same was kept lately: many calls may fail for one reason."""
        since, words = time.time() - ONCE_WITHIN, str(event)
        if not any(each.time > since and str(each) == words for each in list(self._kept)[-RECENT:]):
            self.keep(event, level)

    def changed(self, change: ViewChange) -> None:
        """Tell the callbacks of another view."""
        self._views.append((time.time(), change))
        if self._thread is not None and self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(change)

    @property
    def events(self) -> list[ClusterEvent]:
        """What has happened, oldest first; the last few hundred."""
        return list(self._kept)

    @property
    def views(self) -> list[tuple[float, ViewChange]]:
        """The last changes of the view and when they came, oldest first."""
        return list(self._views)

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


def _fields(event: object) -> dict[str, object]:
    """What programs that read the log want to know beside the sentence."""
    match event:
        case HealthEvent(name=name, status=status):
            return {"event": "health", "peer": name, "status": status.value}
        case MembershipEvent(change=change, process=process, view=view):
            about = {} if process is None else {"member": str(process)}
            where = {} if view is None else {"epoch": view.epoch}
            return {"event": change.value, **about, **where}
        case ElectionEvent(kind=kind, epoch=epoch, term=term):
            return {"event": kind.value, "epoch": epoch, "term": term}
    return {}


def _level(event: object) -> int:
    if isinstance(event, HealthEvent):
        is_well = event.status.is_operational and event.previous.is_operational
        return logging.INFO if is_well else logging.WARNING
    if isinstance(event, MembershipEvent):
        return logging.WARNING if event.change in _GRAVE else logging.INFO
    if isinstance(event, ElectionEvent):
        return logging.ERROR if event.kind is ElectionKind.SPLIT_BRAIN else logging.INFO
    return logging.INFO
