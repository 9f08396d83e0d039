"""The courtesy buffer: ranks that all send before they receive still get on, in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from functools import partial

import pytest

from potluck import PeerLost, SizeMismatch, Timeout
from potluck.backend import messages
from potluck.backend.mesh import MeshBackend
from potluck.backend.messages import MAX_OFFERS, MESSAGE_COST, MessageLimits, SendOperation
from potluck.net.frames import HEADER_SIZE, MAX_PIECE, FrameType
from support.meshes import (
    SMALL,
    RawPeer,
    frame,
    half_here,
    kept_bytes,
    kept_messages,
    memory_group,
    mesh_group,
    pump_until,
    raw_peer,
    received,
    wait_all,
)
from support.threads import Background, eventually, together

SIZE = 300_000


def marked(rank: int, number: int = 0, size: int = SIZE) -> bytes:
    """A message that tells whose it is."""
    return struct.pack("<HH", rank, number) * (size // 4)


def test_both_sides_may_send_first() -> None:
    """64 MiB each way, with the usual bounds."""
    size = 64 << 20

    def visit(mesh: MeshBackend) -> None:
        mesh.send(marked(mesh.rank, size=size), 1 - mesh.rank)
        assert received(mesh, 1 - mesh.rank, size) == marked(1 - mesh.rank, size=size)

    with mesh_group(2) as group:
        together(*[partial(visit, mesh) for mesh in group])
        assert [mesh._inbox._courtesy_left for mesh in group] == [MessageLimits().courtesy] * 2


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_ring_may_send_first(size: int) -> None:
    """Everybody sends to the right before receiving from the left, several times over."""

    def visit(mesh: MeshBackend) -> None:
        right, left = (mesh.rank + 1) % size, (mesh.rank - 1) % size
        for lap in range(3):
            mesh.send(marked(mesh.rank, lap), right)
            assert received(mesh, left, SIZE) == marked(left, lap)

    with mesh_group(size, SMALL) as group:
        together(*[partial(visit, mesh) for mesh in group])
        assert {mesh._inbox._courtesy_left for mesh in group} == {SMALL.courtesy}


def test_what_was_taken_in_keeps_its_order() -> None:
    """Several messages each way, all sent first, with small ones in between."""

    def visit(mesh: MeshBackend) -> None:
        peer = 1 - mesh.rank
        for number in range(3):
            mesh.send(marked(mesh.rank, number), peer)
            mesh.send(marked(mesh.rank, number, 40), peer)
        for number in range(3):
            assert received(mesh, peer, SIZE) == marked(peer, number)
            assert received(mesh, peer, 40) == marked(peer, number, 40)

    with mesh_group(2, SMALL) as group:
        together(*[partial(visit, mesh) for mesh in group])


def test_courtesy_is_bounded() -> None:
    """Of four offers two fit; the others stay with their sender until they are asked for."""
    limits = MessageLimits(eager=0, credit=0, courtesy=2 * SIZE)
    with mesh_group(2, limits) as (left, right):
        sends = [left.post_send(marked(0, number), 1) for number in range(4)]
        with pytest.raises(Timeout):
            right.send(marked(1), 0, timeout=0.3)  # while it waits, it takes in what fits
        assert kept_messages(right) == 4
        assert right._inbox._courtesy_left == 0
        waiting = Background(partial(wait_all, sends[:2]))
        pump_until(right, lambda: kept_bytes(right) == 2 * SIZE and waiting.ended)
        assert [send.done for send in sends] == [True, True, False, False]
        waiting = Background(partial(wait_all, sends[2:]))
        for number in range(4):
            assert received(right, 0, SIZE) == marked(0, number)
        waiting.result()
        assert right._inbox._courtesy_left == limits.courtesy


def test_empty_messages_count_as_well() -> None:
    """A peer cannot make us keep a million messages because they have no bytes."""
    room = 5
    limits = MessageLimits(eager=0, credit=0, courtesy=room * MESSAGE_COST)
    with raw_peer(limits) as (peer, (mesh,)):
        peer.send(
            *[
                frame(FrameType.OFFER, struct.pack("<Q", 0), operation=number)
                for number in range(1, 100)
            ]
        )
        with pytest.raises(Timeout):
            mesh.send(b"nobody asks", 1, timeout=0.3)
        peer.send(frame(FrameType.GOODBYE))
        kinds = [peer.read_frame()[0].kind for _ in range(room + 2)]
        assert kinds == [FrameType.OFFER, *[FrameType.GRANT] * room, FrameType.WITHDRAW]


def test_the_budget_comes_back_when_a_message_does_not() -> None:
    """Its sender withdraws it, or is lost, after we had made room for it."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        for ending in (frame(FrameType.WITHDRAW, operation=1), frame(FrameType.GOODBYE)):
            peer.send(frame(FrameType.OFFER, struct.pack("<Q", SIZE), operation=1))
            with pytest.raises(Timeout):
                mesh.send(marked(0), 1, timeout=0.3)
            assert mesh._inbox._courtesy_left < SMALL.courtesy
            peer.send(frame(FrameType.DATA, marked(1, size=1000), operation=1), ending)
            pump_until(mesh, lambda: kept_messages(mesh) == 0)
            assert mesh._inbox._courtesy_left == SMALL.courtesy


