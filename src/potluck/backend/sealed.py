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

SEALED_PIECE = MAX_PIECE
"""Bytes sealed at once: so many that the two sides wake each other seldom.  With a quarter of it
the kernel took half as much time again.
"""

SPARE = 2
"""Buffers of each size kept for reuse: fresh memory of that size is slow to touch."""

ROOMS = tuple(HEADER_SIZE + size + TAG_SIZE for size in (256 << 10, SEALED_PIECE))
"""Sizes of the buffers that are kept."""

SMALL = 32 << 10
"""Bytes below which a buffer of its own is cheaper than keeping one."""


class SealedWriter(FrameWriter):
    """Encrypts every frame; the header stays readable and is authenticated with the payload."""

    piece_size = SEALED_PIECE
    pieces_in_line = 1  # what is sealed and waits grows cold, and holds up small frames

    def __init__(self, stream: Stream, watch: Callable[[bool], None], sealer: Sealer) -> None:
        super().__init__(stream, watch)
        self._sealer = sealer
        self._spares: dict[int, list[bytearray]] = {room: [] for room in ROOMS}

    def _enter(self, frame: Frame) -> None:
        payload = memoryview(b"") if frame.payload is None else frame.payload
        room = HEADER_SIZE + len(payload) + TAG_SIZE
        spare = self._take_spare(room)
        sealed = memoryview(bytearray(room) if spare is None else spare)[:room]
        sealed[:HEADER_SIZE] = frame.header
        self._sealer.seal_into(frame.header, payload, sealed[HEADER_SIZE:])
        self._line.append(Entry(sealed, frame.owner, frame.last, spare))

    def _take_spare(self, room: int) -> bytearray | None:
        if room < SMALL:
            return None
        kept = next(size for size in ROOMS if room <= size)
        spares = self._spares[kept]
        return spares.pop() if spares else bytearray(kept)

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
        if entry.spare is not None:
            spares = self._spares[len(entry.spare)]
            if len(spares) < SPARE:
                spares.append(entry.spare)


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
        """Room for the sealed payload, and for the next header: one call reads both."""
        room = header.length + TAG_SIZE + HEADER_SIZE
        if len(self._sealed) < room:
            self._sealed = memoryview(bytearray(room))
        self._header_bytes = bytes(self._buffer[self._start : self._start + HEADER_SIZE])
        return self._sealed[:room]

    def _advance_payload(self, got: int) -> None:
        self._missing -= got
        if self._missing > HEADER_SIZE:
            self._sink = self._sink[got:]
            return
        header = self._header
        assert header is not None
        end = header.length + TAG_SIZE
        ahead = HEADER_SIZE - self._missing
        self._missing = 0
        self._buffer[:ahead] = self._sealed[end : end + ahead]
        self._start, self._end = 0, ahead
        self._finish_payload()
        self._parse()

    def _finish_payload(self) -> None:
        header, self._header = self._header, None
        assert header is not None
        sealed = self._sealed[: header.length + TAG_SIZE]
        target = self._handler.begin(header) if header.length else self._plain[:0]
        self._opener.open_into(self._header_bytes, sealed, target)
        self._handler.complete(header)
