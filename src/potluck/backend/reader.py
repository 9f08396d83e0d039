"""Reading frames from one peer's stream.

Only the thread that runs the pump reads.  Headers are decoded from a small buffer; payloads land
where the handler says, without a copy in between once they are larger than that buffer.
"""

from __future__ import annotations

from typing import Protocol

from potluck.net.frames import HEADER_SIZE, Header, Kind, decode
from potluck.net.transport import Stream

__all__ = ["FrameHandler", "FrameReader", "PeerEnded"]

READ_AHEAD = 1 << 16
"""Bytes read at once where small frames are expected."""

READS_PER_TURN = 16
"""Reads from one stream before the others get their turn."""


class PeerEnded(ConnectionError):
    """The stream ended without a goodbye."""


class FrameHandler(Protocol):
    """Who decides where payloads go and what frames mean."""

    def begin(self, header: Header) -> memoryview:
        """Say where the payload of exactly ``header.length`` bytes shall land.

        On a sealed connection nobody has vouched for the header yet: nothing that a caller could
        notice may follow from it before :meth:`complete`.
        """

    def complete(self, header: Header) -> None:
        """The frame is here, its payload where :meth:`begin` said."""

    def complete_small(self, header: Header, payload: memoryview) -> None:
        """A small message is here at once; ``payload`` is only lent."""


class FrameReader:
    """What comes in through one stream."""

    overhead = 0
    """Bytes behind every payload."""

    def __init__(self, stream: Stream, handler: FrameHandler, max_eager: int) -> None:
        self._stream = stream
        self._handler = handler
        self._max_eager = max_eager
        self._buffer = memoryview(bytearray(READ_AHEAD))
        self._start = self._end = 0
        self._header: Header | None = None
        self._sink = memoryview(b"")
        self._missing = 0
        self._bulk = False  # the last frame was large: read the next header alone

    def push(self, data: bytes) -> None:
        """Bytes that were read by whoever opened the connection."""
        while data:
            room = self._missing or READ_AHEAD - self._end
            part, data = data[:room], data[room:]
            if self._missing:
                self._sink[: len(part)] = part
                self._advance_payload(len(part))
            else:
                self._buffer[self._end : self._end + len(part)] = part
                self._end += len(part)
                self._parse()
                self._compact()

    def read(self) -> None:
        """Take in what has arrived.  Raises ``OSError`` or ``MalformedFrame`` when it is over."""
        for _ in range(READS_PER_TURN):
            is_payload = self._missing > 0
            try:
                wanted, got = self._read_payload() if is_payload else self._read_headers()
            except BlockingIOError:
                return
            if got < wanted:
                return  # the socket is empty: asking again would only cost an exception
            if is_payload:
                return  # who waited for it may now post the receive for the next one

    def arriving(self) -> tuple[Header, int] | None:
        """The frame whose payload is landing now, and how much of it has."""
        if self._header is None or not self._missing:
            return None
        return self._header, self._header.length - self._missing

    def redirect(self, sink: memoryview) -> None:
        """Let the rest of the payload land elsewhere."""
        self._sink = sink

    def _read_payload(self) -> tuple[int, int]:
        wanted = self._missing
        got = self._stream.recv_into(self._sink)
        if got == 0:
            raise PeerEnded
        self._advance_payload(got)
        return wanted, got

    def _advance_payload(self, got: int) -> None:
        self._missing -= got
        if self._missing:
            self._sink = self._sink[got:]
        else:
            self._finish_payload()

    def _read_headers(self) -> tuple[int, int]:
        self._compact()
        target = self._buffer if not self._bulk else self._buffer[:HEADER_SIZE]
        if self._end:
            target = target[self._end :]
        got = self._stream.recv_into(target)
        if got == 0:
            raise PeerEnded
        self._end += got
        self._parse()
        return len(target), got

    def _compact(self) -> None:
        left = self._end - self._start
        if left and self._start:
            self._buffer[:left] = self._buffer[self._start : self._end]
        self._start, self._end = 0, left

    def _parse(self) -> None:
        while not self._missing and self._end - self._start >= HEADER_SIZE:
            header = decode(self._buffer, self._start, self._max_eager)
            self._bulk = header.length >= READ_AHEAD
            if header.length + self.overhead <= self._end - self._start - HEADER_SIZE:
                self._take_whole(header)
            else:
                self._take_part(header)

    def _take_whole(self, header: Header) -> None:
        """A frame that is in the buffer from first to last byte."""
        start = self._start + HEADER_SIZE
        payload = self._buffer[start : start + header.length]
        self._start = start + header.length
        self._hand_over(header, payload)

    def _hand_over(self, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.EAGER:
            self._handler.complete_small(header, payload)
            return
        if header.length:
            self._handler.begin(header)[:] = payload
        self._handler.complete(header)

    def _take_part(self, header: Header) -> None:
        """A frame whose payload is still arriving."""
        start = self._start + HEADER_SIZE
        sink = self._landing(header)
        have = self._end - start
        sink[:have] = self._buffer[start : self._end]
        self._start = self._end
        self._header, self._missing = header, len(sink) - have
        self._sink = sink[have:]

    def _landing(self, header: Header) -> memoryview:
        return self._handler.begin(header)

    def _finish_payload(self) -> None:
        header, self._header = self._header, None
        self._sink = memoryview(b"")  # keeps no caller's buffer alive
        assert header is not None
        self._handler.complete(header)
