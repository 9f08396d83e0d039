"""What a node of the demo passes on of its cluster's events, as soon as it can."""

from __future__ import annotations

import threading
import time
from typing import Self

from potluck import Cluster, ClusterEvent, ViewChange
from potluck.apps.cli.demo_mail import Mail
from potluck.apps.cli.demo_messages import Happened
from potluck.closing import Closing
from potluck.core.cluster_events import MembershipChange, MembershipEvent

__all__ = ["Watcher"]

INSTALLED = MembershipChange.INSTALLED.value


class Watcher(Closing):
    """Passes on events of membership, each once; a context manager."""

    def __init__(self, cluster: Cluster, mail: Mail) -> None:
        self._cluster = cluster
        self._mail = mail
        self._lock = threading.Lock()
        self._last: ClusterEvent | None = None

    def __enter__(self) -> Self:
        """Begin."""
        self._stop = self._cluster.on_view_change(self._changed)
        self.look()
        return self

    def close(self) -> None:
        """End."""
        self._stop()

    def look(self) -> None:
        """Tell what has happened since the last look."""
        with self._lock:
            events = self._cluster.events()
            news = []
            for event in reversed(events):
                if event is self._last:
                    break
                news.append(event)
            self._last = events[-1] if events else None
            for event in reversed(news):
                self._tell(event)

    def _changed(self, change: ViewChange) -> None:
        """Another view: what led to it, and then itself."""
        now = time.monotonic()
        self.look()
        self._mail.tell(Happened(INSTALLED, str(change), "", change.view.epoch, now))

    def _tell(self, event: ClusterEvent) -> None:
        told = event.event
        if isinstance(told, MembershipEvent) and told.change is not MembershipChange.INSTALLED:
            about = "" if told.process is None else str(told.process)
            epoch = 0 if told.view is None else told.view.epoch
            ago = time.time() - event.time  # the demo's clock is the one that never jumps
            at = time.monotonic() - ago
            self._mail.tell(Happened(told.change.value, str(told), about, epoch, at))