def test_a_lone_sender_makes_nobody_take_anything() -> None:
    """Who only waits, or does nothing, keeps the offers where they are."""
    with mesh_group(2, SMALL) as (left, right):
        send = left.post_send(marked(0), 1)
        with pytest.raises(Timeout):
            right.recv_timeout(bytearray(1), 0, 0.15, tag=9)
        assert kept_bytes(right) == 0
        assert send.cancel()


def test_a_message_to_oneself_is_kept_within_the_courtesy() -> None:
    """Beyond it, the send waits for its receive like any other."""
    limits = MessageLimits(courtesy=SIZE)
    with mesh_group(2, limits) as (me, _):
        me.send(marked(1), 0)
        with pytest.raises(Timeout, match="rank 0 has not posted a receive"):
            me.send(marked(2), 0, timeout=0.02)
        second = me.post_send(marked(3), 0)
        assert not second.done
        assert received(me, 0, SIZE) == marked(1)
        assert received(me, 0, SIZE) == marked(3)
        assert second.done
        waiting = [me.post_recv_into(bytearray(SIZE), 0) for _ in range(3)]
        for number in range(3):
            me.send(marked(number), 0)
        wait_all(waiting)
        assert me._inbox._courtesy_left == limits.courtesy


def test_a_send_to_oneself_that_waits_is_ended_by_its_receive() -> None:
    """On another thread, while the sender sleeps."""
    with mesh_group(2, MessageLimits(courtesy=0)) as (me, _):
        sending = Background(lambda: me.send(marked(1), 0))
        eventually(lambda: kept_messages(me) == 1)
        assert received(me, 0, SIZE) == marked(1)
        sending.result()


# --------------------------------------------------------------------------------------------------
# Receiving: what is half here, what has another size, and what nobody has asked for.

TEXT = bytes(range(200))
CUTS = [1, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 1, HEADER_SIZE + 100, HEADER_SIZE + 199]


def offer(number: int, size: int, tag: int = 0) -> bytes:
    """Announce a message."""
    return frame(FrameType.OFFER, struct.pack("<Q", size), operation=number, tag=tag)


