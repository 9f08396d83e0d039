"""The in-memory twin of :mod:`potluck.net.tcp`: streams between pollers of one process.

Bytes are copied into the receiving end and become readable there after an optional delay.  Order
within a stream is always kept, as TCP keeps it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck.net.transport import Buffer, Event, Stream


Delay = Callable[[], float]


class MemoryPoller:
    """Sleeps on a condition that the other ends of its streams notify."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.changed = threading.Condition(threading.RLock())  # a signal's handler may wake it
        self._streams: dict[int, MemoryStream] = {}
        self._writers: set[int] = set()
        self._muted: set[int] = set()
        self._woken = False

    def register(self, stream: Stream, key: int) -> None:
        """Watch a stream for reading."""
        assert isinstance(stream, MemoryStream)
        with self.changed:
            self._streams[key] = stream
            self._writers.discard(key)
            self._muted.discard(key)
            stream.poller = self
            self.changed.notify_all()

    def want_write(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: ARG002, FBT001
        """Watch for room to write as well, or stop."""
        with self.changed:
            (self._writers.add if wanted else self._writers.discard)(key)
            self.changed.notify_all()

    def want_read(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: ARG002, FBT001
        """Stop watching for bytes to read, or do so again."""
        with self.changed:
            (self._muted.discard if wanted else self._muted.add)(key)
            self.changed.notify_all()

    def unregister(self, stream: Stream) -> None:
        """Stop watching."""
        with self.changed:
            for key in [key for key, known in self._streams.items() if known is stream]:
                del self._streams[key]
                self._writers.discard(key)

    def wait(self, timeout: float | None) -> list[Event]:
        """Sleep until something can move, a delayed byte is due, or time is up."""
        deadline = None if timeout is None else self.clock() + timeout
        with self.changed:
            while True:
                now = self.clock()
                events, due = self._scan(now)
                if events or self._woken or (deadline is not None and now >= deadline):
                    self._woken = False
                    return events
                ends = [end for end in (due, deadline) if end is not None]
                self.changed.wait(min(ends) - now if ends else None)

    def _scan(self, now: float) -> tuple[list[Event], float | None]:
        events: list[Event] = []
        next_due: float | None = None
        for key, stream in self._streams.items():
            due = None if key in self._muted else stream.readable_at()
            readable = due is not None and due <= now
            writable = key in self._writers and stream.writable()
            if readable or writable:
                events.append((key, readable, writable))
            elif due is not None and (next_due is None or due < next_due):
                next_due = due
        return events, next_due

    def notify(self) -> None:
        """Look again: a stream has changed."""
        with self.changed:
            self.changed.notify_all()

    def wake(self) -> None:
        """End the current or next wait."""
        with self.changed:
            self._woken = True
            self.changed.notify_all()

    def close(self) -> None:
        """Forget the streams."""
        with self.changed:
            self._streams.clear()


class MemoryStream:
    """One end of a pipe that holds at most ``capacity`` bytes in each direction."""

    is_local = False  # it stands for a network
    shared = None

    def __init__(self, name: str, capacity: int, delay: Delay | None, clock: Delay) -> None:
        self.peer_name = name
        self.poller: MemoryPoller | None = None
        self.other: MemoryStream = self  # set by pipe()
        self._capacity = capacity
        self._delay = delay
        self._clock = clock
        self._lock = threading.Lock()
        self._arrived: deque[tuple[float, memoryview]] = deque()
        self._held = 0
        self._last_due = 0.0
        self._ended = False  # the other end has finished: end of stream after what is held
        self._broken = False  # the other end has vanished: reset
        self._closed = False

    def readable_at(self) -> float | None:
        """When the next read gives bytes or the end; None while there is nothing."""
        if self._arrived:
            return self._arrived[0][0]
        return 0.0 if self._ended or self._broken or self._closed else None

    def writable(self) -> bool:
        """Whether a write would take at least one byte, or fail."""
        room = self.other._held < self._capacity  # noqa: SLF001
        return room or self._ended or self._broken or self._closed

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        """Copy what fits to the other end."""
        if self._closed or self._broken or self._ended:
            raise BrokenPipeError(32, "Broken pipe")
        taken = self.other._put(buffers)  # noqa: SLF001 - the two ends are one in two halves
        if not taken and any(map(len, buffers)):
            raise BlockingIOError
        return taken

    def _put(self, buffers: Sequence[Buffer]) -> int:
        with self._lock:
            data = _beginning(buffers, self._capacity - self._held)
            if not data:
                return 0
            wait = self._delay() if self._delay else 0.0
            self._last_due = max(self._last_due, self._clock() + wait) if wait else self._last_due
            self._arrived.append((self._last_due, memoryview(data)))
            self._held += len(data)
        self._notify()
        return len(data)

    def recv_into(self, buffer: memoryview, /) -> int:
        """Take what is due."""
        if self._closed:
            raise OSError(9, "Bad file descriptor")
        with self._lock:
            if not self._arrived:
                if self._broken:
                    raise ConnectionResetError(104, "Connection reset by peer")
                if self._ended:
                    return 0
                raise BlockingIOError
            count = self._take(buffer, self._clock())
            if not count and buffer:
                raise BlockingIOError
        self.other._notify()  # noqa: SLF001 - there is room again
        return count

    def _take(self, buffer: memoryview, now: float) -> int:
        """Fill the buffer from as many writes as are due: one by one, small ones would beget small.

        A pipe that is full takes in only what was taken out of it.
        """
        count = 0
        while self._arrived and count < len(buffer):
            due, chunk = self._arrived[0]
            if due > now:
                break
            part = min(len(chunk), len(buffer) - count)
            buffer[count : count + part] = chunk[:part]
            count += part
            if part == len(chunk):
                self._arrived.popleft()
            else:
                self._arrived[0] = (due, chunk[part:])
        self._held -= count
        return count

    def expect(self, count: int) -> None:
        """Nothing: the reader is woken for every byte."""

    def pace(self, rate: int) -> None:
        """Nothing: memory has no queue in front of it."""

    def finish(self, deadline: float) -> None:  # noqa: ARG002 - memory needs no time
        """End the stream after what was written."""
        if self._closed:
            return
        self._closed = True
        self.other._ended = True  # noqa: SLF001
        self.other._notify()  # noqa: SLF001
        self._notify()

    def close(self) -> None:
        """Vanish: the other end sees a reset once it has read what had arrived."""
        if self._closed:
            return  # finished before: its orderly end stays one
        self._closed = True
        self.other._broken = True  # noqa: SLF001
        self.other._notify()  # noqa: SLF001
        self._notify()

    def _notify(self) -> None:
        if self.poller is not None:
            self.poller.notify()


def _beginning(buffers: Sequence[Buffer], size: int) -> bytes:
    """A copy of the first ``size`` bytes of the buffers joined."""
    parts = []
    for buffer in buffers:
        if size <= 0:
            break
        parts.append(memoryview(buffer)[:size])
        size -= len(parts[-1])
    return b"".join(parts)


def pipe(
    names: tuple[str, str],
    *,
    capacity: int,
    delay: Delay | None = None,
    delay_back: Delay | None = None,
    clock: Delay = time.monotonic,
) -> tuple[MemoryStream, MemoryStream]:
    """Two connected ends; each is named after the other, as seen from its holder.

    ``delay_back`` is for what goes from right to left, if that shall differ.
    """
    left = MemoryStream(names[1], capacity, delay_back or delay, clock)  # holds what comes in
    right = MemoryStream(names[0], capacity, delay, clock)
    left.other, right.other = right, left
    return left, right
