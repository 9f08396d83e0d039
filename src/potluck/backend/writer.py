"""Writing frames to one peer's stream.

Any thread may add frames while it holds the link's lock; they leave in order, several in one system
call, and the pieces of large messages take turns with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from potluck.backend.operation import Operation
from potluck.net.frames import MAX_PIECE, Kind, encode
from potluck.net.transport import Stream

__all__ = ["Entry", "Frame", "FrameWriter", "Parcel"]

GATHER = 8
"""Buffers handed to one gathering write."""


class Parcel:
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

    def next_piece(self, epoch: int, size: int) -> Frame:
        """The next frame."""
        payload = self.view[self.sent : self.sent + size]
        header = encode(
            Kind.DATA,
            group=self.group,
            epoch=epoch,
            tag=self.tag,
            operation=self.number,
            piece=self.piece,
            length=len(payload),
        )
        self.sent += len(payload)
        self.piece += 1
        return Frame(header, payload, self.operation, self.sent == len(self.view))


class Frame(NamedTuple):
    """A frame that is not yet in line."""

    header: bytes
    payload: memoryview | None
    owner: Operation | None
    last: bool
    """The owner is finished when this has left."""


class Entry(NamedTuple):
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
        self._line: deque[Entry] = deque()
        self._frames: deque[Frame] = deque()
        self._parcels: deque[Parcel] = deque()
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
            self._frames.append(Frame(header, payload, None, last=True))
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
        self._enter(Frame(header, payload, None, last=True))
        self._skip(sent)
        self._set_watching(wanted=True)
        return False

    def adopt(self, owner: Operation) -> None:
        """The frame written last belongs to ``owner``: finish it when the last byte has left."""
        if self._frames:
            self._frames[-1] = self._frames[-1]._replace(owner=owner)
        elif self._line:
            self._line[-1] = self._line[-1]._replace(owner=owner, last=True)

    def send(self, parcel: Parcel) -> None:
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
        """Write nothing any more and read from nobody's buffer."""
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

    def _enter(self, frame: Frame) -> None:
        """A frame becomes next in line."""
        self._line.append(Entry(memoryview(frame.header)))
        if frame.payload is not None:
            self._line.append(Entry(frame.payload, frame.owner, frame.last))

    @staticmethod
    def _own(entry: Entry) -> Entry:
        """The same bytes, no longer in the owner's buffer."""
        return Entry(memoryview(bytes(entry.view)))

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
        """So many bytes have left."""
        line = self._line
        while line:
            entry = line[0]
            if sent < len(entry.view):
                line[0] = entry._replace(view=entry.view[sent:])
                return
            sent -= len(entry.view)
            line.popleft()
            self._left(entry)

    def _left(self, entry: Entry) -> None:
        """Every byte of an entry has left."""
        if entry.last and entry.owner is not None:
            entry.owner.finish()

    def _set_watching(self, *, wanted: bool) -> None:
        if wanted is not self._watching:
            self._watching = wanted
            self._watch(wanted)