def expect_grant(peer: RawPeer, number: int) -> None:
    """The mesh asks for an offered message."""
    header, _ = peer.read_frame()
    assert (header.kind, header.operation) == (FrameType.GRANT, number)


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
    message = frame(FrameType.EAGER, TEXT, operation=1)
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
    piece = frame(FrameType.DATA, TEXT, operation=1, piece=1)
    whole = first + TEXT + last
    with raw_peer(SMALL) as (peer, (mesh,)):
        inbox = bytearray(len(whole))
        receive = mesh.post_recv_into(inbox, 1)
        peer.send(offer(1, len(whole)))
        pump_until(mesh, lambda: mesh._senders[1].offers != {})
        expect_grant(peer, 1)
        peer.send(frame(FrameType.DATA, first, operation=1), piece[:cut])
        wanted = cut - HEADER_SIZE if cut >= HEADER_SIZE else None
        pump_until(mesh, lambda: inbox.startswith(first) and half_here(mesh, 1) == wanted)
        assert receive.cancel()
        inbox[:] = b"\xee" * len(inbox)
        for _ in range(rounds):
            time_out(mesh, len(whole))
        peer.send(piece[cut:], frame(FrameType.DATA, last, operation=1, piece=2))
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
        peer.send(frame(FrameType.DATA, pieces[0], operation=1))
        middle = frame(FrameType.DATA, pieces[1], operation=1)
        peer.send(middle[:500_000])
        with pytest.raises(Timeout, match="Nothing is lost"):
            timing_out.result()
        receiving = Background(lambda: received(mesh, 1, size))
        peer.send(middle[500_000:], frame(FrameType.DATA, pieces[2], operation=1))
        assert receiving.result() == b"".join(pieces)


def test_a_time_out_while_another_thread_pumps_loses_nothing() -> None:
    """The pump writes into the buffer of a receive whose own thread only sleeps."""
    message = frame(FrameType.EAGER, TEXT, operation=1)
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
        peer.send(frame(FrameType.EAGER, b"done", operation=2, tag=9))
        assert pumping.result() == b"done"


def test_a_successor_that_already_waits_gets_the_half_message() -> None:
    """Two receives are posted, the first gives up in the middle: the second has its message."""
    message = frame(FrameType.EAGER, TEXT, operation=1)
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
        peer.send(offer(1, 1000), offer(2, 1000), frame(FrameType.EAGER, TEXT, operation=3))
        pump_until(mesh, lambda: kept_messages(mesh) == 2)
        expect_grant(peer, 1)
        peer.send(frame(FrameType.DATA, b"a" * 500, operation=1))
        pump_until(mesh, lambda: mesh._senders[1].offers[1].filled == 500)
        assert receive.cancel()
        peer.send(frame(FrameType.DATA, b"b" * 500, operation=1, piece=1))
        assert received(mesh, 1, 1000) == b"a" * 500 + b"b" * 500
        second = Background(lambda: received(mesh, 1, 1000))
        expect_grant(peer, 2)
        peer.send(frame(FrameType.DATA, b"c" * 1000, operation=2))
        assert second.result() == b"c" * 1000
        assert received(mesh, 1, len(TEXT)) == TEXT


def test_a_receive_whose_message_was_withdrawn_comes_first_again() -> None:
    """Another of its key was posted behind it; the next message is its all the same."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        inboxes = [bytearray(1000) for _ in range(2)]
        receives = [mesh.post_recv_into(inbox, 1) for inbox in inboxes]
        peer.send(offer(1, 1000))
        pump_until(mesh, lambda: mesh._senders[1].offers != {})
        peer.send(
            frame(FrameType.DATA, b"a" * 500, operation=1), frame(FrameType.WITHDRAW, operation=1)
        )
        for number, letter in ((2, b"b"), (3, b"c")):
            peer.send(offer(number, 1000))
            pump_until(mesh, lambda n=number: n in mesh._senders[1].offers)  # type: ignore[misc]
            peer.send(frame(FrameType.DATA, letter * 1000, operation=number))
        wait_all(receives)
        assert inboxes == [b"b" * 1000, b"c" * 1000]


def test_a_half_message_meets_a_receive_of_another_size() -> None:
    """Its sizes are told at once; the rest of it is dropped and the next message is the next."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        message = frame(FrameType.EAGER, TEXT, operation=1)
        peer.send(message[:100])
        time_out(mesh)
        with pytest.raises(SizeMismatch) as caught:
            mesh.recv(bytearray(3), 1)
        assert (caught.value.expected, caught.value.got) == (3, len(TEXT))
        peer.send(message[100:], frame(FrameType.EAGER, b"next", operation=2))
        assert received(mesh, 1, 4) == b"next"
        assert kept_messages(mesh) == 0


