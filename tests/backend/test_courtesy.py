"""The courtesy buffer: ranks that all send before they receive still get on, in bounded memory."""

from __future__ import annotations

import struct
from functools import partial

import pytest

from potluck import Timeout
from potluck.backend.limits import MESSAGE_COST, Limits
from potluck.backend.mesh import MeshBackend
from potluck.net.frames import Kind
from support.meshes import (
    SMALL,
    frame,
    kept_bytes,
    kept_messages,
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
        assert [mesh._inbox._courtesy_left for mesh in group] == [Limits().courtesy] * 2


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
    limits = Limits(eager=0, credit=0, courtesy=2 * SIZE)
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
    limits = Limits(eager=0, credit=0, courtesy=room * MESSAGE_COST)
    with raw_peer(limits) as (peer, (mesh,)):
        peer.send(
            *[frame(Kind.OFFER, struct.pack("<Q", 0), operation=number) for number in range(1, 100)]
        )
        with pytest.raises(Timeout):
            mesh.send(b"nobody asks", 1, timeout=0.3)
        peer.send(frame(Kind.GOODBYE))
        kinds = [peer.read_frame()[0].kind for _ in range(room + 2)]
        assert kinds == [Kind.OFFER, *[Kind.GRANT] * room, Kind.WITHDRAW]


def test_the_budget_comes_back_when_a_message_does_not() -> None:
    """Its sender withdraws it, or is lost, after we had made room for it."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        for ending in (frame(Kind.WITHDRAW, operation=1), frame(Kind.GOODBYE)):
            peer.send(frame(Kind.OFFER, struct.pack("<Q", SIZE), operation=1))
            with pytest.raises(Timeout):
                mesh.send(marked(0), 1, timeout=0.3)
            assert mesh._inbox._courtesy_left < SMALL.courtesy
            peer.send(frame(Kind.DATA, marked(1, size=1000), operation=1), ending)
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
    limits = Limits(courtesy=SIZE)
    with mesh_group(2, limits) as (me, _):
        me.send(marked(1), 0)
        with pytest.raises(Timeout, match="rank 0 has not asked"):
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
    with mesh_group(2, Limits(courtesy=0)) as (me, _):
        sending = Background(lambda: me.send(marked(1), 0))
        eventually(lambda: kept_messages(me) == 1)
        assert received(me, 0, SIZE) == marked(1)
        sending.result()
