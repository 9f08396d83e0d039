"""Bytes over a stream that never blocks: what came early, what is left to send, encrypted records.

Messages, collectives and remote calls have framings of their own, because they know different
things beforehand (docs/internals/protocol.md).  What lies below is the same for all who send bytes
in order, and is here.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from potluck.errors import MalformedFrame
from potluck.net.aead import TAG_SIZE, Decryptor, Encryptor
from potluck.net.frames import PIECE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from potluck.net.transport import Buffer, Stream


class PeerEnded(ConnectionError):
    """The stream ended without a goodbye."""


class BufferedStream:
    """A stream in clear.  One thread at a time sends, and one receives."""

    def __init__(self, stream: Stream, first: bytes = b"") -> None:
        self.stream = stream
        self._first = memoryview(first)  # what came in before the stream was ours
        self._rest: list[Buffer] = []

    def broken(self, error: OSError) -> Exception:
        """What is raised when the stream is broken."""
        return error

    @property
    def is_flushed(self) -> bool:
        """Whether everything that was sent has left."""
        return not self._rest

    def send(self, buffers: Sequence[Buffer]) -> bool:
        """Send; False if some is left for :meth:`flush`.  What is left must not change."""
        return self._transmit(buffers)

    def _transmit(self, buffers: Sequence[Buffer]) -> bool:
        """Write what fits behind what is left; whether that was all."""
        if self._rest:
            buffers = [*self._rest, *buffers]
        try:
            sent = self.stream.sendmsg(buffers)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self.broken(error) from None
        for index, buffer in enumerate(buffers):
            size = len(buffer)
            if sent < size:
                self._rest = [memoryview(buffer)[sent:], *buffers[index + 1 :]]
                return False
            sent -= size
        self._rest = []
        return True

    def flush(self) -> bool:
        """Send what is left; True if nothing is."""
        return not self._rest or self._transmit([])

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


# --------------------------------------------------------------------------------------------------
# Records: four bytes of length, then so many encrypted bytes with their tag.
#
# The length is authenticated with them.  A record is what was sent at once, so that those above
# see a stream of bytes, whatever they send.

RECORD = 2 * PIECE
"""Bytes of one record at most, before sealing."""

_LENGTH = struct.Struct("<I")
_HEAD = _LENGTH.size


class EncryptedStream(BufferedStream):
    """A stream on which every byte is encrypted and authenticated."""

    def __init__(
        self, stream: Stream, seal: tuple[Encryptor, Decryptor], first: bytes = b""
    ) -> None:
        super().__init__(stream, first)
        self._sealer, self._opener = seal
        self._in = memoryview(bytearray(_HEAD + RECORD + TAG_SIZE))
        self._start = self._end = 0  # what of it has come and is not opened
        self._open = memoryview(bytearray(RECORD))
        self._ready = memoryview(b"")
        self._out = bytearray(4 << 10)

    def send(self, buffers: Sequence[Buffer]) -> bool:
        """Seal everything as one record and send it; what was sent before must have left."""
        assert not self._rest
        size = sum(map(len, buffers))
        total = _HEAD + size + TAG_SIZE
        if len(self._out) < total:
            self._out = bytearray(total)
        out = memoryview(self._out)
        at = _HEAD
        for buffer in buffers:
            out[at : at + len(buffer)] = buffer
            at += len(buffer)
        head = _LENGTH.pack(size + TAG_SIZE)
        return self._transmit([self._sealer.seal_record(head, out[_HEAD:at], out)])

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
            raise MalformedFrame(f"An encrypted record cannot have {size} bytes")
        return size if have >= size else 0


def buffered(
    stream: Stream, seal: tuple[Encryptor, Decryptor] | None, first: bytes = b""
) -> BufferedStream:
    """A stream with these keys, or in clear; ``first`` came in before the stream was ours."""
    if seal is None:
        return BufferedStream(stream, first)
    return EncryptedStream(stream, seal, first)
