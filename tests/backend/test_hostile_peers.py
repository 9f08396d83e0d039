"""A peer that does not keep to the protocol loses its link, and nobody else loses anything."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck import PeerLost, SubBackend, Timeout
from potluck.backend import gates
from potluck.backend.limits import MAX_OFFERS, MESSAGE_COST
from potluck.backend.mesh import MeshBackend
from potluck.net.frames import MAX_PIECE, Kind, encode
from support.meshes import (
    SMALL,
    RawPeer,
    frame,
    kept_bytes,
    mesh_group,
    pump_until,
    raw_peer,
    received,
)
from support.threads import Background, together

BIG = 5_000


def size_of(size: int) -> bytes:
    """The payload of an offer."""
    return struct.pack("<Q", size)


@contextlib.contextmanager
def victim() -> Iterator[tuple[RawPeer, MeshBackend, MeshBackend]]:
    """Rank 0 waits for many things at once; rank 1 is hostile, rank 2 is honest."""
    with raw_peer(SMALL, honest=1) as (peer, (mesh, honest)):
        yield peer, mesh, honest


def assert_honest_is_undisturbed(mesh: MeshBackend, honest: MeshBackend) -> None:
    """Messages of both kinds and a barrier of the two work."""

    def talk(me: MeshBackend, other: int, outgoing: int, incoming: int) -> None:
        me.send(bytes(outgoing), other)
        me.recv(bytearray(incoming), other)
        SubBackend(me, [0, 2]).barrier()

    together(partial(talk, mesh, 2, BIG, 9), partial(talk, honest, 0, 9, BIG))


ATTACKS = {
    "data without an offer": frame(Kind.DATA, b"12345", operation=1),
    "data before the grant": frame(Kind.OFFER, size_of(BIG), operation=1)
    + frame(Kind.DATA, b"12345", operation=1),
    "empty data": frame(Kind.DATA, operation=1),
    "an offer without a size": frame(Kind.OFFER, operation=1),
    "an offer with a strange size": frame(Kind.OFFER, b"123", operation=1),
    "the same offer twice": frame(Kind.OFFER, size_of(BIG), operation=1) * 2,
    "too many offers": b"".join(
        frame(Kind.OFFER, size_of(BIG), operation=number) for number in range(MAX_OFFERS + 1)
    ),
    "more than the credit": frame(Kind.EAGER, bytes(200)) * (SMALL.credit // 456 + 1),
    "more empty messages than the credit": frame(Kind.EAGER) * (SMALL.credit // MESSAGE_COST + 1),
    "an eager message that is too large": encode(Kind.EAGER, length=SMALL.eager + 1),
    "a piece that is too large": encode(Kind.DATA, length=MAX_PIECE + 1),
    "credit that nobody owed": frame(Kind.CREDIT, operation=1),
    "absurd credit": frame(Kind.CREDIT, operation=(1 << 64) - 1),
    "a token of an absurd round": frame(Kind.TOKEN, operation=1, piece=gates.MAX_ROUNDS),
    "a token with a payload": frame(Kind.TOKEN, b"1", operation=1),
    "a barrier broken by nobody": frame(Kind.BROKEN, operation=1, piece=1 << 31),
    "a goodbye at length": frame(Kind.GOODBYE, b"farewell"),
    "a grant with a payload": frame(Kind.GRANT, b"1", operation=1),
    "a withdrawal with a payload": frame(Kind.WITHDRAW, b"1", operation=1),
    "a late hello": frame(Kind.HELLO, b"hello"),
    "a late empty hello": frame(Kind.HELLO),
    "a late welcome": frame(Kind.WELCOME),
    "a late refusal": frame(Kind.REFUSAL, b"no"),
    "no frame at all": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" + bytes(40),
    "another version": frame(Kind.GRANT).replace(b"PL\x01", b"PL\x02"),
    "an unknown kind": frame(Kind.GRANT)[:3] + b"\xff" + frame(Kind.GRANT)[4:],
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_who_breaks_the_protocol_is_lost_with_the_reason(attack: bytes) -> None:
    """Whoever waits for it learns who and why; what waits for others is not touched."""
    with victim() as (peer, mesh, honest):
        receive = mesh.post_recv_into(bytearray(7), 1, tag=77)
        send = mesh.post_send(bytes(BIG), 1)
        other = mesh.post_recv_into(bytearray(9), 2, tag=77)
        barrier = mesh.post_barrier()
        peer.send(attack)
        for operation in (receive, send, barrier):
            with pytest.raises(PeerLost, match="it sent what is no valid frame") as caught:
                operation.wait(20)
            assert caught.value.rank == 1
        assert not other.done
        assert kept_bytes(mesh) <= SMALL.credit
        honest.send(bytes(9), 0, tag=77)
        other.wait(20)
        assert_honest_is_undisturbed(mesh, honest)


def test_more_than_was_offered_is_refused() -> None:
    """The bytes beyond the end of a buffer are never written."""
    with victim() as (peer, mesh, honest):
        whole = bytearray(BIG + 100)
        receive = mesh.post_recv_into(memoryview(whole)[:BIG], 1)
        peer.send(frame(Kind.OFFER, size_of(BIG), operation=1))
        pump_until(mesh, lambda: mesh._senders[1].offers != {})
        peer.send(frame(Kind.DATA, b"\xff" * (BIG - 1), operation=1))
        peer.send(frame(Kind.DATA, b"\xff" * 2, operation=1))
        with pytest.raises(PeerLost, match="more than it had offered"):
            receive.wait(20)
        assert whole[BIG:] == bytes(100)
        assert_honest_is_undisturbed(mesh, honest)


def test_an_offer_of_absurd_size_takes_no_memory() -> None:
    """It waits, is refused for its size by a receive, and nothing is ever allocated for it."""
    with victim() as (peer, mesh, honest):
        peer.send(frame(Kind.OFFER, size_of((1 << 64) - 1), operation=1))
        with pytest.raises(Timeout):
            mesh.send(bytes(BIG), 1, timeout=0.2)  # waiting long enough to be courteous
        assert kept_bytes(mesh) == 0
        with pytest.raises(ValueError, match=f"{(1 << 64) - 1} bytes"):
            mesh.recv(bytearray(10), 1)
        assert_honest_is_undisturbed(mesh, honest)


@pytest.mark.parametrize("rank", [0, 2, 99])
def test_a_false_alarm_about_a_barrier_is_only_about_the_barrier(rank: int) -> None:
    """A peer may lie that somebody is lost; no other operation fails, and no other error comes."""
    with victim() as (peer, mesh, honest):
        other = mesh.post_recv_into(bytearray(9), 2)
        barrier = mesh.post_barrier()
        peer.send(frame(Kind.BROKEN, operation=1, piece=rank))
        with pytest.raises(PeerLost):
            barrier.wait(20)
        assert not other.done
        honest.send(bytes(9), 0)
        other.wait(20)


def test_a_peer_cannot_use_up_the_groups_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names one group after the other; it is cut off, and the others still have theirs."""
    monkeypatch.setattr(gates, "MAX_GROUPS", 100)
    with victim() as (peer, mesh, honest):
        receive = mesh.post_recv_into(bytearray(1), 1)
        for group in range(1, 102):
            peer.send(frame(Kind.TOKEN, group=group, operation=1))
        with pytest.raises(PeerLost, match="groups"):
            receive.wait(20)
        assert_honest_is_undisturbed(mesh, honest)


