"""Sending: small messages within the credit, others on the go-ahead, and giving up in between."""

from __future__ import annotations

import struct
import tracemalloc
from functools import partial

import pytest

from potluck import PeerLost, Timeout
from potluck.backend import inbox, outbox
from potluck.backend.limits import MAX_OFFERS, MESSAGE_COST, Limits
from potluck.backend.mesh import MeshBackend
from potluck.backend.outbox import Send
from potluck.net.frames import Kind
from support.meshes import (
    SMALL,
    frame,
    kept_bytes,
    kept_messages,
    memory_group,
    mesh_group,
    pump_until,
    raw_peer,
    received,
    wait_all,
)
from support.threads import Background, together

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
        with pytest.raises(Timeout, match="rank 1 has not asked for them") as caught:
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
        assert isinstance(send, Send)
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
        with pytest.raises(Timeout, match="rank 1 takes them in slowly"):
            sending.result()


def test_a_small_message_on_its_way_counts_as_sent() -> None:
    """Its bytes are in line behind others: giving up copies them, and the receiver gets them."""
    limits = Limits(eager=LARGE, credit=4 * LARGE)
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
        assert (header.kind, size) == (Kind.OFFER, struct.pack("<Q", 5_000))
        assert send.cancel()
        for kind in (Kind.GRANT, Kind.DISCARD):
            peer.send(frame(kind, operation=header.operation))
        peer.send(frame(Kind.EAGER, b"fine", operation=1))
        assert received(mesh, 1, 4) == b"fine"
        assert peer.read_frame()[0].kind == Kind.WITHDRAW


def test_a_second_grant_changes_nothing() -> None:
    """The bytes leave once."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        send = mesh.post_send(numbered(1, 5_000), 1)
        number = peer.read_frame()[0].operation
        peer.send(frame(Kind.GRANT, operation=number) * 2, frame(Kind.DISCARD, operation=number))
        send.wait()
        header, payload = peer.read_frame()
        assert (header.kind, payload) == (Kind.DATA, numbered(1, 5_000))
        mesh.send(b"next", 1)
        assert peer.read_frame()[1] == b"next"


def test_withdrawn_offers_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send that waited for a place among the offers gets it when one is withdrawn."""
    for module in (inbox, outbox):
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
    for module in (inbox, outbox):
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
    for module in (inbox, outbox):
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
            with pytest.raises(PeerLost, match="ended without closing"):
                operation.wait()
        with pytest.raises(PeerLost):
            receive.wait()
