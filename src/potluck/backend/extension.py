"""The door of a complete group: its members may open further lanes, and nobody else anything."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import TypeAlias

from potluck.backend.lanes import OpenLane
from potluck.core.handshake import Refused
from potluck.errors import MalformedFrame
from potluck.messages import Join, Lane, unpack
from potluck.net.opening import refuse
from potluck.net.secure_socket import OpeningSocket

__all__ = ["COMPLETE", "MESSAGES", "Deliver", "Extension"]

MESSAGES = "messages"
"""The purpose of the first lane between two ranks."""

COMPLETE = "this group is complete"

AHEAD = 64
"""Lanes that a rank may open ahead of us, one for each group that it uses before we do."""

AT_ONCE = 16
"""Lanes of one rank that are answered at the same time, each by a thread."""

Deliver: TypeAlias = Callable[[int, str, OpenLane], None]
"""(rank, purpose, the lane it has opened)"""


class Extension:
    """Answers hellos for further lanes.

    Each lane is answered on a thread of its own, for a moment, so that nobody holds up others.  A
    rank that is too far ahead of us is sent away before it is answered, and asks again.
    ``judge`` says who may have one, ``answer`` grants it, and ``waiting`` is how many lanes of a
    rank nobody has asked for yet.
    """

    def __init__(
        self,
        judge: Callable[[OpeningSocket, Lane], Refused | None],
        answer: Callable[[OpeningSocket, Lane], OpenLane],
        deliver: Deliver,
        waiting: Callable[[int], int],
    ) -> None:
        self._judge = judge
        self._grant = answer
        self._deliver = deliver
        self._waiting = waiting
        self._answering: collections.Counter[int] = collections.Counter()  # lanes of each rank
        self._lock = threading.Lock()

    def receive(self, sock: OpeningSocket, payload: bytes) -> None:
        """Take a hello."""
        lane = unpack(payload, Join | Lane)  # type: ignore[arg-type]
        if not isinstance(lane, Lane) or lane.purpose == MESSAGES:
            refuse(sock, COMPLETE, for_now=True)
        else:
            self.offer(sock, lane)

    def offer(self, sock: OpeningSocket, lane: Lane) -> None:
        """Take a lane, if its dialler may have it; never waits for it."""
        refused = self._judge(sock, lane)
        if refused is not None:
            refuse(sock, refused.sentence)
        elif not self._has_room(lane.rank):
            refuse(sock, f"too many connections of rank {lane.rank} wait here", for_now=True)
        else:
            self._begin(sock, lane)

    def _has_room(self, rank: int) -> bool:
        with self._lock:
            answering = self._answering[rank]
        return answering < AT_ONCE and answering + self._waiting(rank) < AHEAD

    def _begin(self, sock: OpeningSocket, lane: Lane) -> None:
        self._count(lane.rank, 1)
        thread = threading.Thread(
            target=self._answer, args=(sock, lane), name="potluck-lane", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads
            self._count(lane.rank, -1)
            refuse(sock, "this machine has no thread left to answer with", for_now=True)

    def _answer(self, sock: OpeningSocket, lane: Lane) -> None:
        try:
            opened = self._grant(sock, lane)
        except (OSError, MalformedFrame):
            sock.close()  # it gave up this instant, and may dial again
        else:
            self._deliver(lane.rank, lane.purpose, opened)
        finally:
            self._count(lane.rank, -1)

    def _count(self, rank: int, change: int) -> None:
        with self._lock:
            self._answering[rank] += change
