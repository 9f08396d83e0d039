"""Callers at the door, from their first byte to their hello, and who makes room when it is full.

When all places are taken the address with most callers gives one up: that of whoever has come least
far there, and of these has waited longest.  So a crowd costs itself its places, and somebody who
calls from elsewhere, or says what he has to say, keeps his.  Addresses of members give up a place
last.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Collection

from potluck.errors import MalformedFrame
from potluck.net.handshakes import source_of
from potluck.net.opening import Conversation, Greeting
from potluck.net.secure_socket import CHUNK, OpeningSocket, SecureSocket
from potluck.net.tls import TlsChannel

__all__ = ["PATIENCE", "SLOTS", "SLOTS_PER_HOST", "Caller", "whom_to_drop"]

PATIENCE = 5.0
"""Seconds a caller has to say hello."""

SLOTS = 64
"""Callers that may be in the middle of a hello at once."""

SLOTS_PER_HOST = 48
"""Of these, from one address: a flood from one machine leaves room for the others."""


class Caller:
    """Somebody at the door."""

    def __init__(
        self, sock: socket.socket, host: str, port: int, source: str = "", *, is_known: bool = False
    ) -> None:
        self.sock = sock
        self.host = host
        self.source = source or source_of(host)
        self.is_known = is_known
        """Whether a member has come from its address before."""
        self.cpu = 0.0
        """Seconds of CPU that it has cost so far."""
        self.is_waiting = False
        """It has said something that a worker has to answer; it is not read meanwhile."""
        self.name = f"{host}:{port}"
        self.deadline = time.monotonic() + PATIENCE
        self.greeting = Greeting()
        self.channel: TlsChannel | None = None
        self.conversation: Conversation | None = None
        self.hello: bytes | None = None
        self.is_leaving = False
        self.is_behind = False  # it has not read all that was said to it
        self._is_answered = False  # it has said enough for TLS to have something to say to it
        self._unsent = bytearray()

    @property
    def progress(self) -> int:
        """0 for one that has said little, 1 in the middle of a handshake, 2 for one of us."""
        if self.channel is None:
            return 0
        return 2 if self.channel.handshake_done else int(self._is_answered)

    def read(self) -> bytes:
        """What is there to be taken in; b"" when the caller has hung up."""
        return self.sock.recv(self.greeting.wanted if self.channel is None else CHUNK)

    def needs_worker(self) -> bool:
        """Whether taking in bytes costs cryptography for somebody unknown."""
        return self.channel is not None and not self.channel.handshake_done

    def take(self, data: bytes) -> None:
        """Take in what was read."""
        if self.channel is None:
            self.greeting.receive(data)
        else:
            self.channel.receive(data)

    def hear(self) -> None:
        """Answer, and read what can be read of it."""
        if self.channel is not None:
            self.send_pending()
            if self.channel.handshake_done:
                self._read_plain(self.channel.read())

    def _read_plain(self, data: bytes) -> None:
        while data and self.greeting.wanted:
            part, data = data[: self.greeting.wanted], data[self.greeting.wanted :]
            self.greeting.receive(part)
        if data:
            raise MalformedFrame("It said more than hello")

    def say(self, frames: bytes) -> None:
        """Send frames, and listen for the next one."""
        self.greeting = Greeting()
        if frames and self.channel is not None:
            self.channel.write(frames)
            self.send_pending()

    def send_pending(self) -> bool:
        """Send what TLS has to say, as far as the caller reads it; True when all is sent."""
        if self.channel is not None:
            self._unsent += self.channel.outgoing()
            self._is_answered = self._is_answered or bool(self._unsent)
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        return not self._unsent

    def as_socket(self) -> OpeningSocket:
        """The connection as whoever answers the hello uses it."""
        return self.sock if self.channel is None else SecureSocket(self.sock, self.channel)


def whom_to_drop(callers: Collection[Caller], newcomer: Caller) -> tuple[Caller, str] | None:
    """Who makes room for one more, and why; None while there is room.

    ``callers`` are in the order in which they came.
    """
    sizes = Counter(caller.source for caller in callers)
    if sizes[newcomer.source] >= SLOTS_PER_HOST:
        source, reason = newcomer.source, "too many callers from its address"
    elif len(callers) >= SLOTS:
        sizes[newcomer.source] += 1
        known = {caller.source for caller in callers if caller.is_known}
        source = max(sizes, key=lambda each: (each not in known, sizes[each]))
        reason = "too many callers at once"
    else:
        return None
    crowd = [caller for caller in callers if caller.source == source]
    return min(crowd, key=lambda each: each.progress, default=newcomer), reason
