"""Receiving: what is half here, what has another size, and what nobody has asked for."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

import pytest

from potluck import PeerLost, SizeMismatch, Timeout
from potluck.backend.mesh import MeshBackend
from potluck.net.frames import HEADER_SIZE, MAX_PIECE, Kind
from support.meshes import (
    SMALL,
    RawPeer,
    frame,
    half_here,
    kept_bytes,
    kept_messages,
    mesh_group,
    pump_until,
    raw_peer,
    received,
    wait_all,
)
from support.threads import Background, eventually, together

TEXT = bytes(range(200))
CUTS = [1, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 1, HEADER_SIZE + 100, HEADER_SIZE + 199]


def offer(number: int, size: int, tag: int = 0) -> bytes:
    """Announce a message."""
    return frame(Kind.OFFER, struct.pack("<Q", size), operation=number, tag=tag)


def expect_grant(peer: RawPeer, number: int) -> None:
    """The mesh asks for an offered message."""
    header, _ = peer.read_frame()
    assert (header.kind, header.operation) == (Kind.GRANT, number)


def time_out(mesh: MeshBackend, size: int = len(TEXT), tag: int = 0) -> None:
    """A receive that gives up, and whose buffer is nobody's afterwards."""
    inbox = bytearray(size)
    with pytest.raises(Timeout):
        mesh.recv_timeout(inbox, 1, 0.02, tag=tag)
    inbox[:] = b"\xee" * size


# -- a receive that gives up in the middle of a message --------------------------------------


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_time_out_in_the_middle_of_an_eager_message_loses_nothing(cut: int, rounds: int) -> None:
    """Wherever the first bytes end, the next receive gets the message whole."""
    message = frame(Kind.EAGER, TEXT, operation=1)
    with raw_peer(SMALL) as (peer, (mesh,)):
        peer.send(message[:cut])
        for _ in range(rounds):
            time_out(mesh)
        peer.send(message[cut:])
        assert received(mesh, 1, len(TEXT)) == TEXT


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_time_out_in_the_middle_of_a_piece_loses_nothing(cut: int, rounds: int) -> None:
    """The first bytes landed in a buffer that is the caller's again; later ones must not."""
    first, last = TEXT[:77], TEXT[::-1] * 3
    piece = frame(Kind.DATA, TEXT, operation=1, piece=1)
    whole = first + TEXT + last
    with raw_peer(SMALL) as (peer, (mesh,)):
        inbox = bytearray(len(whole))
        receive = mesh.post_recv_into(inbox, 1)
        peer.send(offer(1, len(whole)))
        pump_until(mesh, lambda: mesh._senders[1].offers != {})
        expect_grant(peer, 1)
        peer.send(frame(Kind.DATA, first, operation=1), piece[:cut])
        wanted = cut - HEADER_SIZE if cut >= HEADER_SIZE else None
        pump_until(mesh, lambda: inbox.startswith(first) and half_here(mesh, 1) == wanted)
        assert receive.cancel()
        inbox[:] = b"\xee" * len(inbox)
        for _ in range(rounds):
            time_out(mesh, len(whole))
        peer.send(piece[cut:], frame(Kind.DATA, last, operation=1, piece=2))
        assert received(mesh, 1, len(whole)) == whole
        assert set(inbox) == {0xEE}


def test_recv_timeout_in_the_middle_of_a_large_message_loses_nothing() -> None:
    """The blocking call, with more bytes than any buffer on the way holds."""
    size = 3 * MAX_PIECE
    pieces = [bytes([index]) * MAX_PIECE for index in range(3)]
    with raw_peer() as (peer, (mesh,)):
        peer.send(offer(1, size))
        timing_out = Background(lambda: mesh.recv_timeout(bytearray(size), 1, 0.3))
        expect_grant(peer, 1)
        peer.send(frame(Kind.DATA, pieces[0], operation=1))
        middle = frame(Kind.DATA, pieces[1], operation=1)
        peer.send(middle[:500_000])
        with pytest.raises(Timeout, match="Nothing is lost"):
            timing_out.result()
        receiving = Background(lambda: received(mesh, 1, size))
        peer.send(middle[500_000:], frame(Kind.DATA, pieces[2], operation=1))
        assert receiving.result() == b"".join(pieces)


