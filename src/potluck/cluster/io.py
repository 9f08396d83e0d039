"""The I/O thread: one for all control connections of a process.

It moves bytes and decides nothing.  What comes in goes to callbacks, which must return at
once.  A peer that does not read fills its own outbox and no other; one that
sends faster than anybody looks is not read for a while.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from potluck import _process
from potluck.errors import (
    ChannelClosed,
    DistributedError,
    MalformedFrame,
    describe_loss,
)
from potluck.logs import get_logger
from potluck.net.frames import HEADER_SIZE, MAX_CONTROL, FrameType, decode, encode
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.tcp import Waker, prepare
from potluck.net.tls import TlsChannel

# --------------------------------------------------------------------------------------------------
# One control connection: frames in and out of TLS, without ever waiting.
#
# Only the I/O thread touches the socket and TLS.  What is to be sent is put into a bounded outbox
# by any thread; what does not fit is dropped and counted, for a peer that has stopped must not hold
# up any thread, and the sender treats it like a message that was lost on the way.

MAX_OUTBOX = 1 << 20
"""Bytes that wait for a peer before more are dropped: minutes of heartbeats."""

BATCH = 1 << 16
"""Bytes encrypted, and bytes read, at a time."""

MAX_UNREAD = 512
"""Messages of a peer that were not handled yet, before we read no more of it."""


CLOSED = "it closed the connection"
"""What is seen of the end of a process that leaves in good order."""


class ControlFrame(NamedTuple):
    """A message as it came in."""

    tag: int
    payload: bytes


class ConnectionEnded(Exception):
    """Nothing more will come; the text says what was seen."""


class ControlConnection:
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
        self._queued_bytes = 0
        self._unsent = memoryview(b"")
        self._lock = threading.Lock()
        self.handed_on = 0  # messages; counted by the I/O thread
        self.looked_at = 0  # of these; counted by the listener
        self.is_deaf = False  # we read no more until they are
        self.wants_write = False
        self.closing_at: float | None = None  # when it is closed, sent or not
        self.is_retired = False  # we send on it no more; it stays open while the peer does
        self.handed_on_before = 0  # messages, when it was last looked at for being used
        self.patience = 0.0  # seconds for which it is kept without a message, if it is retired
        self.is_over = False
        _process.track(self.sock)
        prepare(self.sock)

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    # -- any thread ----------------------------------------------------------------------------

    def put(self, payload: bytes, tag: int) -> bool:
        """Queue a message; False if there is no room for it, or the connection is over."""
        if len(payload) > MAX_CONTROL:
            msg = (
                f"A control message of {len(payload)} bytes is too long: {MAX_CONTROL} is the limit"
            )
            raise ValueError(msg)
        frame = encode(FrameType.CONTROL, tag=tag, length=len(payload)) + payload
        with self._lock:
            if self.is_over or self.closing_at is not None:
                return False
            if self._queued_bytes + len(frame) > MAX_OUTBOX:
                self.dropped += 1
                return False
            self._outbox.append(frame)
            self._queued_bytes += len(frame)
        return True

    @property
    def is_flushed(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._outbox and not self._unsent

    @property
    def unread(self) -> int:
        """Messages that were not handled yet."""
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
            self._queued_bytes -= size
        return b"".join(taken)

    def _seal(self, plain: bytes) -> bytes:
        if self._channel is None:
            return plain
        self._channel.write(plain)
        return self._channel.outgoing()

    def first(self) -> list[ControlFrame]:
        """What came with the opening; raises like :meth:`read`."""
        return list(self._frames())

    def read(self) -> list[ControlFrame]:
        """What has come in; raises :class:`ConnectionEnded`, ``OSError`` or ``MalformedFrame``."""
        try:
            data = self.sock.recv(BATCH)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionEnded("its process ended (it crashed or was killed)")
        if self._channel is None:
            self._incoming += data
        else:
            self._channel.receive(data)
            self._incoming += self._channel.read()
        found = list(self._frames())
        if self._channel is not None and self._channel.closed_by_peer and not found:
            raise ConnectionEnded(CLOSED)
        return found

    def _frames(self) -> Iterator[ControlFrame]:
        data = self._incoming
        start = 0
        while len(data) - start >= HEADER_SIZE:
            header = decode(data, start, max_eager=0)  # lengths are checked there
            if header.kind is not FrameType.CONTROL:
                raise MalformedFrame(f"A {header.kind.name} frame on a control connection")
            end = start + HEADER_SIZE + header.length
            if len(data) < end:
                break
            yield ControlFrame(header.tag, bytes(data[start + HEADER_SIZE : end]))
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


# --------------------------------------------------------------------------------------------------

logger = get_logger(__name__)

LINGER = 1.0
"""Seconds for the last words of a connection that we close."""

RETIRED = 3.0
"""Seconds without a message after which a connection that we do not use is closed.

