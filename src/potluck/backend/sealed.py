"""Frames on a sealed connection: encrypted when they become next in line, opened when whole.

The header stays readable and is authenticated together with the payload.  A payload is decrypted
straight into its destination; a frame that fails ends the connection and delivers nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from potluck.backend.reader import READ_AHEAD, FrameHandler, FrameReader
from potluck.backend.writer import Entry, Frame, FrameWriter
from potluck.net.frames import HEADER_SIZE, MAX_PIECE, Header
from potluck.net.sealing import TAG_SIZE, Opener, Sealer
from potluck.net.transport import Stream

__all__ = ["SealedReader", "SealedWriter"]

SEALED_PIECE = 256 << 10
"""Bytes sealed at once: fits into the processor's cache together with its ciphertext."""

SPARE = 2
"""Buffers of :data:`MAX_PIECE` kept for reuse: fresh memory of that size is slow to touch."""

SMALL = 32 << 10
"""Below this a buffer of its own is cheaper than keeping one."""


class SealedWriter(FrameWriter):
    """Encrypts every frame; the header stays readable and is authenticated with the payload."""

    piece_size = SEALED_PIECE

    def __init__(self, stream: Stream, watch: Callable[[bool], None], sealer: Sealer) -> None:
        super().__init__(stream, watch)
        self._sealer = sealer
        self._spares: list[bytearray] = []

    def _enter(self, frame: Frame) -> None:
        payload = memoryview(b"") if frame.payload is None else frame.payload
        room = len(payload) + TAG_SIZE
        spare = None
        if room > SMALL:
            spare = self._spares.pop() if self._spares else bytearray(MAX_PIECE + TAG_SIZE)
        sealed = memoryview(bytearray(room) if spare is None else spare)[:room]
        self._sealer.seal_into(frame.header, payload, sealed)
        self._line.append(Entry(memoryview(frame.header)))
        self._line.append(Entry(sealed, frame.owner, frame.last, spare))

    def _write_first(self, header: bytes, payload: memoryview | None) -> bool:
        self._enter(Frame(header, payload, None, last=True))
        self._write_line()
        self._set_watching(wanted=bool(self._line))
        return not (self._line or self.is_broken)

    @staticmethod
    def _own(entry: Entry) -> Entry:
        return entry._replace(owner=None)  # sealed bytes are ours already

    def _left(self, entry: Entry) -> None:
        super()._left(entry)
        if entry.spare is not None and len(self._spares) < SPARE:
            self._spares.append(entry.spare)


class SealedReader(FrameReader):
    """Decrypts; nothing unauthenticated is ever handed on."""

    overhead = TAG_SIZE

    def __init__(
        self, stream: Stream, handler: FrameHandler, max_eager: int, opener: Opener
    ) -> None:
        super().__init__(stream, handler, max_eager)
        self._opener = opener
        self._sealed = memoryview(b"")
        self._header_bytes = b""
        self._plain = memoryview(bytearray(READ_AHEAD))

    def arriving(self) -> tuple[Header, int] | None:
        """Nothing lands before it is whole and authentic."""
        return None

    def _take_whole(self, header: Header) -> None:
        start = self._start + HEADER_SIZE
        end = start + header.length + TAG_SIZE
        plain = self._plain[: header.length]
        self._opener.open_into(
            bytes(self._buffer[self._start : start]), self._buffer[start:end], plain
        )
        self._start = end
        self._hand_over(header, plain)

    def _landing(self, header: Header) -> memoryview:
        room = header.length + TAG_SIZE
        if len(self._sealed) < room:
            self._sealed = memoryview(bytearray(room))
        self._header_bytes = bytes(self._buffer[self._start : self._start + HEADER_SIZE])
        return self._sealed[:room]

    def _finish_payload(self) -> None:
        header, self._header = self._header, None
        assert header is not None
        sealed = self._sealed[: header.length + TAG_SIZE]
        target = self._handler.begin(header) if header.length else self._plain[:0]
        self._opener.open_into(self._header_bytes, sealed, target)
        self._handler.complete(header)
