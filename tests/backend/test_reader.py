"""Reading frames: however the network cuts and glues them, they come out whole and in order."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import MalformedFrame
from potluck.backend.reader import READ_AHEAD, READS_PER_TURN, FrameReader, PeerEnded
from potluck.backend.sealed import SealedReader
from potluck.net.frames import HEADER_SIZE, Header, Kind, encode
from potluck.net.memory import pipe
from potluck.net.tcp import TcpStream
from support.meshes import frame, tcp_pair
from support.sealed_pair import connect, seal
from support.threads import eventually

MAX_EAGER = 1 << 20


class Recorder:
    """Keeps every frame with its payload."""

    def __init__(self) -> None:
        self.frames: list[tuple[Kind, int, bytes]] = []
        self.begun: list[Header] = []
        self._landing = bytearray()

    def begin(self, header: Header) -> memoryview:
        """Offer a buffer of the right size."""
        self.begun.append(header)
        self._landing = bytearray(header.length)
        return memoryview(self._landing)

    def complete(self, header: Header) -> None:
        """Note what landed."""
        payload = bytes(self._landing) if header.length else b""
        self.frames.append((header.kind, header.operation, payload))

    def complete_small(self, header: Header, payload: memoryview) -> None:
        """Copy what was lent."""
        self.frames.append((header.kind, header.operation, bytes(payload)))


class Wire:
    """A reader and the far end of its stream."""

    def __init__(self, *, sealed: bool = False) -> None:
        self.handler = Recorder()
        self.far, near = pipe(("far", "near"), capacity=1 << 26)
        self._keys = connect() if sealed else None
        self.reader = FrameReader(near, self.handler, MAX_EAGER)
        if self._keys is not None:
            self.reader = SealedReader(near, self.handler, MAX_EAGER, self._keys.b_opens)

    def joined(self, frames: list[tuple[Kind, int, bytes]]) -> bytes:
        """The bytes on the wire."""
        data = b""
        for kind, number, payload in frames:
            header = encode(kind, operation=number, length=len(payload))
            data += header
            data += payload if self._keys is None else seal(self._keys.a_seals, payload, header)
        return data

    def carry(self, chunks: Iterable[bytes]) -> list[tuple[Kind, int, bytes]]:
        """Send bytes in pieces, each read before the next is sent."""
        for chunk in chunks:
            if chunk:
                self.far.sendmsg([chunk])
                self.drain()
        return self.handler.frames

    def drain(self) -> None:
        """Read until nothing is left."""
        while self.reader._stream.readable_at() is not None:  # type: ignore[attr-defined]
            self.reader.read()


def noise(size: int) -> bytes:
    """Bytes that repeat with the size."""
    return random.Random(size).randbytes(size)


FRAMES = [
    (Kind.EAGER, 1, noise(5)),
    (Kind.GRANT, 2, b""),
    (Kind.EAGER, 3, b""),
    (Kind.OFFER, 4, noise(8)),
    (Kind.DATA, 5, noise(40)),
    (Kind.TOKEN, 6, b""),
    (Kind.DATA, 7, noise(1)),
    (Kind.EAGER, 8, noise(33)),
]
LARGE_FRAMES = [
    (Kind.DATA, 1, noise(READ_AHEAD)),
    (Kind.GRANT, 2, b""),
    (Kind.DATA, 3, noise(READ_AHEAD + 1)),
    (Kind.EAGER, 4, noise(READ_AHEAD - HEADER_SIZE)),
    (Kind.EAGER, 5, noise(200_000)),
    (Kind.OFFER, 6, noise(8)),
    (Kind.DATA, 7, noise(3 * READ_AHEAD)),
    (Kind.GOODBYE, 8, b""),
]


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """The same bytes in pieces."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


both = pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])


@both
def test_frames_may_be_cut_at_every_byte(sealed: bool) -> None:
    """Between two frames, inside a header, inside a payload or its tag."""
    for place in range(len(Wire(sealed=sealed).joined(FRAMES)) + 1):
        wire = Wire(sealed=sealed)
        assert wire.carry(cut(wire.joined(FRAMES), [place])) == FRAMES


@both
@pytest.mark.parametrize("size", [1, 2, 7, HEADER_SIZE, HEADER_SIZE + 1, 10_000])
def test_frames_may_come_in_equal_pieces(size: int, sealed: bool) -> None:
    """Byte by byte, or all glued together."""
    wire = Wire(sealed=sealed)
    data = wire.joined(FRAMES * 3)
    assert wire.carry(cut(data, range(size, len(data), size))) == FRAMES * 3


