"""Reading frames: however the network cuts and glues them, they come out whole and in order."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import MalformedFrame, PeerLost, SizeMismatch, Timeout
from potluck.backend.framing import (
    GATHER,
    READ_AHEAD,
    READS_PER_TURN,
    ROOMS,
    SEALED_PIECE,
    SPARE,
    EncryptedReader,
    EncryptedWriter,
    FrameHandler,
    FrameReader,
    FrameWriter,
    LargeMessage,
)
from potluck.backend.mesh import MeshBackend
from potluck.backend.messages import SendOperation
from potluck.net.aead import TAG_SIZE
from potluck.net.frames import HEADER_SIZE, MAX_PIECE, FrameType, Header, decode, encode
from potluck.net.memory import MemoryPoller, MemoryStream, pipe
from potluck.net.records import PeerEnded
from potluck.net.tcp import TcpStream
from support.meshes import SMALL, frame, kept_messages, mesh_group, pump_until, received, tcp_pair
from support.sealed_pair import Pair, connect, seal, unseal
from support.threads import Background, eventually, together
from support.valve import Owner, Valve

MAX_EAGER = 1 << 20


class Recorder:
    """Keeps every frame with its payload."""

    def __init__(self) -> None:
        self.frames: list[tuple[FrameType, int, bytes]] = []
        self.begun: list[Header] = []
        self._landing = bytearray()

    @property
    def handler(self) -> FrameHandler:
        """What a reader needs."""
        return FrameHandler(self.begin, self.complete, self.complete_small)

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
        self.reader = FrameReader(near, self.handler.handler, MAX_EAGER)
        if self._keys is not None:
            self.reader = EncryptedReader(near, self.handler.handler, MAX_EAGER, self._keys.b_opens)

    def joined(self, frames: list[tuple[FrameType, int, bytes]]) -> bytes:
        """The bytes on the wire."""
        data = b""
        for kind, number, payload in frames:
            header = encode(kind, operation=number, length=len(payload))
            data += header
            data += payload if self._keys is None else seal(self._keys.a_seals, payload, header)
        return data

    def carry(self, chunks: Iterable[bytes]) -> list[tuple[FrameType, int, bytes]]:
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
    (FrameType.EAGER, 1, noise(5)),
    (FrameType.GRANT, 2, b""),
    (FrameType.EAGER, 3, b""),
    (FrameType.OFFER, 4, noise(8)),
    (FrameType.DATA, 5, noise(40)),
    (FrameType.TOKEN, 6, b""),
    (FrameType.DATA, 7, noise(1)),
    (FrameType.EAGER, 8, noise(33)),
]
LARGE_FRAMES = [
    (FrameType.DATA, 1, noise(READ_AHEAD)),
    (FrameType.GRANT, 2, b""),
    (FrameType.DATA, 3, noise(READ_AHEAD + 1)),
    (FrameType.EAGER, 4, noise(READ_AHEAD - HEADER_SIZE)),
    (FrameType.EAGER, 5, noise(200_000)),
    (FrameType.OFFER, 6, noise(8)),
    (FrameType.DATA, 7, noise(3 * READ_AHEAD)),
    (FrameType.GOODBYE, 8, b""),
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
        reader = FrameReader(stream, handler.handler, MAX_EAGER)
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
    data = frame(FrameType.DATA, noise(100), operation=1)
    wire.carry([data[: HEADER_SIZE + 30]])
    arriving = wire.reader.arriving()
    assert arriving is not None
    assert (arriving[0].operation, arriving[1]) == (1, 30)
    elsewhere = bytearray(70)
    wire.reader.redirect(memoryview(elsewhere))
    wire.carry([data[HEADER_SIZE + 30 :], frame(FrameType.GRANT)])
    assert elsewhere == noise(100)[30:]
    assert wire.reader.arriving() is None
    assert wire.handler.frames[-1] == (FrameType.GRANT, 0, b"")


@both
def test_the_end_of_the_stream_is_told_from_silence(sealed: bool) -> None:
    """Wherever a frame was cut off: what was whole before it has been handed over, it has not."""
    first, last = (FrameType.EAGER, 1, noise(5)), (FrameType.DATA, 2, noise(30))
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
        wire.carry(
            [
                frame(FrameType.EAGER, b"fine"),
                frame(FrameType.DATA, bytes(20)).replace(b"PL", b"XX"),
            ]
        )
    assert wire.handler.begun == []
    with pytest.raises(MalformedFrame, match="over the limit"):
        Wire().carry([frame(FrameType.EAGER, bytes(MAX_EAGER + 1))[:HEADER_SIZE]])


class Firehose:
    """A stream that always has more."""

    peer_name = "firehose"

    def __init__(self) -> None:
        self.reads = 0
        self._data = frame(FrameType.GRANT, operation=1) * 4096
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
    reader = FrameReader(firehose, handler.handler, MAX_EAGER)  # type: ignore[arg-type]
    reader.read()
    assert firehose.reads == READS_PER_TURN
    assert len(handler.frames) >= READS_PER_TURN * READ_AHEAD // HEADER_SIZE - READS_PER_TURN


# --------------------------------------------------------------------------------------------------
# Sealed links: the same messages, unreadable on the way, and nothing that was tampered with.

SIZES = [0, 1, 256, 257, READ_AHEAD - HEADER_SIZE, 100_000, SEALED_PIECE, 3 * SEALED_PIECE + 5]
LARGE = 48 << 20


def content(*facts: int, size: int) -> bytes:
    """Bytes that only this message has."""
    return random.Random(repr(facts)).randbytes(size)


@pytest.mark.parametrize("limits", [None, SMALL], ids=["usual", "small"])
def test_messages_of_every_size_arrive_whole(limits: None) -> None:
    """Both directions, several threads, all sizes around those where something changes."""

    def send(mesh: MeshBackend, tag: int) -> None:
        for lap, size in enumerate(SIZES):
            mesh.send(content(mesh.rank, tag, lap, size=size), 1 - mesh.rank, tag=tag)

    def receive(mesh: MeshBackend, tag: int) -> None:
        peer = 1 - mesh.rank
        for lap, size in enumerate(SIZES):
            assert received(mesh, peer, size, tag=tag) == content(peer, tag, lap, size=size)

    with mesh_group(2, limits, sealed=True) as group:
        together(
            *[
                partial(action, mesh, tag)
                for mesh in group
                for tag in range(3)
                for action in (send, receive)
            ]
        )
        together(*[mesh.barrier for mesh in group])


def test_time_outs_in_the_middle_lose_nothing() -> None:
    """Receives give up again and again while a large message comes in."""

    def persist(mesh: MeshBackend, size: int) -> bytes:
        while True:
            inbox = bytearray(size)
            try:
                mesh.recv_timeout(inbox, 0, 0.0003)
            except Timeout:
                inbox[:] = b"\xee" * size
            else:
                return bytes(inbox)

    with mesh_group(2, SMALL, sealed=True) as (left, right):
        for lap, size in enumerate(SIZES):
            sending = Background(partial(left.send, content(lap, size=size), 1))
            assert persist(right, size) == content(lap, size=size)
            sending.result()


def test_a_send_given_up_half_way_is_withdrawn() -> None:
    """Pieces that are sealed already leave as they are; the receive gets the next message."""
    with mesh_group(2, sealed=True) as (left, right):
        inbox = bytearray(LARGE)
        receive = right.post_recv_into(inbox, 0)
        data = bytearray(b"\xaa" * LARGE)
        send = left.post_send(data, 1)
        assert isinstance(send, SendOperation)
        pump_until(right, lambda: right._senders[0].offers != {})
        pump_until(left, lambda: 0 < send.parcel.sent < LARGE)
        assert send.cancel()
        data[:] = b"\xbb" * LARGE
        together(lambda: left.send(b"\xcc" * LARGE, 1), receive.wait)
        assert inbox.count(b"\xcc") == LARGE


def test_a_size_mismatch_leaves_the_keys_in_step() -> None:
    """The message that is dropped was opened all the same."""
    with mesh_group(2, SMALL, sealed=True) as (left, right):
        for size in (100, 5_000):
            sending = Background(partial(left.send, bytes(size), 1))
            with pytest.raises(SizeMismatch):
                right.recv(bytearray(7), 0)
            sending.result()
        left.send(b"fine", 1)
        assert received(right, 0, 4) == b"fine"


@contextlib.contextmanager
def tapped() -> Iterator[tuple[MeshBackend, MeshBackend, MemoryStream, MemoryStream]]:
    """Two ranks with the test in between: what they write, it reads and may pass on."""
    keys = connect()
    near, tap_left = pipe(("left", "tap"), capacity=1 << 24)
    tap_right, far = pipe(("tap", "right"), capacity=1 << 24)
    with (
        MeshBackend(0, 2, MemoryPoller(), SMALL) as left,
        MeshBackend(1, 2, MemoryPoller(), SMALL) as right,
    ):
        left.add_link(1, near, (keys.a_seals, keys.a_opens))
        right.add_link(0, far, (keys.b_seals, keys.b_opens))
        yield left, right, tap_left, tap_right


def read_all(stream: MemoryStream) -> bytes:
    """What has been written to the other end."""
    data, part = b"", memoryview(bytearray(1 << 16))
    with contextlib.suppress(BlockingIOError):
        while True:
            data += part[: stream.recv_into(part)]
    return data


def test_only_the_header_can_be_read_on_the_way() -> None:
    """What it is and for whom, not what it says."""
    with tapped() as (left, right, tap_left, tap_right):
        left.send(b"attack at dawn", 1, tag=3)
        seen = read_all(tap_left)
        header = decode(seen, 0, 1000)
        assert (header.kind, header.tag, header.length) == (FrameType.EAGER, 3, 14)
        assert len(seen) == HEADER_SIZE + 14 + TAG_SIZE
        assert b"attack" not in seen
        tap_right.sendmsg([seen])
        assert received(right, 0, 14, tag=3) == b"attack at dawn"


def flipped(data: bytes, bit: int) -> bytes:
    """The same bytes, but for one bit."""
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def assert_refused(right: MeshBackend, size: int) -> None:
    """The link has ended with a clear error, only what came before is there, and no more."""
    inbox = bytearray(b"\xee" * size)
    with pytest.raises(PeerLost, match=r"invalid message|process ended"):
        right.recv(inbox, 0)
    assert set(inbox) <= {0xEE, 0}
    assert received(right, 0, 6, tag=1) == b"before"
    assert kept_messages(right) == 0


@pytest.mark.parametrize("size", [14, 300], ids=["at once", "on request"])
def test_every_changed_bit_ends_the_link_and_delivers_nothing(size: int) -> None:
    """Of header, payload and tag; a message before it stays."""
    place, last = 0, 1
    while place < last:
        with tapped() as (left, right, tap_left, tap_right):
            left.send(b"before", 1, tag=1)
            first = read_all(tap_left)
            left.post_send(b"\xaa" * size, 1)  # too large to be sent at once, it is offered
            whole = read_all(tap_left)
            last = 8 * len(whole)
            tap_right.sendmsg([first + flipped(whole, place)])
            tap_right.finish(0)  # a changed length may announce more than ever comes
            assert_refused(right, size)
        place += 1
    assert place == 8 * (HEADER_SIZE + (size if size < SMALL.eager else 8) + TAG_SIZE)


def test_a_changed_header_decides_nothing() -> None:
    """Not even which receive fails, and how: both learn that the link is over, and no more."""
    for bit in range(8 * HEADER_SIZE):
        with tapped() as (left, right, tap_left, tap_right):
            receives = [right.post_recv_into(bytearray(200), 0, tag=tag) for tag in range(2)]
            left.send(bytes(200), 1)
            damaged = flipped(read_all(tap_left) + bytes(1000), bit)
            for part in (damaged[:100], damaged[100:]):  # it is not whole when it is first seen
                with contextlib.suppress(BrokenPipeError):
                    tap_right.sendmsg([part])
                    right.progress()
            tap_right.finish(0)
            for receive in receives:
                with pytest.raises(PeerLost):
                    receive.wait()
            assert kept_messages(right) == 0


def test_a_piece_that_was_changed_ends_the_link() -> None:
    """In the middle of a large message: nothing of that piece reaches the buffer."""
    size = 2 * SEALED_PIECE
    with tapped() as (left, right, tap_left, tap_right):
        inbox = bytearray(b"\xee" * size)
        receive = right.post_recv_into(inbox, 0)
        left.post_send(b"\xaa" * size, 1)
        tap_right.sendmsg([read_all(tap_left)])
        right.progress()
        tap_left.sendmsg([read_all(tap_right)])  # the go-ahead
        left.progress()
        pieces = bytearray(read_all(tap_left))
        pieces[HEADER_SIZE + SEALED_PIECE + TAG_SIZE + HEADER_SIZE + 7] ^= 1
        tap_right.sendmsg([pieces])
        with pytest.raises(PeerLost, match="invalid message"):
            receive.wait()
        assert inbox[:SEALED_PIECE] == b"\xaa" * SEALED_PIECE
        assert inbox.count(0xAA) == SEALED_PIECE


@pytest.mark.parametrize("order", [[0, 0], [1, 0], [1]], ids=["again", "swapped", "left out"])
def test_frames_cannot_be_repeated_swapped_or_left_out(order: list[int]) -> None:
    """Each is sealed for its place."""
    with tapped() as (left, right, tap_left, tap_right):
        frames = []
        for text in (b"first", b"other"):
            left.send(text, 1)
            frames.append(read_all(tap_left))
        tap_right.sendmsg([frames[index] for index in order])
        if order == [0, 0]:
            assert received(right, 0, 5) == b"first"
        with pytest.raises(PeerLost, match="invalid message"):
            right.recv(bytearray(5), 0)


def test_a_frame_cannot_be_reflected() -> None:
    """What a rank has said itself is not what its peer says, although the number fits."""
    with tapped() as (left, _, tap_left, _):
        left.send(b"myself", 1)
        tap_left.sendmsg([read_all(tap_left)])
        with pytest.raises(PeerLost, match="invalid message"):
            left.recv(bytearray(6), 1)


OTHERS: dict[str, Callable[[], Pair]] = {
    "another connection": lambda: connect(1),
    "another epoch": lambda: connect(epoch=2),
    "another group": lambda: connect(connection=b"c2"),
    "another lane": lambda: connect(lane="messages"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_frame_from_elsewhere_ends_the_link(other: str) -> None:
    """Of the same two nodes and with the right number, but sealed for something else."""
    header = encode(FrameType.EAGER, operation=1, length=5)
    with tapped() as (_, right, _, tap_right):
        tap_right.sendmsg([header, seal(OTHERS[other]().a_seals, b"alien", header)])
        with pytest.raises(PeerLost, match="invalid message"):
            right.recv(bytearray(5), 0)
        assert kept_messages(right) == 0


# --------------------------------------------------------------------------------------------------
# Writing sealed frames: each has a nonce of its own, whatever becomes of what was to be sent.


class Desk:
    """A writer, its stream, its keys, and every nonce it has sealed with."""

    def __init__(self) -> None:
        self.keys: Pair = connect()
        self.valve = Valve()
        self.writer = EncryptedWriter(self.valve, lambda _: None, self.keys.a_seals)  # type: ignore[arg-type]
        self.nonces: list[bytes] = []
        self.sent: list[tuple[LargeMessage, Owner]] = []
        spend = self.keys.a_seals._spend_number

        def note(size: int) -> object:
            aead, nonce = spend(size)
            self.nonces.append(nonce)
            return aead, nonce

        self.keys.a_seals._spend_number = note  # type: ignore[assignment,method-assign]

    def write(self, size: int) -> None:
        """A small frame."""
        self.writer.write(encode(FrameType.EAGER, length=size), memoryview(bytes(size)))

    def send(self, size: int) -> None:
        """A large message."""
        owner = Owner()
        parcel = LargeMessage(owner, memoryview(bytearray(size)), group=0, tag=0)
        parcel.number = len(self.sent)
        self.sent.append((parcel, owner))
        self.writer.send(parcel)

    def recall(self, size: int) -> None:
        """Give up one of the large messages, sent or not."""
        if self.sent:
            self.writer.recall(self.sent[size % len(self.sent)][1])

    def take(self, size: int) -> None:
        """The network takes some bytes."""
        self.valve.room = size
        self.writer.flush()

    def opened(self) -> list[Header]:
        """What the other side makes of everything that was taken; it must end with a whole one."""
        place, headers = 0, []
        while place < len(self.valve.taken):
            header = decode(self.valve.taken, place, MAX_PIECE)
            start, end = place + HEADER_SIZE, place + HEADER_SIZE + header.length + TAG_SIZE
            head = bytes(self.valve.taken[place:start])
            sealed = bytes(self.valve.taken[start:end])
            assert unseal(self.keys.b_opens, sealed, head) == bytes(header.length)
            headers.append(header)
            place = end
        return headers


ACTIONS: list[Callable[[Desk, int], None]] = [Desk.write, Desk.send, Desk.recall, Desk.take]
steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3 * SEALED_PIECE)), max_size=25)


@given(steps)
def test_no_nonce_comes_twice_whatever_is_aborted(
    steps: list[tuple[Callable[[Desk, int], None], int]],
) -> None:
    """What was sealed leaves, also of a send that was given up, so the two sides stay in step."""
    desk = Desk()
    for action, size in steps:
        action(desk, min(size, MAX_PIECE) if action is Desk.write else size)
    desk.take(1 << 30)
    assert len(set(desk.nonces)) == len(desk.nonces) == len(desk.opened())
    assert desk.writer.is_idle


@pytest.mark.parametrize("taken", [0, 10, HEADER_SIZE + 100, SEALED_PIECE + 1000])
def test_after_a_broken_write_nothing_is_sealed_again(taken: int) -> None:
    """A frame cut off half way is never repeated, and no other takes its number."""
    desk = Desk()
    desk.send(4 * SEALED_PIECE)
    desk.take(taken)
    spent = list(desk.nonces)
    assert len(set(spent)) == len(spent) > 0
    desk.valve.broken = True
    for _ in range(2):
        desk.take(1 << 30)
        desk.write(5)
        desk.send(1000)
    assert desk.nonces == spent
    assert len(desk.valve.taken) == taken


def test_header_and_piece_leave_in_one_buffer() -> None:
    """One call for each piece, sealed just before it leaves while it is in the cache."""
    desk = Desk()
    desk.valve.room = 1 << 30
    desk.send(3 * SEALED_PIECE)
    whole = HEADER_SIZE + SEALED_PIECE + TAG_SIZE
    assert desk.valve.calls == [[whole]] * 3


def test_small_frames_leave_together_and_before_further_pieces() -> None:
    """They do not wait for a large message, and share a call."""
    desk = Desk()
    desk.send(8 * SEALED_PIECE)
    for _ in range(3):
        desk.write(5)
    desk.take(1 << 30)
    kinds = [header.kind for header in desk.opened()]
    assert kinds == [FrameType.DATA, *[FrameType.EAGER] * 3, *[FrameType.DATA] * 7]


def test_buffers_are_used_again_and_few_are_kept() -> None:
    """Fresh memory is slow to touch; a link that has grown once does not keep all of it."""
    desk = Desk()
    desk.valve.room = 1 << 30
    for size in (8 * SEALED_PIECE, MAX_PIECE, 40_000, 5):
        desk.send(size)
        desk.write(min(size, MAX_PIECE))
    first = {room: list(map(id, spares)) for room, spares in desk.writer._spares.items()}
    desk.send(8 * SEALED_PIECE)
    assert {room: list(map(id, spares)) for room, spares in desk.writer._spares.items()} == first
    assert all(len(desk.writer._spares[room]) <= SPARE for room in ROOMS)


# --------------------------------------------------------------------------------------------------
# Writing frames: in order, gathered, in turns, and never from a buffer that was called back.


def frames_in(valve: Valve) -> list[tuple[Header, bytes]]:
    """What was taken, cut into frames; it must end with a whole one."""
    found, place = [], 0
    while place < len(valve.taken):
        header = decode(valve.taken, place, MAX_PIECE)
        place += HEADER_SIZE + header.length
        assert place <= len(valve.taken)
        found.append((header, bytes(valve.taken[place - header.length : place])))
    return found


def make_writer(room: int = 0) -> tuple[FrameWriter, Valve, list[bool]]:
    """A writer, its stream, and what it asked the poller for."""
    valve, watched = Valve(room), list[bool]()
    return FrameWriter(valve, watched.append), valve, watched  # type: ignore[arg-type]


def parcel(number: int, size: int) -> tuple[LargeMessage, Owner, bytearray]:
    """A large message, its operation, and its buffer."""
    buffer = bytearray(random.Random(number).randbytes(1) * size)
    owner = Owner()
    made = LargeMessage(owner, memoryview(buffer), group=0, tag=0)
    made.number = number
    return made, owner, buffer


def test_a_frame_leaves_at_once() -> None:
    """With its payload, in one call, and nobody is asked to watch the stream."""
    writer, valve, watched = make_writer(1000)
    assert writer.write(encode(FrameType.EAGER, length=5), memoryview(b"12345"))
    assert valve.taken == frame(FrameType.EAGER, b"12345")
    assert valve.calls == [[HEADER_SIZE, 5]]
    assert watched == []
    assert writer.is_idle


@given(st.lists(st.integers(1, 400), max_size=60))
def test_frames_leave_in_order_however_little_the_stream_takes(rooms: list[int]) -> None:
    """Small frames and a parcel, written while the stream takes a few bytes now and then."""
    writer, valve, _ = make_writer()
    large, owner, buffer = parcel(99, 3_000)
    expected = []
    for number in range(12):
        payload = bytes([number]) * (number * 7 % 50)
        header = encode(FrameType.EAGER, operation=number, length=len(payload))
        writer.write(header, memoryview(payload))
        expected.append(payload)
        if number == 5:
            writer.send(large)
        if rooms:
            valve.room = rooms.pop()
            writer.flush()
    for room in (*rooms, 1 << 20):
        valve.room = room
        writer.flush()
    frames = frames_in(valve)
    assert [body for header, body in frames if header.kind == FrameType.EAGER] == expected
    assert b"".join(body for header, body in frames if header.kind == FrameType.DATA) == buffer
    assert owner.done
    assert writer.is_idle


def test_frames_that_wait_leave_together() -> None:
    """In one call for as many buffers as one call takes."""
    writer, valve, _ = make_writer()
    for number in range(20):
        writer.write(encode(FrameType.GRANT, operation=number))
    valve.calls.clear()
    valve.room = 1 << 20
    writer.flush()
    assert [header.operation for header, _ in frames_in(valve)] == list(range(20))
    assert list(map(len, valve.calls)) == [GATHER, GATHER, 20 - 2 * GATHER]


def test_the_stream_is_watched_while_something_waits() -> None:
    """And no longer: a poller that is asked without need never sleeps."""
    writer, valve, watched = make_writer(10)
    writer.write(encode(FrameType.GRANT))
    assert watched == [True]
    writer.write(encode(FrameType.GRANT))
    writer.flush()
    assert watched == [True]
    valve.room = 1 << 20
    writer.flush()
    assert watched == [True, False]
    assert len(frames_in(valve)) == 2


def test_two_parcels_take_turns() -> None:
    """Piece by piece: the second large message does not wait for the first."""
    writer, valve, _ = make_writer()
    for number in (1, 2):
        writer.send(parcel(number, 12 * MAX_PIECE)[0])
    valve.room = 1 << 30
    writer.flush()
    numbers = [header.operation for header, _ in frames_in(valve)]
    assert sorted(numbers) == [1] * 12 + [2] * 12
    in_line = GATHER // 2
    assert numbers[:in_line] == [1] * in_line
    assert numbers[in_line : in_line + 16] in ([1, 2] * 8, [2, 1] * 8)


def test_a_small_frame_waits_for_a_few_pieces_only() -> None:
    """Behind 64 MiB it leaves after what is already in line."""
    writer, valve, _ = make_writer()
    writer.send(parcel(1, 64 * MAX_PIECE)[0])
    writer.write(encode(FrameType.TOKEN))
    valve.room = 1 << 30
    writer.flush()
    kinds = [header.kind for header, _ in frames_in(valve)]
    assert kinds.index(FrameType.TOKEN) <= GATHER // 2
    assert len(kinds) == 65


def test_pieces_are_numbered_and_say_where_they_belong() -> None:
    """Every piece carries group, tag, message number and its own."""
    writer, valve, _ = make_writer(1 << 30)
    made = LargeMessage(Owner(), memoryview(bytes(2 * MAX_PIECE + 5)), group=7, tag=3)
    made.number = 11
    writer.send(made)
    facts = [(h.group, h.tag, h.operation, h.piece, h.length) for h, _ in frames_in(valve)]
    assert facts == [(7, 3, 11, 0, MAX_PIECE), (7, 3, 11, 1, MAX_PIECE), (7, 3, 11, 2, 5)]


def test_an_owner_is_finished_when_its_last_byte_has_left() -> None:
    """Not before, and its thread wakes."""
    writer, valve, _ = make_writer()
    made, owner, _ = parcel(1, MAX_PIECE + 10)
    writer.send(made)
    valve.room = 2 * HEADER_SIZE + MAX_PIECE + 9
    writer.flush()
    assert not owner.done
    valve.room = 1
    writer.flush()
    assert owner.done
    assert owner.error is None


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_frame_that_could_not_leave_is_adopted(size: int, behind: bool) -> None:
    """Its operation is finished with its last byte, whether it was first in line or behind."""
    writer, valve, _ = make_writer(10)
    if behind:
        writer.write(encode(FrameType.GRANT))
    owner = Owner()
    header = encode(FrameType.EAGER, length=size)
    assert not writer.write(header, memoryview(bytes(size)))
    writer.adopt(owner)
    assert not owner.done
    valve.room = 1 << 20
    writer.flush()
    assert owner.done
    assert frames_in(valve)[-1][0].length == size


def test_a_recalled_parcel_is_copied_only_where_it_is_in_line() -> None:
    """Of 64 MiB a few pieces; the caller's buffer may change, what leaves does not."""
    writer, valve, _ = make_writer(MAX_PIECE + MAX_PIECE // 2)
    made, owner, buffer = parcel(1, 64 * MAX_PIECE)
    writer.send(made)
    original = bytes(buffer[:1])
    tracemalloc.start()
    try:
        writer.recall(owner)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= (GATHER // 2 + 1) * MAX_PIECE
    buffer[:] = bytes(len(buffer))
    writer.write(encode(FrameType.WITHDRAW, operation=1))
    valve.room = 1 << 30
    writer.flush()
    *pieces, last = frames_in(valve)
    assert last[0].kind == FrameType.WITHDRAW
    assert len(pieces) <= GATHER
    assert all(body == original * MAX_PIECE for _, body in pieces)
    assert not owner.done
    assert writer.is_idle


@pytest.mark.parametrize("behind", [False, True])
def test_a_recalled_frame_is_copied(behind: bool) -> None:
    """A small message half gone, or still behind others, leaves as it was."""
    writer, valve, _ = make_writer(0 if behind else HEADER_SIZE + 3)
    if behind:
        writer.write(encode(FrameType.GRANT))
    buffer, owner = bytearray(b"0123456789"), Owner()
    writer.write(encode(FrameType.EAGER, length=10), memoryview(buffer))
    writer.adopt(owner)
    writer.recall(owner)
    buffer[:] = b"XXXXXXXXXX"
    valve.room = 1000
    writer.flush()
    assert frames_in(valve)[-1][1] == b"0123456789"
    assert not owner.done


def test_a_broken_stream_reads_from_no_buffer_any_more() -> None:
    """Nothing is queued, nobody is told that its bytes have left; the reader will say why."""
    writer, valve, _ = make_writer()
    made, owner, buffer = parcel(1, 100)
    writer.send(made)
    valve.broken = True
    writer.flush()
    assert writer.is_broken
    assert writer.is_idle
    assert not writer.write(encode(FrameType.GRANT))
    writer.adopt(owner)
    writer.flush()
    assert not owner.done
    del made
    buffer.append(1)  # no view of it is left


def test_a_write_from_another_thread_wakes_the_owner() -> None:
    """A thread that waits for its bytes to leave returns when somebody else flushes them."""
    writer, valve, _ = make_writer()
    made, owner, _ = parcel(1, 100)
    writer.send(made)
    valve.room = 1000
    Background(writer.flush).result()
    owner.wait(0)
