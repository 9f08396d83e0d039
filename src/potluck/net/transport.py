"""The one narrow door to the network.

Everything above this file moves bytes through a :class:`Stream` and sleeps in a :class:`Poller`;
nothing above it knows a socket.  :mod:`potluck.net.tcp` is the real door, :mod:`potluck.net.memory`
its twin inside one process.  Streams never block: they raise :class:`BlockingIOError` like a
non-blocking socket and any other :class:`OSError` when the connection is broken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from potluck._platform import yield_processor

if TYPE_CHECKING:
    from potluck.net.unix_socket import SharedMemory

Buffer: TypeAlias = bytes | bytearray | memoryview

Event: TypeAlias = tuple[int, bool, bool]
"""(key of the stream, it can be read or has ended, it can be written)"""


class Stream(Protocol):
    """One connection to one peer: bytes in order, both ways."""

    is_local: bool
    """Both ends are known to be on one machine: no link is between them that could be slow."""

    @property
    def shared(self) -> SharedMemory | None:
        """Memory that both ends share, for what is large."""

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        """Write what fits of the buffers joined; return how many bytes that was."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Read what is there into ``buffer``; 0 means that the peer has ended the stream."""

    def expect(self, count: int) -> None:
        """Count as readable only when ``count`` bytes are there, if the system can see to that.

        A reader that can do nothing with fewer is not woken for them.
        """

    def pace(self, rate: int) -> None:
        """Send at most ``rate`` bytes per second, if the system can see to that.

        On a link slower than the machine this keeps the queue in front of it short, so that what
        the other direction waits for is not stuck in it.
        """

    def finish(self, deadline: float) -> None:
        """Let what was written reach the peer's machine until ``deadline``, then close."""

    def close(self) -> None:
        """Close at once; what was not yet transmitted may be lost."""

    @property
    def peer_name(self) -> str:
        """Where the other end is, for people."""


class Poller(Protocol):
    """Sleeps until one of its streams can move bytes."""

    def register(self, stream: Stream, key: int) -> None:
        """Watch ``stream`` for reading; its events carry ``key``."""

    def want_write(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: FBT001
        """Also watch for room to write, or stop doing so.  Any thread may call this."""

    def want_read(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: FBT001
        """Stop watching for bytes to read, or do so again; that it is broken shows in any case."""

    def unregister(self, stream: Stream) -> None:
        """Stop watching."""

    def wait(self, timeout: float | None) -> list[Event]:
        """Sleep until an event, a :meth:`wake`, or ``timeout`` seconds."""

    def wake(self) -> None:
        """End a current or the next :meth:`wait`.  Any thread may call this."""

    def close(self) -> None:
        """Release what the poller holds."""


# --------------------------------------------------------------------------------------------------
# Spinning: look a few times more before going to sleep, as long as that pays.
#
# Waking a sleeping thread can cost more than a whole small message, so an answer that comes within
# microseconds is better waited for awake.  But where it does not come so soon (large messages,
# fewer processors than ranks) looking would only take time from those who have work.  So every
# success earns a few more attempts, every failure costs them, and a rare attempt finds out whether
# it would pay again.

LOOK_FOR = 50e-6
"""Seconds one attempt lasts: about what it costs to wake a sleeper."""

MOST = 8
"""Attempts that may fail in a row after many successes."""

RETRY_EVERY = 32
"""Waits between two attempts while spinning does not pay."""


class Spin:
    """Whether to look again, learned from whether it helped."""

    def __init__(self) -> None:
        self._attempts = MOST
        self._skipped = 0

    def look(self, poller: Poller) -> list[Event]:
        """Events that come within a moment; none when it is not worth looking."""
        found: list[Event] = []

        def has_events() -> bool:
            found.extend(poller.wait(0))
            return bool(found)

        self.until(has_events)
        return found

    def until(self, is_there: Callable[[], bool]) -> bool:
        """Ask again and again for a moment; False when it did not come, or is not worth asking."""
        if self._attempts <= 0:
            self._skipped += 1
            if self._skipped < RETRY_EVERY:
                return False
            self._skipped = 0
            self._attempts = 1
        end = time.perf_counter() + LOOK_FOR
        while not is_there():
            if time.perf_counter() >= end:
                self._attempts -= 1
                return False
            yield_processor()
        self._attempts = min(MOST, self._attempts + 1)
        return True
