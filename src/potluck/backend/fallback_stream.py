"""Streams carried by messages: for backends that have no connections of their own to offer.

Every backend can send and receive; that is enough for collectives.  A stream is a sequence of
messages between two ranks in a group of its own: a length, then that many bytes, and a length of
zero at its end.  Backends with real connections are faster and override this.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from potluck.backend.operation import Operation
    from potluck.net.transport import Buffer, Event, Stream


CHUNK = 256 << 10
"""Bytes of one message at most."""

IN_FLIGHT = 8
"""Messages, lengths included, that may be under way before a stream takes no more."""

NAP = 0.002
"""Seconds of one sleep: a wake-up from another thread is noticed so late at most."""

LENGTH = 8
"""Bytes of a length."""


class MessageTransport(Protocol):
    """What is needed of a backend."""

    def post_send(self, data: Any, dst: int, *, tag: int = 0, group: int = 0) -> Operation:
        """Start sending."""

    def post_recv_into(self, into: Any, src: int, *, tag: int = 0, group: int = 0) -> Operation:
        """Start receiving."""

    def progress(self, timeout: float | None = 0) -> None:
        """Move bytes."""

    def peer_name(self, rank: int) -> str:
        """Where a rank is, for people."""


class MessageStream:
    """One end of a stream."""

    is_local = False  # nobody here knows
    shared = None

    def __init__(self, messages: MessageTransport, rank: int, purpose: str) -> None:
        self._messages = messages
        self._rank = rank
        digest = hashlib.blake2b(f"stream/{purpose}".encode(), digest_size=8).digest()
        self._group = int.from_bytes(digest, "little") | 1
        self._leaving: deque[Operation] = deque()
        self._inbox = bytearray(LENGTH)
        self._is_length = True  # what the inbox waits for
        self._arriving = self._receive()
        self._here = memoryview(b"")
        self._ended = False
        self._closed = False

    @property
    def peer_name(self) -> str:
        """Where the other end is, for people."""
        return self._messages.peer_name(self._rank)

    # -- out -----------------------------------------------------------------------------------

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        """Send a copy of what fits into one message."""
        if not self._has_room():
            raise BlockingIOError
        if self._closed or self._ended:
            raise BrokenPipeError(32, "Broken pipe")
        data = _beginning(buffers)
        if data:
            self._leaving.append(self._send(len(data).to_bytes(LENGTH, "little")))
            self._leaving.append(self._send(data))
        return len(data)

    def _send(self, data: bytes) -> Operation:
        return self._messages.post_send(data, self._rank, group=self._group)

    def _has_room(self) -> bool:
        while self._leaving and self._leaving[0].done:
            _check(self._leaving.popleft())
        return len(self._leaving) < IN_FLIGHT

    def is_writable(self) -> bool:
        """Whether a write would take bytes, or fail."""
        try:
            return self._has_room() or self._closed
        except OSError:
            return True

    # -- in ------------------------------------------------------------------------------------

    def recv_into(self, buffer: memoryview, /) -> int:
        """Take what has come."""
        if self._closed:
            raise OSError(9, "Bad file descriptor")
        self._advance()
        count = min(len(buffer), len(self._here))
        if count:
            buffer[:count] = self._here[:count]
            self._here = self._here[count:]
        elif not self._ended and buffer:
            raise BlockingIOError
        return count

    def _receive(self) -> Operation:
        return self._messages.post_recv_into(self._inbox, self._rank, group=self._group)

    def _advance(self) -> None:
        """Take in the messages that are here, up to the next bytes."""
        while not self._here and not self._ended and self._arriving.done:
            _check(self._arriving)
            if self._is_length:
                length = int.from_bytes(self._inbox, "little")
                if length > CHUNK:
                    msg = f"Rank {self._rank} announced {length} bytes; the limit is {CHUNK}"
                    raise ConnectionAbortedError(msg)
                self._ended = length == 0
                self._inbox = bytearray(length)
            else:
                self._here = memoryview(self._inbox)
                self._inbox = bytearray(LENGTH)
            self._is_length = not self._is_length
            if not self._ended:
                self._arriving = self._receive()

    def is_readable(self) -> bool:
        """Whether a read would give bytes or the end, or fail."""
        try:
            self._advance()
        except OSError:
            return True
        return bool(self._here) or self._ended or self._closed

    def is_broken(self) -> bool:
        """Whether reading fails for good."""
        return self._closed or (self._arriving.done and self._arriving.error is not None)

    # -- the end -------------------------------------------------------------------------------

    def expect(self, count: int) -> None:
        """Do nothing: the reader is woken for every message anyway."""

    def pace(self, rate: int) -> None:
        """Nothing: the messages below have a pace of their own."""

    def finish(self, deadline: float) -> None:
        """Let what was written leave until ``deadline``, then close."""
        with contextlib.suppress(OSError):
            for operation in self._leaving:
                operation.wait(max(0.0, deadline - time.monotonic()))
        self.close()

    def close(self) -> None:
        """Say that this is the end, and give all memory back."""
        if self._closed:
            return
        self._closed = True
        for operation in (*self._leaving, self._arriving):
            operation.cancel()
        if not self._ended:
            with contextlib.suppress(Exception):  # the backend may be closed, the peer gone
                self._send(bytes(LENGTH))


class MessageStreamPoller:
    """Sleeps until one of its streams can move bytes."""

    def __init__(self, messages: MessageTransport) -> None:
        self._messages = messages
        self._streams: dict[int, MessageStream] = {}
        self._writers: set[int] = set()
        self._muted: set[int] = set()
        self._woken = False

    def register(self, stream: Stream, key: int) -> None:
        """Watch a stream for reading."""
        assert isinstance(stream, MessageStream)
        self._streams[key] = stream

    def want_write(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: ARG002, FBT001
        """Watch for room to write as well, or stop."""
        (self._writers.add if wanted else self._writers.discard)(key)

    def want_read(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: ARG002, FBT001
        """Stop watching for bytes to read, or do so again."""
        (self._muted.discard if wanted else self._muted.add)(key)

    def unregister(self, stream: Stream) -> None:
        """Stop watching."""
        for key in [key for key, known in self._streams.items() if known is stream]:
            del self._streams[key]
            self._writers.discard(key)

    def wait(self, timeout: float | None) -> list[Event]:
        """Move messages until something can move here, or time is up."""
        deadline = None if timeout is None else time.monotonic() + timeout
        nap = 0.0
        while True:
            began = time.monotonic()
            self._messages.progress(nap)
            events = self._scan()
            now = time.monotonic()
            if events or self._woken or (deadline is not None and now >= deadline):
                self._woken = False
                return events
            if nap and now - began < nap / 2:
                time.sleep(nap / 4)  # another thread moves the messages
            nap = NAP if deadline is None else min(NAP, deadline - now)

    def _scan(self) -> list[Event]:
        events = []
        for key, stream in self._streams.items():
            readable = stream.is_broken() if key in self._muted else stream.is_readable()
            writable = key in self._writers and stream.is_writable()
            if readable or writable:
                events.append((key, readable, writable))
        return events

    def wake(self) -> None:
        """End the current or next wait."""
        self._woken = True

    def close(self) -> None:
        """Forget the streams."""
        self._streams.clear()


def _beginning(buffers: Sequence[Buffer]) -> bytes:
    taken, room = [], CHUNK
    for buffer in buffers:
        taken.append(memoryview(buffer)[:room])
        room -= len(taken[-1])
        if not room:
            break
    return b"".join(taken)


def _check(operation: Operation) -> None:
    """Raise what went wrong, as streams do."""
    error = operation.error
    if isinstance(error, OSError):
        raise error
    if error is not None:
        raise ConnectionAbortedError(str(error))
