"""One control lane: frames in and out of TLS, without ever waiting.

Only the I/O thread touches the socket and TLS.  What is to be sent is put into a bounded outbox by
any thread; what does not fit is dropped and counted, for a peer that has stopped must not hold up
anybody, and whoever sends treats it like a message that was lost on the way.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from potluck.errors import ChannelClosed, DistributedError, MalformedFrame
from potluck.net import descriptors
from potluck.net.frames import HEADER_SIZE, MAX_CONTROL, Kind, decode, encode
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.tcp import prepare
from potluck.net.tls import TlsChannel

__all__ = ["CLOSED", "MAX_UNREAD", "Frame", "Lane", "LaneEnded"]

MAX_OUTBOX = 1 << 20
"""Bytes that wait for a peer before more are dropped: minutes of heartbeats."""

BATCH = 1 << 16
"""Bytes encrypted, and bytes read, at a time."""

MAX_UNREAD = 512
"""Messages of a peer that nobody has looked at yet, before we read no more of it."""


CLOSED = "it closed the connection"
"""What is seen of the end of a process that leaves in good order."""


class Frame(NamedTuple):
    """A message as it came in."""

    tag: int
    payload: bytes


class LaneEnded(Exception):
    """Nothing more will come; the text says what was seen."""


class Lane:
    """A connection that is open for control messages; ``name`` says where it leads."""

    def __init__(self, sock: OpeningSocket, name: str) -> None:
        self.name = name
        self.dropped = 0
        """Messages that did not fit into the outbox."""
        self._channel: TlsChannel | None = None
        first = b""
        if isinstance(sock, SecureSocket):
            self.sock, self._channel, first = sock.hand_over()
        else:
            self.sock = sock
        self._incoming = bytearray(first)
        self._outbox: deque[bytes] = deque()
        self._octets = 0
        self._unsent = memoryview(b"")
        self._lock = threading.Lock()
        self.handed_on = 0  # messages; counted by the I/O thread
        self.looked_at = 0  # of these; counted by whoever hears them
        self.is_deaf = False  # we read no more until somebody has
        self.wants_write = False
        self.closing_at: float | None = None  # when it is closed, sent or not
        self.is_retired = False  # nobody sends on it any more; it stays open for a while
        self.is_over = False
        descriptors.track(self.sock)
        prepare(self.sock)

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    # -- any thread ----------------------------------------------------------------------------

    def put(self, payload: bytes, tag: int) -> bool:
        """Queue a message; False if there is no room for it, or the lane is over."""
        if len(payload) > MAX_CONTROL:
            msg = f"A control message of {len(payload)} bytes; {MAX_CONTROL} are possible"
            raise ValueError(msg)
        frame = encode(Kind.CONTROL, tag=tag, length=len(payload)) + payload
        with self._lock:
            if self.is_over or self.closing_at is not None:
                return False
            if self._octets + len(frame) > MAX_OUTBOX:
                self.dropped += 1
                return False
            self._outbox.append(frame)
            self._octets += len(frame)
        return True

    @property
    def is_flushed(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._outbox and not self._unsent

    @property
    def unread(self) -> int:
        """Messages that nobody has looked at yet."""
        return self.handed_on - self.looked_at

    # -- the I/O thread ------------------------------------------------------------------------

    def flush(self) -> bool:
        """Send what can be sent now; True when nothing is left.  Raises ``OSError``."""
        while True:
            if not self._unsent:
                plain = self._take()
                if not plain:
                    return True
                self._unsent = memoryview(self._seal(plain))
            try:
                sent = self.sock.send(self._unsent)
            except BlockingIOError:
                return False
            self._unsent = self._unsent[sent:]

    def _take(self) -> bytes:
        taken: list[bytes] = []
        size = 0
        with self._lock:
            while self._outbox and size < BATCH:
                taken.append(self._outbox.popleft())
                size += len(taken[-1])
            self._octets -= size
        return b"".join(taken)

    def _seal(self, plain: bytes) -> bytes:
        if self._channel is None:
            return plain
        self._channel.write(plain)
        return self._channel.outgoing()

    def first(self) -> list[Frame]:
        """What came with the opening; raises like :meth:`read`."""
        return list(self._frames())

    def read(self) -> list[Frame]:
        """What has come in; raises :class:`LaneEnded`, ``OSError`` or ``MalformedFrame``."""
        try:
            data = self.sock.recv(BATCH)
        except BlockingIOError:
            return []
        if not data:
            raise LaneEnded("its process ended (it crashed or was killed)")
        if self._channel is None:
            self._incoming += data
        else:
            self._channel.receive(data)
            self._incoming += self._channel.read()
        found = list(self._frames())
        if self._channel is not None and self._channel.closed_by_peer and not found:
            raise LaneEnded(CLOSED)
        return found

    def _frames(self) -> Iterator[Frame]:
        data = self._incoming
        start = 0
        while len(data) - start >= HEADER_SIZE:
            header = decode(data, start, max_eager=0)  # lengths are checked there
            if header.kind is not Kind.CONTROL:
                raise MalformedFrame(f"A {header.kind.name} frame on a control lane")
            end = start + HEADER_SIZE + header.length
            if len(data) < end:
                break
            yield Frame(header.tag, bytes(data[start + HEADER_SIZE : end]))
            start = end
        del data[:start]

    def close(self) -> None:
        """Close the socket, saying so in TLS if that is possible at once."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            self._outbox.clear()
        if self._channel is not None and not self._unsent:
            with contextlib.suppress(OSError, DistributedError, ChannelClosed):
                self._channel.unwrap()
                self.sock.send(self._channel.outgoing())
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        self.sock.close()
