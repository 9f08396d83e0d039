"""A stream under the test's thumb, and an operation that nobody drives: for tests of writers."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.backend.operation import Operation
from potluck.net.transport import Buffer


class Valve:
    """A stream that takes as many bytes as the test lets through."""

    peer_name = "valve"

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.taken = bytearray()
        self.calls: list[list[int]] = []
        """The sizes of the buffers in each call."""
        self.broken = False

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        """Take what fits."""
        self.calls.append([len(memoryview(buffer)) for buffer in buffers])
        if self.broken:
            raise BrokenPipeError(32, "Broken pipe")
        data = b"".join(buffers)[: self.room]
        if not data:
            raise BlockingIOError
        self.room -= len(data)
        self.taken += data
        return len(data)


class Owner(Operation):
    """An operation that nobody drives."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