def test_a_peer_lost_in_the_middle_of_a_message_ends_its_receive() -> None:
    """Half a message is no message, whether a receive has it or it is kept for the next."""
    for given_up in (False, True):
        with raw_peer(SMALL) as (peer, (mesh,)):
            peer.send(frame(FrameType.EAGER, b"whole", operation=1, tag=5))
            peer.send(frame(FrameType.EAGER, TEXT, operation=2)[:100])
            if given_up:
                time_out(mesh)
            receiving = Background(partial(received, mesh, 1, len(TEXT)))
            peer.close()
            with pytest.raises(PeerLost, match="its process ended"):
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


# --------------------------------------------------------------------------------------------------
# Sending: small messages within the credit, others on the go-ahead, and giving up in between.

IN_CREDIT = SMALL.credit // (200 + MESSAGE_COST)
"""How many messages of 200 bytes SMALL lets travel unasked."""

LARGE = 48 << 20
"""More than the kernel takes of a stream that nobody reads."""


def numbered(number: int, size: int = 200) -> bytes:
    """A message that tells which one it is."""
    return struct.pack("<I", number) * (size // 4)


# -- messages that nobody receives -------------------------------------------------------------


def test_small_messages_travel_at_once_within_the_credit() -> None:
    """And not one more: the next only announces itself, and nothing of it is kept."""
    with mesh_group(2, SMALL) as (left, right):
        sends = [left.post_send(numbered(index), 1) for index in range(IN_CREDIT + 5)]
        assert [send.done for send in sends] == [True] * IN_CREDIT + [False] * 5
        pump_until(right, lambda: kept_messages(right) == IN_CREDIT + 5)
        assert kept_bytes(right) == IN_CREDIT * 200
        together(
            partial(wait_all, sends),
            lambda: [received(right, 0, 200) for _ in sends],
        )
        for _ in range(3 * IN_CREDIT):  # the credit came back
            together(lambda: left.send(bytes(200), 1), lambda: right.recv(bytearray(200), 0))


def test_messages_arrive_in_order_across_the_end_of_the_credit() -> None:
    """Those that were sent and those that were offered are one queue."""
    with mesh_group(2, SMALL) as (left, right):
        sends = [left.post_send(numbered(index), 1) for index in range(50)]
        waiting = Background(partial(wait_all, sends))
        for index in range(50):
            assert received(right, 0, 200) == numbered(index)
        waiting.result()


def test_a_send_nobody_receives_holds_up_nothing_else() -> None:
    """Other tags, the other direction, other peers and barriers go on beside it."""
    with mesh_group(3, SMALL) as group:
        left, right, third = group
        stuck = [left.post_send(numbered(index, 300_000), 1) for index in range(3)]
        stuck += [left.post_send(numbered(index), 1) for index in range(30)]

        def talk(mesh: MeshBackend) -> None:
            others = [rank for rank in range(3) if rank != mesh.rank]
            for size in (12, 5_000, 200_000):
                posted = [mesh.post_send(numbered(mesh.rank, size), to, tag=1) for to in others]
                for source in others:
                    assert received(mesh, source, size, tag=1) == numbered(source, size)
                wait_all(posted)
                mesh.barrier()

        together(*[partial(talk, mesh) for mesh in group])
        assert not any(send.done for send in stuck[:3])
        assert all(send.cancel() for send in stuck[:3])
        assert kept_bytes(right) <= SMALL.credit
        assert kept_bytes(third) == 0


def test_messages_that_nobody_receives_take_bounded_memory() -> None:
    """Thousands of them: the receiver keeps its credit's worth and the offers it may have."""
    with mesh_group(2, SMALL) as (left, right):
        block = bytes(200)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            sends = [left.post_send(block, 1) for _ in range(5_000)]
            known = IN_CREDIT + MAX_OFFERS
            pump_until(right, lambda: kept_messages(right) == known)
            for _ in range(50):
                left.progress()
                right.progress()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert kept_messages(right) == known
        assert kept_bytes(right) <= SMALL.credit
        assert grown < 5_000 * 1_500  # mostly the sender's own operations
        receiving = Background(lambda: [received(right, 0, 200) for _ in sends])
        wait_all(sends)
        receiving.result()


def test_large_offers_take_no_memory_at_the_receiver() -> None:
    """A gigabyte offered is a few bytes kept."""
    with mesh_group(2) as (left, right):
        block = memoryview(bytearray(64 << 20))
        sends = [left.post_send(block, 1) for _ in range(16)]
        pump_until(right, lambda: kept_messages(right) == 16)
        assert kept_bytes(right) == 0
        assert all(send.cancel() for send in sends)
        pump_until(right, lambda: kept_messages(right) == 0)


# -- a send that gives up ----------------------------------------------------------------------


def test_a_send_that_times_out_is_withdrawn() -> None:
    """The later receive gets the next message, and the buffer is the caller's again."""
    with mesh_group(2, SMALL) as (left, right):
        data = bytearray(5_000)
        with pytest.raises(Timeout, match="rank 1 has not posted a receive") as caught:
            left.send(data, 1, timeout=0.05)
        assert (caught.value.rank, caught.value.seconds) == (1, 0.05)
        data[:] = b"\xee" * len(data)
        sending = Background(lambda: left.send(numbered(7, 5_000), 1))
        assert received(right, 0, 5_000) == numbered(7, 5_000)
        sending.result()
        assert kept_messages(right) == 0


def test_a_send_that_times_out_half_way_is_withdrawn() -> None:
    """Its receive, half filled, waits for the next message and gets that one whole."""
    with mesh_group(2) as (left, right):
        inbox_ = bytearray(LARGE)
        receive = right.post_recv_into(inbox_, 0)
        data = bytearray(b"\xaa" * LARGE)
        send = left.post_send(data, 1)
        assert isinstance(send, SendOperation)
        pump_until(right, lambda: right._senders[0].offers != {})
        pump_until(left, lambda: 0 < send.parcel.sent < LARGE)
        for _ in range(20):
            right.progress()
        assert inbox_[0] == 0xAA
        assert send.cancel()
        data[:] = b"\xbb" * LARGE  # ours again: nothing of this may arrive
        together(lambda: left.send(numbered(5, LARGE), 1), receive.wait)
        assert inbox_ == numbered(5, LARGE)


def test_a_blocking_send_that_times_out_half_way_says_so() -> None:
    """It differs from one that nobody asked for."""
    with mesh_group(2) as (left, right):
        right.post_recv_into(bytearray(LARGE), 0)
        sending = Background(lambda: left.send(bytearray(LARGE), 1, timeout=0.4))
        pump_until(right, lambda: right._senders[0].offers != {})
        with pytest.raises(Timeout, match="rank 1 receives them slowly"):
            sending.result()


def test_a_small_message_on_its_way_counts_as_sent() -> None:
    """Its bytes are in line behind others: giving up copies them, and the receiver gets them."""
    limits = MessageLimits(eager=LARGE, credit=4 * LARGE)
    with raw_peer(limits) as (peer, (mesh,)):
        data = bytearray(b"\xaa" * LARGE)
        mesh.send(data, 1, timeout=0.02)
        small = bytearray(b"\xcc" * 100)
        mesh.send(small, 1, timeout=0.02)
        data[:] = bytes(LARGE)
        small[:] = bytes(100)
        reading = Background(lambda: (peer.read_large_frame(), peer.read_frame()))
        pump_until(mesh, lambda: reading.ended)
        (_, first), (_, second) = reading.result()
        assert first.count(b"\xaa") == LARGE
        assert second == b"\xcc" * 100


def test_a_withdrawal_and_a_grant_may_cross() -> None:
    """The receiver asks for what is being withdrawn; both sides go on."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        send = mesh.post_send(bytes(5_000), 1)
        header, size = peer.read_frame()
        assert (header.kind, size) == (FrameType.OFFER, struct.pack("<Q", 5_000))
        assert send.cancel()
        for kind in (FrameType.GRANT, FrameType.DISCARD):
            peer.send(frame(kind, operation=header.operation))
        peer.send(frame(FrameType.EAGER, b"fine", operation=1))
        assert received(mesh, 1, 4) == b"fine"
        assert peer.read_frame()[0].kind == FrameType.WITHDRAW


def test_a_second_grant_changes_nothing() -> None:
    """The bytes leave once."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        send = mesh.post_send(numbered(1, 5_000), 1)
        number = peer.read_frame()[0].operation
        peer.send(
            frame(FrameType.GRANT, operation=number) * 2, frame(FrameType.DISCARD, operation=number)
        )
        send.wait()
        header, payload = peer.read_frame()
        assert (header.kind, payload) == (FrameType.DATA, numbered(1, 5_000))
        mesh.send(b"next", 1)
        assert peer.read_frame()[1] == b"next"


def test_withdrawn_offers_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send that waited for a place among the offers gets it when one is withdrawn."""
    for module in (messages, messages):
        monkeypatch.setattr(module, "MAX_OFFERS", 2)
    with mesh_group(2, SMALL) as (left, right):
        first, second, third = (left.post_send(numbered(index, 5_000), 1) for index in range(3))
        assert first.cancel()
        assert second.cancel()
        receive = Background(lambda: received(right, 0, 5_000))
        third.wait()
        assert receive.result() == numbered(2, 5_000)


def test_a_small_message_does_not_overtake_those_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could travel at once, but older ones of its key still wait for a place."""
    for module in (messages, messages):
        monkeypatch.setattr(module, "MAX_OFFERS", 1)
    with mesh_group(2, SMALL) as (left, right):
        sends = [left.post_send(numbered(index, 5_000), 1) for index in range(3)]
        sends.append(left.post_send(numbered(3), 1))
        waiting = Background(partial(wait_all, sends))
        for index in range(3):
            assert received(right, 0, 5_000) == numbered(index, 5_000)
        assert received(right, 0, 200) == numbered(3)
        waiting.result()


def test_a_send_that_was_never_offered_can_be_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer hears nothing of it."""
    for module in (messages, messages):
        monkeypatch.setattr(module, "MAX_OFFERS", 1)
    with mesh_group(2, SMALL) as (left, right):
        sends = [left.post_send(numbered(index, 5_000), 1) for index in range(3)]
        assert sends[1].cancel()
        receive = Background(lambda: [received(right, 0, 5_000) for _ in range(2)])
        wait_all([sends[0], sends[2]])
        assert receive.result() == [numbered(0, 5_000), numbered(2, 5_000)]


def test_cancelling_what_is_done_is_too_late() -> None:
    """An eager message that has left, and a large one that was received."""
    with mesh_group(2, SMALL) as (left, right):
        small = left.post_send(b"gone", 1)
        assert not small.cancel()
        large = left.post_send(bytes(5_000), 1)
        together(lambda: (received(right, 0, 4), received(right, 0, 5_000)), large.wait)
        assert not large.cancel()


def test_a_lost_peer_ends_every_send() -> None:
    """Offered, waiting for a place, granted or half gone: all end, and so does the next one."""
    with memory_group(2, SMALL, capacity=50_000) as (left, right):
        receive = right.post_recv_into(bytearray(300_000), 0)
        granted = left.post_send(bytes(300_000), 1)
        right.progress()
        left.progress()
        offered = left.post_send(bytes(5_000), 1)
        right._links[0].stream.close()
        for operation in (granted, offered, left.post_send(b"1", 1)):
            with pytest.raises(PeerLost, match="its process ended"):
                operation.wait()
        with pytest.raises(PeerLost):
            receive.wait()
