"""A link: one peer's connection, its writer and reader, and the lock that guards the writer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from potluck.backend.operation import Operation
from potluck.net.aead import TAG_SIZE, Decryptor, Encryptor
from potluck.net.frames import HEADER_SIZE, MAX_PIECE, FrameType, Header, decode, encode
from potluck.net.records import PeerEnded
from potluck.net.transport import Stream

if TYPE_CHECKING:
    from potluck.errors import DistributedError
    from potluck.net.transport import Poller


# --------------------------------------------------------------------------------------------------
# Reading frames from one peer's stream.
#
# Only the thread that runs the pump reads.  Headers are decoded from a small buffer; payloads land
# where the handler says, without a copy in between once they are larger than that buffer.

READ_AHEAD = 1 << 16
"""Bytes read at once where small frames are expected."""

READS_PER_TURN = 16
"""Reads from one stream before the others get their turn."""


class FrameHandler(NamedTuple):
    """Where the payloads of one peer go, and what its frames mean."""

    begin: Callable[[Header], memoryview]
    """Says where the payload of exactly ``header.length`` bytes shall land.

    On an encrypted connection the header is not authenticated yet: nothing that a caller could
    notice may follow from it before ``complete``.
    """
    complete: Callable[[Header], None]
    """The frame is here, its payload where ``begin`` said."""
    complete_small: Callable[[Header, memoryview], None]
    """A small message is here at once; the payload is only lent."""


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
        """Add bytes that were already read while the connection was opened."""
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
        if header.kind == FrameType.EAGER:
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


# --------------------------------------------------------------------------------------------------
# Writing frames to one peer's stream.
#
# Any thread may add frames while it holds the link's lock; they leave in order, several in one
# system call, and the pieces of large messages take turns with them.

GATHER = 8
"""Buffers handed to one gathering write."""


class LargeMessage:
    """A large message on its way out, piece by piece."""

    __slots__ = ("group", "number", "operation", "piece", "sent", "tag", "view")

    def __init__(self, operation: Operation, view: memoryview, group: int, tag: int) -> None:
        self.operation: Operation | None = operation
        self.view = view
        self.group = group
        self.tag = tag
        self.number = 0
        self.sent = 0
        self.piece = 0

    def next_piece(self, epoch: int, size: int) -> QueuedFrame:
        """The next frame."""
        payload = self.view[self.sent : self.sent + size]
        header = encode(
            FrameType.DATA,
            group=self.group,
            epoch=epoch,
            tag=self.tag,
            operation=self.number,
            piece=self.piece,
            length=len(payload),
        )
        self.sent += len(payload)
        self.piece += 1
        return QueuedFrame(header, payload, self.operation, self.sent == len(self.view))


class QueuedFrame(NamedTuple):
    """A frame that is not yet in line."""

    header: bytes
    payload: memoryview | None
    owner: Operation | None
    last: bool
    """The owner is finished when this has left."""


class QueuedBytes(NamedTuple):
    """Bytes in line to be written."""

    view: memoryview
    owner: Operation | None = None
    last: bool = False
    spare: bytearray | None = None
    """The buffer to reuse afterwards."""


class FrameWriter:
    """What leaves through one stream.  Everything here is guarded by the link's lock."""

    piece_size = MAX_PIECE
    pieces_in_line = GATHER
    """Entries in line above which no piece of a parcel joins them."""

    def __init__(self, stream: Stream, watch: Callable[[bool], None]) -> None:
        self.epoch = 0
        self._stream = stream
        self._watch = watch
        self._line: deque[QueuedBytes] = deque()
        self._frames: deque[QueuedFrame] = deque()
        self._parcels: deque[LargeMessage] = deque()
        self._watching = False
        self.is_broken = False  # a write failed; reading will find out why

    @property
    def is_idle(self) -> bool:
        """Whether everything has left, or never will."""
        return self.is_broken or not (self._line or self._frames or self._parcels)

    def write(self, header: bytes, payload: memoryview | None = None) -> bool:
        """Write a frame, at once if nothing is ahead of it.  True when every byte has left."""
        if self.is_broken:
            return False
        if self._line or self._frames or self._parcels:
            self._frames.append(QueuedFrame(header, payload, None, last=True))
            return False
        return self._write_first(header, payload)

    def _write_first(self, header: bytes, payload: memoryview | None) -> bool:
        """Nothing is ahead: try without making anything that only a queue needs."""
        parts: tuple[bytes | memoryview, ...] = (header,)
        total = len(header)
        if payload is not None:
            parts, total = (header, payload), total + len(payload)
        try:
            sent = self._stream.sendmsg(parts)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.stop()
            return False
        if sent == total:
            return True
        self._enter(QueuedFrame(header, payload, None, last=True))
        self._skip(sent)
        self._set_watching(wanted=True)
        return False

    def adopt(self, owner: Operation) -> None:
        """The frame written last belongs to ``owner``: finish it when the last byte has left."""
        if self._frames:
            self._frames[-1] = self._frames[-1]._replace(owner=owner)
        elif self._line:
            self._line[-1] = self._line[-1]._replace(owner=owner, last=True)

    def send(self, parcel: LargeMessage) -> None:
        """Send a large message."""
        self._parcels.append(parcel)
        self.flush()

    def flush(self) -> None:
        """Write until the stream takes no more."""
        while not self.is_broken:
            self._line_up()
            if not self._line:
                break
            if not self._write_line():
                self._set_watching(wanted=not self.is_broken)
                return
        self._set_watching(wanted=False)

    def recall(self, operation: Operation) -> None:
        """Read from the operation's buffer no more; what is in a frame already is copied."""
        for parcel in [p for p in self._parcels if p.operation is operation]:
            self._parcels.remove(parcel)
        for index, frame in enumerate(self._frames):
            if frame.owner is operation and frame.payload is not None:
                kept = memoryview(bytes(frame.payload))
                self._frames[index] = frame._replace(payload=kept, owner=None)
        for index, entry in enumerate(self._line):
            if entry.owner is operation:
                self._line[index] = self._own(entry)

    def stop(self) -> None:
        """Stop writing, and stop reading from the buffers of callers."""
        self.is_broken = True
        self._line.clear()
        self._frames.clear()
        self._parcels.clear()

    def _line_up(self) -> None:
        """Fill the line with frames, pieces of parcels taking turns."""
        while len(self._line) < GATHER:
            if self._frames:
                self._enter(self._frames.popleft())
            elif self._parcels and len(self._line) < self.pieces_in_line:
                parcel = self._parcels.popleft()
                self._enter(parcel.next_piece(self.epoch, self.piece_size))
                if parcel.sent < len(parcel.view):
                    self._parcels.append(parcel)
            else:
                return

    def _enter(self, frame: QueuedFrame) -> None:
        """A frame becomes next in line."""
        self._line.append(QueuedBytes(memoryview(frame.header)))
        if frame.payload is not None:
            self._line.append(QueuedBytes(frame.payload, frame.owner, frame.last))

    @staticmethod
    def _own(entry: QueuedBytes) -> QueuedBytes:
        """The same bytes, no longer in the owner's buffer."""
        return QueuedBytes(memoryview(bytes(entry.view)))

    def _write_line(self) -> bool:
        """One write; False when the stream takes no more for now."""
        line = self._line
        views = [line[i].view for i in range(min(GATHER, len(line)))]
        try:
            sent = self._stream.sendmsg(views)
        except BlockingIOError:
            return False
        except OSError:
            self.stop()
            return False
        self._skip(sent)
        return True

    def _skip(self, sent: int) -> None:
        """Skip bytes that have been sent."""
        line = self._line
        while line:
            entry = line[0]
            if sent < len(entry.view):
                line[0] = entry._replace(view=entry.view[sent:])
                return
            sent -= len(entry.view)
            line.popleft()
            self._left(entry)

    def _left(self, entry: QueuedBytes) -> None:
        """Every byte of an entry has left."""
        if entry.last and entry.owner is not None:
            entry.owner.finish()

    def _set_watching(self, *, wanted: bool) -> None:
        if wanted is not self._watching:
            self._watching = wanted
            self._watch(wanted)