Each side chooses between two connections when it learns of the second one, and they may choose
differently.  So a connection that the other side still uses stays open.
"""


class IoThread:
    """Moves the bytes of control connections until closed.

    It tells of messages, of the ends of connections (with the rest of a sentence about the peer),
    and of its own failure: then nothing will come any more.  It calls on its thread; each call
    returns at once.
    """

    def __init__(
        self,
        arrived: Callable[[ControlConnection, ControlFrame], None],
        ended: Callable[[ControlConnection, str], None],
        failed: Callable[[str], None],
    ) -> None:
        self._arrived = arrived
        self._ended = ended
        self._failed = failed
        self._selector = selectors.DefaultSelector()
        self._waker = Waker(self._selector)
        _process.track(self._selector)
        _process.on_fork(self)
        self._connections: set[ControlConnection] = set()
        self._tasks: deque[Callable[[], None]] = deque()
        self._woken = False
        self._stopping = False
        self._until = 0.0
        self._is_foreign = False  # in a forked child, where there is no such thread
        self._thread = threading.Thread(target=self._run, name="potluck-io", daemon=True)
        self._thread.start()

    # -- any thread ----------------------------------------------------------------------------

    def add(self, connection: ControlConnection) -> None:
        """Move the bytes of a connection from now on."""
        self._ask(lambda: self._begin(connection))

    def send(self, connection: ControlConnection, payload: bytes, tag: int = 0) -> bool:
        """Send a message when the peer reads; False if it was dropped."""
        if not connection.put(payload, tag):
            return False
        self._ask(lambda: self._flush(connection))
        return True

    def looked_at(self, connection: ControlConnection) -> None:
        """A message of this connection was handled."""
        connection.looked_at += 1
        if connection.is_deaf and connection.unread < MAX_UNREAD // 2:
            self._ask(lambda: self._listen(connection))

    def drop(self, connection: ControlConnection, linger: float = LINGER) -> None:
        """Close a connection once what is queued has been sent; its end is not reported."""
        self._ask(lambda: self._part(connection, time.monotonic() + linger))

    def retire(self, connection: ControlConnection, after: float = RETIRED) -> None:
        """Send on a connection no more, and close it when nothing has come on it for some time.

        The other side may not know yet that there is a better one, or may use this one for good.
        """
        connection.is_retired, connection.patience = True, after
        self.drop(connection, after)

    def close(self, linger: float = LINGER) -> None:
        """Send what is queued, for this many seconds at most, and close every connection."""
        if not self._stopping:
            self._until = time.monotonic() + linger
            self._stopping = True
            self._wake()
        if not self._is_foreign and threading.current_thread() is not self._thread:
            self._thread.join(linger + LINGER)

    def become_forked(self) -> None:
        """In a forked child: the descriptors are closed, the thread is not here."""
        self._stopping = self._is_foreign = True

    def _ask(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._waker.wake()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "it was closed"
        try:
            while not self._is_done():
                self._round()
        except BaseException as error:
            reason = f"the thread that moves control messages failed: {error!r}"
            if not self._is_foreign:
                logger.exception("The I/O thread failed")
            raise
        finally:
            for connection in list(self._connections):
                self._remove(connection)
            self._selector.close()
            self._waker.close()
            if not self._stopping:
                self._failed(reason)

    def _is_done(self) -> bool:
        if not self._stopping or self._tasks:
            return False
        return time.monotonic() >= self._until or all(
            connection.is_flushed for connection in self._connections
        )

    def _round(self) -> None:
        for key, events in self._selector.select(self._patience()):
            if key.data is self._waker:
                self._waker.drain()
            elif key.data in self._connections:
                self._move(key.data, events)
        self._woken = False  # before the tasks: one that is added from now on wakes us again
        while self._tasks:
            self._tasks.popleft()()
        now = time.monotonic()
        for connection in [each for each in self._connections if each.closing_at is not None]:
            if connection.is_retired and connection.handed_on > connection.handed_on_before:
                connection.handed_on_before, connection.closing_at = (
                    connection.handed_on,
                    now + connection.patience,
                )
            elif now >= (connection.closing_at or 0.0) or (
                connection.is_flushed and not connection.is_retired
            ):
                self._end(connection, "it was no longer used")

    def _patience(self) -> float | None:
        moments = [
            connection.closing_at
            for connection in self._connections
            if connection.closing_at is not None
        ]
        if self._stopping:
            moments.append(self._until)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _begin(self, connection: ControlConnection) -> None:
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, connection)
        self._guarded(connection, lambda: self._hand_on(connection, connection.first()))
        self._flush(connection)

    def _move(self, connection: ControlConnection, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._guarded(connection, lambda: self._hand_on(connection, connection.read()))
        if events & selectors.EVENT_WRITE:
            self._flush(connection)

    def _hand_on(self, connection: ControlConnection, frames: list[ControlFrame]) -> None:
        for frame in frames:
            connection.handed_on += 1
            self._arrived(connection, frame)
        if connection.unread >= MAX_UNREAD and not connection.is_deaf:
            connection.is_deaf = True
            self._watch(connection)
            if connection.unread < MAX_UNREAD // 2:  # all were looked at while we made up our mind
                self._listen(connection)

    def _listen(self, connection: ControlConnection) -> None:
        if connection.is_deaf:
            connection.is_deaf = False
            self._watch(connection)

    def _flush(self, connection: ControlConnection) -> None:
        if connection not in self._connections:
            return
        self._guarded(connection, lambda: self._note(connection, unsent=not connection.flush()))

    def _note(self, connection: ControlConnection, *, unsent: bool) -> None:
        if connection.wants_write is not unsent:
            connection.wants_write = unsent
            self._watch(connection)

    def _watch(self, connection: ControlConnection) -> None:
        if connection not in self._connections:
            return
        events = 0 if connection.is_deaf else selectors.EVENT_READ
        events |= selectors.EVENT_WRITE if connection.wants_write else 0
        known = connection in self._selector.get_map()
        if not events:
            if known:
                self._selector.unregister(connection)
        elif known:
            self._selector.modify(connection, events, connection)
        else:
            self._selector.register(connection, events, connection)

    def _guarded(self, connection: ControlConnection, action: Callable[[], None]) -> None:
        """Do something with a connection; what goes wrong with it ends it, and nothing else."""
        if connection not in self._connections:
            return
        try:
            action()
        except ConnectionEnded as error:
            self._end(connection, str(error))
        except (OSError, MalformedFrame, DistributedError) as error:
            self._end(connection, describe_loss(error))

    def _end(self, connection: ControlConnection, cause: str) -> None:
        told = connection.closing_at is None or connection.is_retired
        self._remove(connection)
        if told:
            self._ended(connection, cause)

    def _part(self, connection: ControlConnection, until: float) -> None:
        if connection in self._connections and connection.closing_at is None:
            connection.closing_at = until
            self._flush(connection)

    def _remove(self, connection: ControlConnection) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(connection)
        connection.close()