def test_groups_that_we_have_too_are_no_burden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long job makes many subgroups, and the same rank is always first: nobody is cut off."""
    monkeypatch.setattr(gates, "MAX_GROUPS", 3)
    with mesh_group(2) as (left, right):
        for group in range(1, 20):
            first = left.post_barrier(group=group)
            pump_until(right, lambda group=group: group in right._gates._gates)  # type: ignore[misc]
            right.post_barrier(group=group).wait(20)
            first.wait(20)


def test_silence_in_the_middle_of_a_frame_disturbs_nobody() -> None:
    """A peer that stops half-way only keeps those waiting who wait for it."""
    for fragment in (b"P", encode(Kind.EAGER, length=100), frame(Kind.EAGER, bytes(100))[:-1]):
        with victim() as (peer, mesh, honest):
            peer.send(fragment)
            waiting = Background(partial(received, mesh, 1, 100))
            assert_honest_is_undisturbed(mesh, honest)
            assert not waiting.ended
            peer.close()
            with pytest.raises(PeerLost):
                waiting.result()


def loss_of(mesh: MeshBackend, rank: int) -> PeerLost:
    """The error for a lost peer; what it sent whole before may still be received first."""
    while True:
        try:
            mesh.recv(bytearray(100), rank, tag=2)
        except PeerLost as error:
            return error
        except ValueError:
            continue  # of another size


# -- any sequence of legal headers -------------------------------------------------------------

numbers = st.one_of(st.integers(0, 6), st.sampled_from([255, (1 << 32) - 1]))
payloads = st.one_of(
    st.just(b""),
    st.integers(0, 400).map(bytes),
    st.sampled_from([0, 1, 100, 300, BIG, 1 << 40]).map(size_of),
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A frame that the decoder accepts, whatever it means."""
    return frame(
        draw(st.sampled_from(Kind)),
        draw(payloads),
        group=draw(st.sampled_from([0, 1, (1 << 64) - 1])),
        epoch=draw(st.sampled_from([0, 1])),
        tag=draw(st.integers(0, 2)),
        operation=draw(st.one_of(numbers, st.just((1 << 64) - 1))),
        piece=draw(numbers),
    )


@settings(max_examples=40)
@given(st.lists(frames(), max_size=25), st.binary(max_size=50))
@example([frame(Kind.BROKEN, piece=2)], b"")  # says that the honest one is lost
@example([frame(Kind.BROKEN, operation=1, piece=0)], b"")
@example([frame(Kind.OFFER, size_of(100), operation=1), frame(Kind.WITHDRAW, operation=1)], b"")
def test_no_sequence_of_frames_disturbs_anybody_else(sequence: list[bytes], end: bytes) -> None:
    """Neither a hang, nor a foreign error, nor unbounded memory; then the peer hangs up."""
    with victim() as (peer, mesh, honest):
        operations = [
            *[mesh.post_recv_into(bytearray(100), 1, tag=tag) for tag in (0, 0, 1)],
            *[mesh.post_send(bytes(size), 1) for size in (10, 300, BIG)],
            mesh.post_barrier(),
        ]
        with contextlib.suppress(OSError):  # it may have been cut off already
            for part in sequence:
                peer.send(part)
                mesh.progress()
            peer.send(end)
        assert kept_bytes(mesh) <= SMALL.credit + SMALL.courtesy
        assert_honest_is_undisturbed(mesh, honest)
        peer.close()
        for operation in operations:
            with contextlib.suppress(PeerLost, ValueError):  # ValueError: of another size
                operation.wait(20)
        assert loss_of(mesh, 1).rank == 1
        assert_honest_is_undisturbed(mesh, honest)
