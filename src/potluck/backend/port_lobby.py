"""The lobby of a port: lanes find the view they belong to, or wait for it for a moment.

Members install a view some milliseconds apart, so the first to do so open lanes to others who do
not know it yet.  Such lanes wait, bounded in number and time, and are then sent away for now: their
diallers ask again for as long as they want them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from potluck.messages import Lane
from potluck.net.opening import refuse
from potluck.net.secure_socket import OpeningSocket, SecureSocket

__all__ = ["Intake", "Lobby"]

WAIT = 5.0
"""Seconds a lane waits for its view: longer than a view takes to reach every member."""

SEATS = 256
"""Lanes that may wait at once; each is an open connection."""

SEATS_EACH = 64
"""Of these, from one node, which may run that many processes; in clear, from one address."""

REMEMBERED = 64
"""Sessions that are known to be over, so that their lanes do not wait in vain."""

Intake: TypeAlias = Callable[[OpeningSocket, Lane], None]
"""Takes the lanes of one session; owns them from then on, and must not block."""


@dataclass(frozen=True, slots=True, eq=False)
class _Guest:
    """A lane that waits."""

    sock: OpeningSocket
    lane: Lane
    origin: str
    deadline: float


class Lobby:
    """Hands lanes to whoever serves their session."""

    def __init__(self) -> None:
        self._intakes: dict[bytes, Intake] = {}
        self._guests: list[_Guest] = []  # in order of arrival, so of deadline
        self._over: deque[bytes] = deque(maxlen=REMEMBERED)
        self._is_closed = False
        self._usher: threading.Thread | None = None
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """How many lanes wait."""
        with self._changed:
            return len(self._guests)

    def serve(self, session: bytes, intake: Intake) -> None:
        """From now on ``intake`` gets the lanes of a session; also those that wait."""
        with self._changed:
            self._intakes[session] = intake
            if session in self._over:
                self._over.remove(session)
            come = self._dismiss(lambda guest: guest.lane.session == session)
        for guest in come:
            _hand_over(guest, intake)

    def withdraw(self, session: bytes) -> None:
        """Nobody serves a session any more, and nobody will."""
        with self._changed:
            if self._intakes.pop(session, None) is not None:
                self._over.append(session)

    def receive(self, sock: OpeningSocket, lane: Lane) -> None:
        """Take a lane in."""
        with self._changed:
            intake = self._intakes.get(lane.session)
            refused = "" if intake is not None else self._seat(sock, lane)
        if intake is not None:
            intake(sock, lane)
        elif refused:
            refuse(sock, refused, for_now=True)

    def _seat(self, sock: OpeningSocket, lane: Lane) -> str:
        """Let a lane wait; or why it cannot."""
        if self._is_closed:
            return "this process is leaving"
        if lane.session in self._over:
            return "this view is over here"
        origin = _origin(sock)
        here = sum(guest.origin == origin for guest in self._guests)
        if here >= SEATS_EACH or len(self._guests) >= SEATS:
            return "too many connections wait here for views that are yet to come"
        self._guests.append(_Guest(sock, lane, origin, time.monotonic() + WAIT))
        if self._usher is None:
            self._usher = threading.Thread(target=self._run, name="potluck-lobby", daemon=True)
            try:
                self._usher.start()
            except RuntimeError:  # the system gives no more threads
                self._usher = None
                self._guests.pop()
                return "this machine has no thread left to answer with"
        return ""

    def _run(self) -> None:
        """Send away whoever has waited in vain, until nobody waits."""
        while True:
            with self._changed:
                if not self._guests:
                    self._usher = None
                    return
                self._changed.wait(max(0.0, self._guests[0].deadline - time.monotonic()))
                late = self._dismiss(lambda guest: guest.deadline <= time.monotonic())
            for guest in late:
                refuse(guest.sock, "the view of this lane is not known here yet", for_now=True)

    def _dismiss(self, chosen: Callable[[_Guest], bool]) -> list[_Guest]:
        """Take guests off the list; only inside the lock."""
        leaving = [guest for guest in self._guests if chosen(guest)]
        self._guests = [guest for guest in self._guests if guest not in leaving]
        if leaving:
            self._changed.notify_all()
        return leaving

    def close(self) -> None:
        """Send everybody away, and seat nobody from now on."""
        with self._changed:
            self._is_closed = True
            self._intakes.clear()
            leaving = self._dismiss(lambda _: True)
            usher = self._usher
        for guest in leaving:
            refuse(guest.sock, "this process is leaving", for_now=True)
        if usher is not None and usher is not threading.current_thread():
            usher.join()


def _hand_over(guest: _Guest, intake: Intake) -> None:
    try:
        intake(guest.sock, guest.lane)
    except OSError:
        guest.sock.close()  # it has left meanwhile


def _origin(sock: OpeningSocket) -> str:
    if isinstance(sock, SecureSocket):
        return sock.peer
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""
