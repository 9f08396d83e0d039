"""Reading a connection: frames become messages, long ones straight into their own memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from potluck.core.calls_frames import HEADER_SIZE, SHORT, Frame, Mark, read_frame

if TYPE_CHECKING:
    from potluck.core.calls_assembly import Assembly, Whole
    from potluck.runtime.rpc_wire import Wire

__all__ = ["Deliver", "Reader"]

BUFFER = 64 << 10
"""Bytes read at once, unless they belong to a long message."""

GLANCE = 4 << 10
"""Bytes read at once between two pieces: more of the next one would have to be copied."""

PART = Mark.MORE | Mark.LATER

Deliver: TypeAlias = Callable[[Frame, "bytes | memoryview"], None]
"""What to do with a message: its (first) header, and its bytes."""


class Reader:
    """Cuts what comes in."""

    def __init__(self, wire: Wire, assembly: Assembly, limit: int) -> None:
        self._wire = wire
        self._assembly = assembly
        self._limit = limit
        self._buffer = memoryview(bytearray(BUFFER))
        self._start = self._end = 0
        self._whole: Whole | None = None  # the message whose piece is being read
        self._missing = 0  # bytes of that piece
        self.count = 0
        """How often something came."""
        self.is_full = False
        """Whether the last read took all it could, so that more may be here."""

    def read(self, deliver: Deliver) -> int:
        """Read once and deliver what is complete; how many bytes came, 0 at the end.

        Raises ``BlockingIOError`` when nothing has come.
        """
        if self._missing:
            missing = self._missing
            count = self._read_piece()
            self.is_full = count == missing
            self.count += 1
            if not self._missing:
                self._end_piece(deliver)
            return count
        if self._start:
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        room = self._end + GLANCE if len(self._assembly) else BUFFER
        count = self._wire.recv_into(self._buffer[self._end : room])
        self._end += count
        self.is_full = self._end >= room
        self.count += 1
        self._cut(deliver)
        return count

    def _read_piece(self) -> int:
        whole = self._whole
        assert whole is not None
        count = self._wire.recv_into(whole.view[whole.filled : whole.filled + self._missing])
        whole.filled += count
        self._missing -= count
        return count

    def _cut(self, deliver: Deliver) -> None:
        buffer, end = self._buffer, self._end
        while end - self._start >= HEADER_SIZE:
            frame = read_frame(buffer, self._start, self._limit)
            body = self._start + HEADER_SIZE
            if frame.length > SHORT or frame.marks & PART:
                if not self._begin_piece(frame, body, deliver):
                    return
                continue
            stop = body + frame.length
            if stop > end:
                return
            self._start = stop
            deliver(frame, bytes(buffer[body:stop]))

    def _begin_piece(self, frame: Frame, body: int, deliver: Deliver) -> bool:
        """Take what is here of a piece; whether that is all of it."""
        whole = self._whole = self._assembly.accept(frame)
        count = min(frame.length, self._end - body)
        whole.view[whole.filled : whole.filled + count] = self._buffer[body : body + count]
        whole.filled += count
        self._missing = frame.length - count
        self._start = body + count
        if self._missing:
            return False
        self._end_piece(deliver)
        return True

    def _end_piece(self, deliver: Deliver) -> None:
        whole, self._whole = self._whole, None
        assert whole is not None
        if whole.filled == whole.first.total:
            self._assembly.finish(whole)
            deliver(whole.first, whole.view)