def test_a_time_out_while_another_thread_pumps_loses_nothing() -> None:
    """The pump writes into the buffer of a receive whose own thread only sleeps."""
    message = frame(Kind.EAGER, TEXT, operation=1)
    with raw_peer(SMALL) as (peer, (mesh,)):
        pumping = Background(lambda: received(mesh, 1, 4, tag=9))
        for _ in range(20):
            timing_out = Background(lambda: time_out(mesh))
            peer.send(message[:100])
            timing_out.result()
            time_out(mesh)
            peer.send(message[100:])
            assert received(mesh, 1, len(TEXT)) == TEXT
        assert not pumping.ended
        peer.send(frame(Kind.EAGER, b"done", operation=2, tag=9))
        assert pumping.result() == b"done"


def test_a_successor_that_already_waits_gets_the_half_message() -> None:
    """Two receives are posted, the first gives up in the middle: the second has its message."""
    message = frame(Kind.EAGER, TEXT, operation=1)
    with raw_peer(SMALL) as (peer, (mesh,)):
        inboxes = [bytearray(len(TEXT)) for _ in range(2)]
        first, second = (mesh.post_recv_into(inbox, 1) for inbox in inboxes)
        peer.send(message[:100])
        pump_until(mesh, lambda: half_here(mesh, 1) is not None)
        assert first.cancel()
        peer.send(message[100:])
        second.wait()
        assert inboxes[1] == TEXT


def test_a_message_whose_receive_gave_up_comes_first_again() -> None:
    """Others of its key were known behind it; the next receive gets it all the same."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        receive = mesh.post_recv_into(bytearray(1000), 1)
        peer.send(offer(1, 1000), offer(2, 1000), frame(Kind.EAGER, TEXT, operation=3))
        pump_until(mesh, lambda: kept_messages(mesh) == 2)
        expect_grant(peer, 1)
        peer.send(frame(Kind.DATA, b"a" * 500, operation=1))
        pump_until(mesh, lambda: mesh._senders[1].offers[1].filled == 500)
        assert receive.cancel()
        peer.send(frame(Kind.DATA, b"b" * 500, operation=1, piece=1))
        assert received(mesh, 1, 1000) == b"a" * 500 + b"b" * 500
        second = Background(lambda: received(mesh, 1, 1000))
        expect_grant(peer, 2)
        peer.send(frame(Kind.DATA, b"c" * 1000, operation=2))
        assert second.result() == b"c" * 1000
        assert received(mesh, 1, len(TEXT)) == TEXT


def test_a_receive_whose_message_was_withdrawn_comes_first_again() -> None:
    """Another of its key was posted behind it; the next message is its all the same."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        inboxes = [bytearray(1000) for _ in range(2)]
        receives = [mesh.post_recv_into(inbox, 1) for inbox in inboxes]
        peer.send(offer(1, 1000))
        pump_until(mesh, lambda: mesh._senders[1].offers != {})
        peer.send(frame(Kind.DATA, b"a" * 500, operation=1), frame(Kind.WITHDRAW, operation=1))
        for number, letter in ((2, b"b"), (3, b"c")):
            peer.send(offer(number, 1000))
            pump_until(mesh, lambda n=number: n in mesh._senders[1].offers)  # type: ignore[misc]
            peer.send(frame(Kind.DATA, letter * 1000, operation=number))
        wait_all(receives)
        assert inboxes == [b"b" * 1000, b"c" * 1000]


