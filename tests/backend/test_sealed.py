"""Sealed links: the same messages, unreadable on the way, and nothing that was tampered with."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from functools import partial

import pytest

from potluck import PeerLost, SizeMismatch, Timeout
from potluck.backend.mesh import MeshBackend
from potluck.backend.outbox import Send
from potluck.backend.reader import READ_AHEAD
from potluck.backend.sealed import SEALED_PIECE
from potluck.net.frames import HEADER_SIZE, Kind, decode, encode
from potluck.net.memory import MemoryPoller, MemoryStream, pipe
from potluck.net.sealing import TAG_SIZE
from support.meshes import SMALL, kept_messages, mesh_group, pump_until, received
from support.sealed_pair import connect, seal
from support.threads import Background, together

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
        assert isinstance(send, Send)
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
        assert (header.kind, header.tag, header.length) == (Kind.EAGER, 3, 14)
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
    with pytest.raises(PeerLost, match=r"no valid frame|ended without closing"):
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
        with pytest.raises(PeerLost, match="no valid frame"):
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
        with pytest.raises(PeerLost, match="no valid frame"):
            right.recv(bytearray(5), 0)


def test_a_frame_cannot_be_reflected() -> None:
    """What a rank has said itself is not what its peer says, although the number fits."""
    with tapped() as (left, _, tap_left, _):
        left.send(b"myself", 1)
        tap_left.sendmsg([read_all(tap_left)])
        with pytest.raises(PeerLost, match="no valid frame"):
            left.recv(bytearray(6), 1)


OTHERS = {
    "another connection": connect(1),
    "another epoch": connect(epoch=2),
    "another group": connect(connection=b"c2"),
    "another lane": connect(lane="messages"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_frame_from_elsewhere_ends_the_link(other: str) -> None:
    """Of the same two nodes and with the right number, but sealed for something else."""
    header = encode(Kind.EAGER, operation=1, length=5)
    with tapped() as (_, right, _, tap_right):
        tap_right.sendmsg([header, seal(OTHERS[other].a_seals, b"alien", header)])
        with pytest.raises(PeerLost, match="no valid frame"):
            right.recv(bytearray(5), 0)
        assert kept_messages(right) == 0