# --------------------------------------------------------------------------------------------------


class PeerConnection:
    """One peer's connection.

    ``lock`` guards ``writer``; ``reader`` belongs to the thread that runs the pump.
    """

    def __init__(
        self,
        rank: int,
        stream: Stream,
        poller: Poller,
        seal: tuple[Encryptor, Decryptor] | None = None,
    ) -> None:
        self.rank = rank
        self.stream = stream
        self.lock = threading.Lock()
        self.lost: DistributedError | None = None
        self.epoch = 0
        self._poller = poller
        self._seal = seal
        self.writer = self._make_writer()
        self.reader: FrameReader

    def connect(self, handler: FrameHandler, max_eager: int) -> None:
        """Say who handles what comes in."""
        if self._seal is None:
            self.reader = FrameReader(self.stream, handler, max_eager)
        else:
            self.reader = EncryptedReader(self.stream, handler, max_eager, self._seal[1])

    def _make_writer(self) -> FrameWriter:
        if self._seal is None:
            return FrameWriter(self.stream, self._watch)

        return EncryptedWriter(self.stream, self._watch, self._seal[0])

    def _watch(self, wanted: bool) -> None:  # noqa: FBT001
        self._poller.want_write(self.stream, self.rank, wanted)

    def tell(self, header: bytes) -> None:
        """Send a frame without payload."""
        with self.lock:
            self.writer.write(header)


