"""The one narrow door to the network.

Everything above this file moves bytes through a :class:`Stream` and sleeps in a :class:`Poller`;
nothing above it knows a socket.  :mod:`potluck.net.tcp` is the real door, :mod:`potluck.net.memory`
its twin inside one process.  Streams never block: they raise :class:`BlockingIOError` like a
non-blocking socket and any other :class:`OSError` when the connection is broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

__all__ = ["Buffer", "Event", "Poller", "Stream"]

Buffer: TypeAlias = bytes | bytearray | memoryview

Event: TypeAlias = tuple[int, bool, bool]
"""(key of the stream, it can be read or has ended, it can be written)"""


class Stream(Protocol):
    """One connection to one peer: bytes in order, both ways."""

    is_local: bool
    """Both ends are known to be on one machine: no link is between them that could be slow."""

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        """Write what fits of the buffers joined; return how many bytes that was."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Read what is there into ``buffer``; 0 means that the peer has ended the stream."""

    def expect(self, count: int) -> None:
        """Count as readable only when ``count`` bytes are there, if the system can see to that.

        Whoever can do nothing with fewer sleeps through their arrival.
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