def test_a_half_message_meets_a_receive_of_another_size() -> None:
    """Its sizes are told at once; the rest of it is dropped and the next message is the next."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        message = frame(Kind.EAGER, TEXT, operation=1)
        peer.send(message[:100])
        time_out(mesh)
        with pytest.raises(SizeMismatch) as caught:
            mesh.recv(bytearray(3), 1)
        assert (caught.value.expected, caught.value.got) == (3, len(TEXT))
        peer.send(message[100:], frame(Kind.EAGER, b"next", operation=2))
        assert received(mesh, 1, 4) == b"next"
        assert kept_messages(mesh) == 0


def test_a_peer_lost_in_the_middle_of_a_message_ends_its_receive() -> None:
    """Half a message is no message, whether a receive has it or it is kept for the next."""
    for given_up in (False, True):
        with raw_peer(SMALL) as (peer, (mesh,)):
            peer.send(frame(Kind.EAGER, b"whole", operation=1, tag=5))
            peer.send(frame(Kind.EAGER, TEXT, operation=2)[:100])
            if given_up:
                time_out(mesh)
            receiving = Background(partial(received, mesh, 1, len(TEXT)))
            peer.close()
            with pytest.raises(PeerLost, match="ended without closing"):
                receiving.result()
            assert received(mesh, 1, 5, tag=5) == b"whole"
            assert kept_messages(mesh) == 0


def test_many_time_outs_during_a_busy_exchange_lose_nothing() -> None:
    """Receives give up at random moments while messages of all sizes keep coming."""
    sizes = [0, 10, 256, 257, 4_000, 300_000] * 5

    def persist(mesh: MeshBackend, size: int) -> bytes:
        while True:
            inbox = bytearray(size)
            try:
                mesh.recv_timeout(inbox, 0, 0.0002)
            except Timeout:
                inbox[:] = b"\xee" * size
            else:
                return bytes(inbox)

    with mesh_group(2, SMALL) as (left, right):

        def send() -> None:
            for index, size in enumerate(sizes):
                left.send(bytes([index]) * size, 1)

        def receive() -> None:
            for index, size in enumerate(sizes):
                assert persist(right, size) == bytes([index]) * size

        together(send, receive)


# -- a receive of another size ---------------------------------------------------------------

Order = Callable[[MeshBackend, MeshBackend, bytes, int], None]


def receive_first(left: MeshBackend, right: MeshBackend, message: bytes, size: int) -> None:
    """The receive is waiting when the message comes."""
    receiving = Background(lambda: right.recv(bytearray(size), 0))
    eventually(lambda: right._inbox._mailbox.awaited_keys() != [])
    together(lambda: left.send(message, 1), receiving.result)


def send_first(left: MeshBackend, right: MeshBackend, message: bytes, size: int) -> None:
    """The message is known, or here, when the receive comes."""
    sending = Background(lambda: left.send(message, 1))
    pump_until(right, lambda: kept_messages(right) == 1)
    try:
        right.recv(bytearray(size), 0)
    finally:
        sending.result()


@pytest.mark.parametrize("order", [receive_first, send_first])
@pytest.mark.parametrize("sent", [0, 1, 256, 257, 9_000])
@pytest.mark.parametrize("wanted", [2, 300, 8_999])
def test_a_size_mismatch_reports_both_sizes_and_stays_in_step(
    order: Order, sent: int, wanted: int
) -> None:
    """Sent at once or offered, too long or too short: the sender notices nothing."""
    with mesh_group(2, SMALL) as (left, right):
        with pytest.raises(SizeMismatch, match=f"{sent} bytes but .* {wanted}") as caught:
            order(left, right, bytes(sent), wanted)
        error = caught.value
        assert (error.expected, error.got, error.rank) == (wanted, sent, 0)
        together(
            lambda: left.send(b"next" * 100, 1),
            lambda: right.recv(bytearray(400), 0),
        )
        assert kept_messages(right) == 0


def test_mismatches_give_the_credit_back() -> None:
    """Dropping eager messages forever leaves the link as fast as it was."""
    with mesh_group(2, SMALL) as (left, right):
        for _ in range(200):
            left.send(bytes(200), 1)
            with pytest.raises(SizeMismatch):
                right.recv(bytearray(10), 0)
        assert right._senders[0].used <= SMALL.credit
        assert left.post_send(bytes(200), 1).done
        assert kept_bytes(right) == 0


def test_a_mismatch_with_oneself() -> None:
    """The same rule for a message to oneself, in either order."""
    with mesh_group(2) as (me, _):
        me.send(b"12345", 0)
        with pytest.raises(SizeMismatch):
            me.recv(bytearray(4), 0)
        receive = me.post_recv_into(bytearray(4), 0)
        me.send(b"12345", 0)
        with pytest.raises(SizeMismatch):
            receive.wait()
        me.send(b"next", 0)
        assert received(me, 0, 4) == b"next"