# --------------------------------------------------------------------------------------------------
# Frames on a sealed connection: encrypted when they become next in line, opened when whole.
#
# The header stays readable and is authenticated together with the payload.  A payload is decrypted
# straight into its destination; a frame that fails ends the connection and delivers nothing.

SEALED_PIECE = MAX_PIECE
"""Bytes encrypted at once: enough that the two sides seldom wake each other.  With a quarter of it,
the kernel took 50 % more time.
"""

SPARE = 2
"""Buffers of each size kept for reuse: fresh memory of that size is slow to touch."""

ROOMS = tuple(HEADER_SIZE + size + TAG_SIZE for size in (256 << 10, SEALED_PIECE))
"""Sizes of the buffers that are kept."""

SMALL = 32 << 10
"""Bytes below which a buffer of its own is cheaper than keeping one."""


class EncryptedWriter(FrameWriter):
    """Encrypts every frame; the header stays readable and is authenticated with the payload."""

    piece_size = SEALED_PIECE
    pieces_in_line = 1  # what is sealed and waits grows cold, and holds up small frames

    def __init__(self, stream: Stream, watch: Callable[[bool], None], sealer: Encryptor) -> None:
        super().__init__(stream, watch)
        self._sealer = sealer
        self._spares: dict[int, list[bytearray]] = {room: [] for room in ROOMS}

    def _enter(self, frame: QueuedFrame) -> None:
        payload = memoryview(b"") if frame.payload is None else frame.payload
        room = HEADER_SIZE + len(payload) + TAG_SIZE
        spare = self._take_spare(room)
        out = memoryview(bytearray(room) if spare is None else spare)
        sealed = self._sealer.seal_record(frame.header, payload, out)
        self._line.append(QueuedBytes(sealed, frame.owner, frame.last, spare))

    def _take_spare(self, room: int) -> bytearray | None:
        if room < SMALL:
            return None
        kept = next(size for size in ROOMS if room <= size)
        spares = self._spares[kept]
        return spares.pop() if spares else bytearray(kept)

    def _write_first(self, header: bytes, payload: memoryview | None) -> bool:
        self._enter(QueuedFrame(header, payload, None, last=True))
        self._write_line()
        self._set_watching(wanted=bool(self._line))
        return not (self._line or self.is_broken)

    @staticmethod
    def _own(entry: QueuedBytes) -> QueuedBytes:
        return entry._replace(owner=None)  # sealed bytes are ours already

    def _left(self, entry: QueuedBytes) -> None:
        super()._left(entry)
        if entry.spare is not None:
            spares = self._spares[len(entry.spare)]
            if len(spares) < SPARE:
                spares.append(entry.spare)


class EncryptedReader(FrameReader):
    """Decrypts; nothing unauthenticated is ever handed on."""

    overhead = TAG_SIZE

    def __init__(
        self, stream: Stream, handler: FrameHandler, max_eager: int, opener: Decryptor
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