@both
@given(places=st.lists(st.integers(0, 1 << 20), max_size=12))
def test_large_frames_may_be_cut_anywhere(sealed: bool, places: list[int]) -> None:
    """Frames larger than the buffer for headers, with small ones between them."""
    wire = Wire(sealed=sealed)
    assert wire.carry(cut(wire.joined(LARGE_FRAMES), places)) == LARGE_FRAMES


@both
@given(place=st.integers(0, 1 << 20), places=st.lists(st.integers(0, 1 << 20), max_size=4))
def test_bytes_read_by_others_come_first(sealed: bool, place: int, places: list[int]) -> None:
    """What whoever opened the connection has read too much is pushed back, then reading goes on."""
    wire = Wire(sealed=sealed)
    data = wire.joined(FRAMES + LARGE_FRAMES)
    place %= len(data) + 1
    wire.reader.push(data[:place])
    assert wire.carry(cut(data[place:], places)) == FRAMES + LARGE_FRAMES


def test_frames_arrive_through_a_real_socket() -> None:
    """With the kernel's own idea of how to cut."""
    left, right = tcp_pair()
    with left:
        stream = TcpStream(right)
        handler = Recorder()
        reader = FrameReader(stream, handler, MAX_EAGER)
        left.sendall(Wire().joined(LARGE_FRAMES * 2))

        def read() -> bool:
            reader.read()
            return len(handler.frames) == 2 * len(LARGE_FRAMES)

        eventually(read)
        stream.close()
    assert handler.frames == LARGE_FRAMES * 2


def test_the_payload_now_arriving_can_land_elsewhere() -> None:
    """Where the rest of it goes may change in the middle; what follows is not touched."""
    wire = Wire()
    data = frame(Kind.DATA, noise(100), operation=1)
    wire.carry([data[: HEADER_SIZE + 30]])
    arriving = wire.reader.arriving()
    assert arriving is not None
    assert (arriving[0].operation, arriving[1]) == (1, 30)
    elsewhere = bytearray(70)
    wire.reader.redirect(memoryview(elsewhere))
    wire.carry([data[HEADER_SIZE + 30 :], frame(Kind.GRANT)])
    assert elsewhere == noise(100)[30:]
    assert wire.reader.arriving() is None
    assert wire.handler.frames[-1] == (Kind.GRANT, 0, b"")


@both
def test_the_end_of_the_stream_is_told_from_silence(sealed: bool) -> None:
    """Wherever a frame was cut off: what was whole before it has been handed over, it has not."""
    first, last = (Kind.EAGER, 1, noise(5)), (Kind.DATA, 2, noise(30))
    before = len(Wire(sealed=sealed).joined([first]))
    for place in range(before, len(Wire(sealed=sealed).joined([first, last]))):
        wire = Wire(sealed=sealed)
        wire.far.sendmsg([wire.joined([first, last])[:place]])
        wire.far.finish(0)
        with pytest.raises(PeerEnded):
            wire.drain()
        assert wire.handler.frames == [first]


def test_a_bad_header_is_refused_before_its_payload() -> None:
    """Nobody is asked for a buffer of the size a stranger claims."""
    wire = Wire()
    with pytest.raises(MalformedFrame):
        wire.carry([frame(Kind.EAGER, b"fine"), frame(Kind.DATA, bytes(20)).replace(b"PL", b"XX")])
    assert wire.handler.begun == []
    with pytest.raises(MalformedFrame, match="over the limit"):
        Wire().carry([frame(Kind.EAGER, bytes(MAX_EAGER + 1))[:HEADER_SIZE]])


class Firehose:
    """A stream that always has more."""

    peer_name = "firehose"

    def __init__(self) -> None:
        self.reads = 0
        self._data = frame(Kind.GRANT, operation=1) * 4096
        self._place = 0

    def recv_into(self, buffer: memoryview, /) -> int:
        """Fill the whole buffer."""
        self.reads += 1
        rest = len(buffer)
        while rest:
            part = self._data[self._place : self._place + rest]
            buffer[len(buffer) - rest :][: len(part)] = part
            self._place = (self._place + len(part)) % len(self._data)
            rest -= len(part)
        return len(buffer)


def test_one_stream_does_not_keep_the_reader_for_itself() -> None:
    """However much there is, the others get their turn."""
    firehose, handler = Firehose(), Recorder()
    reader = FrameReader(firehose, handler, MAX_EAGER)  # type: ignore[arg-type]
    reader.read()
    assert firehose.reads == READS_PER_TURN
    assert len(handler.frames) >= READS_PER_TURN * READ_AHEAD // HEADER_SIZE - READS_PER_TURN
