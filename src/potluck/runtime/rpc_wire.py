"""Wires: the bytes of one connection between two agents, in clear or sealed.

A wire is a stream of bytes to those above it.  Sealed, it travels as records: four bytes of length,
then so many encrypted bytes with their tag; the length is authenticated with them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from potluck.core.calls_frames import PIECE
from potluck.errors import MalformedFrame
from potluck.net.sealing import TAG_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from potluck.backend.streams import PeerStream
    from potluck.net.sealing import Opener, Sealer
    from potluck.net.transport import Buffer, Stream

__all__ = ["SealedWire", "Wire", "make_wire"]

RECORD = 2 * PIECE
"""Bytes of one record at most, before sealing."""

_LENGTH = struct.Struct("<I")
_HEAD = _LENGTH.size


class Wire:
    """A wire in clear.  One thread at a time sends, and one receives."""

    def __init__(self, stream: Stream, first: bytes = b"") -> None:
        self.stream = stream
        self._first = memoryview(first)  # what came in before the stream was ours
        self._rest: list[Buffer] = []

    @property
    def is_idle(self) -> bool:
        """Whether everything that was pushed has left."""
        return not self._rest

    def push(self, buffers: Sequence[Buffer]) -> bool:
        """Send; False if some is left for :meth:`flush`.  What is left must not change."""
        assert not self._rest
        return self._send(list(buffers))

    def flush(self) -> bool:
        """Send what is left; True if nothing is."""
        return not self._rest or self._send(self._rest)

    def _send(self, buffers: list[Buffer]) -> bool:
        try:
            sent = self.stream.sendmsg(buffers)
        except BlockingIOError:
            sent = 0
        for index, buffer in enumerate(buffers):
            size = len(buffer)
            if sent < size:
                self._rest = [memoryview(buffer)[sent:], *buffers[index + 1 :]]
                return False
            sent -= size
        self._rest = []
        return True

    @property
    def has_more(self) -> bool:
        """Whether bytes wait here that no poller knows of."""
        return bool(self._first)

    def recv_into(self, view: memoryview) -> int:
        """Take what has come, like a non-blocking socket; 0 is the end."""
        if self._first:
            count = min(len(view), len(self._first))
            view[:count], self._first = self._first[:count], self._first[count:]
            return count
        return self.stream.recv_into(view)


class SealedWire(Wire):
    """A wire on which every byte is encrypted and authenticated."""

    def __init__(self, stream: Stream, seal: tuple[Sealer, Opener], first: bytes = b"") -> None:
        super().__init__(stream, first)
        self._sealer, self._opener = seal
        self._in = memoryview(bytearray(_HEAD + RECORD + TAG_SIZE))
        self._start = self._end = 0  # what of it has come and is not opened
        self._open = memoryview(bytearray(RECORD))
        self._ready = memoryview(b"")
        self._out = bytearray(4 << 10)

    def push(self, buffers: Sequence[Buffer]) -> bool:
        """Seal everything as one record and send it."""
        assert not self._rest
        size = sum(map(len, buffers))
        total = _HEAD + size + TAG_SIZE
        if len(self._out) < total:
            self._out = bytearray(total)
        out = memoryview(self._out)
        head = _LENGTH.pack(size + TAG_SIZE)
        out[:_HEAD] = head
        at = _HEAD
        for buffer in buffers:
            out[at : at + len(buffer)] = buffer
            at += len(buffer)
        self._sealer.seal_into(head, out[_HEAD:at], out[_HEAD:total])
        return self._send([out[:total]])

    @property
    def has_more(self) -> bool:
        """Whether bytes wait here that no poller knows of."""
        return bool(self._ready or self._first) or self._record() > 0

    def recv_into(self, view: memoryview) -> int:
        """Take what has come and could be opened."""
        if not self._ready and not self._open_next():
            return 0
        count = min(len(view), len(self._ready))
        view[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _open_next(self) -> bool:
        """Open the next record; False at the end of the stream."""
        while not (size := self._record()):
            if self._start:
                rest = bytes(self._in[self._start : self._end])
                self._in[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            count = super().recv_into(self._in[self._end :])
            if not count:
                return False
            self._end += count
        start = self._start + _HEAD
        head, sealed = bytes(self._in[self._start : start]), self._in[start : start + size]
        self._opener.open_into(head, sealed, self._open)
        self._ready = self._open[: size - TAG_SIZE]
        self._start = start + size
        return True

    def _record(self) -> int:
        """Bytes of the next record, if all of it is here."""
        have = self._end - self._start - _HEAD
        if have < 0:
            return 0
        (size,) = _LENGTH.unpack_from(self._in, self._start)
        if not TAG_SIZE < size <= RECORD + TAG_SIZE:
            raise MalformedFrame(f"A sealed record of {size} bytes")
        return size if have >= size else 0


def make_wire(opened: PeerStream) -> Wire:
    """The wire for a stream."""
    if opened.seal is None:
        return Wire(opened.stream, opened.first)
    return SealedWire(opened.stream, opened.seal, opened.first)
