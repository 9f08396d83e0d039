"""The door that is open while a code is shown: strangers come, few at a time, and hold up nobody.

There are a few places.  A newcomer who finds none takes that of the caller who has said nothing for
longest: one of his own address if that has its share already, else anybody's.  Somebody who only
connects, in whatever number, therefore keeps out nobody who has something to say.  How long a
caller may take is decided by whoever drives this; nothing here waits for a caller.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from potluck.closing import Closing
from potluck.errors import DistributedError, from_os_error
from potluck.logs import get_logger
from potluck.net import descriptors
from potluck.net.addresses import Address
from potluck.net.pairing import PAIRING_PORT, PairingLine
from potluck.net.tcp import listen

__all__ = ["Closed", "Connected", "Event", "PairingListener", "Received"]

logger = get_logger(__name__)

PLACES = 8
PER_ADDRESS = 4
"""Of the places, how many one address may have."""

LINGER = 1.0
"""Seconds in which somebody whom we hung up on may take our last words."""

LEAVING = 16
"""How many such there may be at once."""


@dataclass(frozen=True, slots=True)
class Connected:
    """Somebody called; ``link`` is the call's number from now on."""

    link: int
    peer: Address


@dataclass(frozen=True, slots=True)
class Received:
    """A message came in."""

    link: int
    message: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Closed:
    """A call has ended, and not because we hung up."""

    link: int
    reason: str


Event: TypeAlias = Connected | Received | Closed


@dataclass(slots=True)
class _Call:
    link: int
    line: PairingLine
    spoke: bool = False
    leaving_until: float | None = None


class PairingListener(Closing):
    """Listens until closed; used as a context manager, by one thread."""

    def __init__(self, *, port: int = PAIRING_PORT, places: int = PLACES) -> None:
        self._listener = _listen(port)
        self._places = places
        self._selector = selectors.DefaultSelector()
        descriptors.track(self._selector)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}  # in order of arrival
        self._leaving: dict[int, _Call] = {}

    @property
    def port(self) -> int:
        """The port callers use."""
        return int(self._listener.getsockname()[1])

    def wait(self, timeout: float, limit: Callable[[int], int]) -> list[Event]:
        """What happens next, or nothing after ``timeout`` seconds.

        ``limit`` says how long the next message of a call may be.  At most one message of each call
        is returned at a time, since the limit may depend on the one before.
        """
        events: list[Event] = []
        is_ringing = False
        for key, mask in self._selector.select(max(0.0, timeout)):
            call: _Call | None = key.data
            if call is None:
                is_ringing = True
            elif call.link in self._leaving:
                self._see_off(call)
            else:
                if mask & selectors.EVENT_WRITE:
                    self._flush(call)
                if mask & selectors.EVENT_READ:
                    events += self._read(call, limit(call.link))
        if is_ringing:  # last, and one at a time: whoever is here is heard before he makes room
            events += self._accept()
        self._expire()
        return events

    def send(self, link: int, message: bytes) -> None:
        """Send a message; nothing happens if the call has ended meanwhile."""
        call = self._calls.get(link)
        if call is not None:
            call.line.send(message)
            self._watch(call)

    def hang_up(self, link: int) -> None:
        """End a call as soon as what was sent is out."""
        call = self._calls.pop(link, None)
        if call is None:
            return
        while len(self._leaving) >= LEAVING:
            self._forget(next(iter(self._leaving.values())))
        call.leaving_until = time.monotonic() + LINGER
        self._leaving[link] = call
        self._see_off(call)

    def finish(self) -> None:
        """Stop answering, and let those who were hung up on take our last words."""
        self._shut_door()
        for call in list(self._calls.values()):
            self._forget(call)
        while self._leaving:
            nearest = min(call.leaving_until or 0.0 for call in self._leaving.values())
            for key, _ in self._selector.select(max(0.0, nearest - time.monotonic())):
                self._see_off(key.data)
            self._expire()

    def close(self) -> None:
        """Close everything at once."""
        self._shut_door()
        for call in [*self._calls.values(), *self._leaving.values()]:
            self._forget(call)
        self._selector.close()

    # --- callers ---

    def _accept(self) -> list[Event]:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return []
        except OSError as error:
            logger.warning("could not accept a connection: %s", error)
            time.sleep(0.05)  # out of descriptors, most likely: without a pause this would spin
            return []
        descriptors.track(sock)
        try:
            line = PairingLine(sock)
        except OSError:  # gone already
            sock.close()
            return []
        try:
            events: list[Event] = list(self._make_room(line.peer.host))
        except _Full:
            logger.info("hung up on %s: too many callers at once", line.peer)
            line.close()
            return []
        call = _Call(next(self._numbers), line)
        self._calls[call.link] = call
        self._selector.register(line, selectors.EVENT_READ, call)
        return [*events, Connected(call.link, line.peer)]

    def _make_room(self, host: str) -> list[Closed]:
        """End the call that has to give way to one from ``host``, if there is need."""
        calls = list(self._calls.values())
        same = [call for call in calls if call.line.peer.host == host]
        if len(same) >= PER_ADDRESS:
            crowd = same
        elif len(calls) >= self._places:
            crowd = calls
        else:
            return []
        silent = [call for call in crowd if not call.spoke]
        if not silent:
            raise _Full
        self._forget(silent[0])
        return [Closed(silent[0].link, "It made room for others without having said a word.")]

    def _read(self, call: _Call, limit: int) -> list[Event]:
        try:
            message = call.line.receive(limit)
        except DistributedError as error:
            self._forget(call)
            return [Closed(call.link, str(error))]
        if message is None:
            return []
        call.spoke = True
        return [Received(call.link, message)]

    # --- writing and leaving ---

    def _flush(self, call: _Call) -> None:
        call.line.flush()
        self._watch(call)

    def _watch(self, call: _Call) -> None:
        write = selectors.EVENT_WRITE if call.line.has_output else 0
        self._selector.modify(call.line, selectors.EVENT_READ | write, call)

    def _see_off(self, call: _Call) -> None:
        """Go on with the end of a call: first our words, then our end, then theirs."""
        self._flush(call)
        if not call.line.has_output:
            call.line.end()
        if call.line.drain():
            self._forget(call)

    def _expire(self) -> None:
        now = time.monotonic()
        for call in list(self._leaving.values()):
            if call.leaving_until is not None and call.leaving_until <= now:
                self._forget(call)

    def _forget(self, call: _Call) -> None:
        self._calls.pop(call.link, None)
        self._leaving.pop(call.link, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(call.line)
        call.line.close()

    def _shut_door(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()


class _Full(Exception):
    """Nobody can be asked to make room."""


def _listen(port: int) -> socket.socket:
    """Listen on this port; on any other if it is taken."""
    try:
        return listen("", port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not port:
            raise from_os_error(f"Could not listen on port {port}", error) from error
    return _listen(0)
