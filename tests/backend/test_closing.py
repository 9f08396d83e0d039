"""Endings: closing and losing wake whoever waits, keep what was sent, and leave nothing behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from potluck import BackendUnavailable, ChannelClosed, Disconnected, PeerLost, Timeout
from potluck.backend import mesh as mesh_module
from potluck.backend.limits import Limits
from potluck.backend.mesh import MeshBackend
from potluck.backend.reader import FrameReader
from potluck.net.frames import Kind
from support.meshes import (
    SMALL,
    frame,
    kept_messages,
    mesh_group,
    pump_until,
    raw_peer,
    received,
    wait_all,
)
from support.threads import Background, eventually, interrupted_when, signalled_when, together

BIG = 300_000


def open_descriptors() -> set[str]:
    """What this process has open."""
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("ending", ["close", "vanish"])
def test_everybody_who_waits_for_a_rank_is_woken(ending: str) -> None:
    """Receives, sends nobody asked for, half-sent ones and barriers, on several threads."""
    with mesh_group(3, SMALL) as (left, right, third):
        right.post_recv_into(bytearray(BIG), 0, tag=5)
        waits = [
            Background(lambda: left.recv(bytearray(5), 1)),
            Background(lambda: left.recv(bytearray(5), 1, tag=9)),
            Background(lambda: left.send(bytes(BIG), 1)),
            Background(left.barrier),
            Background(lambda: third.recv(bytearray(5), 1)),
            Background(lambda: third.send(bytes(BIG), 1)),
        ]
        pump_until(right, lambda: kept_messages(right) == 2)
        if ending == "close":
            right.close()
        else:
            for link in right._links.values():
                link.stream.close()
        for one in waits:
            with pytest.raises(PeerLost) as caught:
                one.result()
            assert caught.value.rank == 1
            assert ("closed its backend" in str(caught.value)) == (ending == "close")
            assert caught.value.recoverable
        together(lambda: left.send(bytes(BIG), 2), lambda: third.recv(bytearray(BIG), 0))


def test_what_was_sent_before_closing_arrives() -> None:
    """Everything that send() accepted, small and large, in order; then the loss is told."""
    with mesh_group(2) as (left, right):
        receives = [right.post_recv_into(bytearray(4 << 20), 0, tag=1) for _ in range(2)]

        def send() -> None:
            for number in range(3):
                left.send(bytes([number]) * BIG, 1)
            for number in range(2):
                left.send(bytes([number]) * (4 << 20), 1, tag=1)
            left.close()

        sending = Background(send)
        wait_all(receives)
        sending.result()
        for number in range(3):
            assert received(right, 0, BIG) == bytes([number]) * BIG
        with pytest.raises(PeerLost, match="closed its backend"):
            right.recv(bytearray(BIG), 0)
        with pytest.raises(PeerLost, match="closed its backend"):
            right.send(b"1", 0)


def test_small_messages_still_in_line_are_flushed() -> None:
    """Posted, not waited for, more than the kernel takes at once: closing lets them leave."""
    limits = Limits(eager=1 << 20, credit=64 << 20)
    with mesh_group(2, limits) as (left, right):
        sends = [left.post_send(bytes([number]) * (1 << 20), 1) for number in range(20)]
        assert not all(send.done for send in sends)
        closing = Background(left.close)
        for number in range(20):
            assert received(right, 0, 1 << 20) == bytes([number]) * (1 << 20)
        closing.result()
        wait_all(sends)


def test_closing_does_not_wait_for_a_peer_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lingers for a moment and leaves; what could not leave has failed, and says why."""
    monkeypatch.setattr(mesh_module, "LINGER", 0.2)
    with raw_peer(Limits(eager=64 << 20, credit=64 << 20)) as (_, (mesh,)):
        stuck = mesh.post_send(bytearray(32 << 20), 1)
        offered = mesh.post_send(bytearray(65 << 20), 1)
        started = time.monotonic()
        mesh.close()
        assert time.monotonic() - started < 5
        for operation in (stuck, offered):
            with pytest.raises(ChannelClosed):
                operation.wait()


def test_closing_ends_own_operations() -> None:
    """Whatever was posted and whoever waits, on this side, ends with the same words."""
    with mesh_group(2, SMALL) as (left, right):
        posted = [
            left.post_recv_into(bytearray(100), 1),
            left.post_recv_into(bytearray(5), 1, tag=4),
            left.post_recv_into(bytearray(5), 0, tag=4),
            left.post_send(bytes(BIG), 1),
            left.post_send(bytes(2 * SMALL.courtesy), 0),
            left.post_barrier(),
        ]
        waiting = [Background(operation.wait) for operation in posted]
        half = frame(Kind.EAGER, bytes(100), operation=1)
        right._links[0].stream.sendmsg([half[:80]])
        left.close()
        for one in waiting:
            with pytest.raises(ChannelClosed, match="Rank 0 has closed this backend"):
                one.result()
        assert all(operation.done for operation in posted)


def test_closing_is_safe_from_many_threads() -> None:
    """Several close at once while others send, receive and meet; all of them end."""
    for _ in range(5):
        with mesh_group(2, SMALL) as group:

            def talk(me: MeshBackend) -> None:
                peer = 1 - me.rank
                with contextlib.suppress(Disconnected):
                    while True:
                        me.send(bytes(500), peer, tag=threading.get_ident() % 2)
                        me.recv(bytearray(500), peer, tag=threading.get_ident() % 2, timeout=0.01)

            def meet(me: MeshBackend) -> None:
                with contextlib.suppress(Disconnected):
                    while True:
                        me.barrier()

            def patiently(action: partial[None]) -> None:
                with contextlib.suppress(Timeout):
                    action()

            busy = [
                Background(partial(patiently, partial(action, me)))
                for me in group
                for action in (talk, talk, meet)
            ]
            together(*[me.close for me in group for _ in range(3)])
            for one in busy:
                one.result()


def test_leaving_the_block_closes_even_after_an_error() -> None:
    """The peer is told at once, not when the process ends."""
    with mesh_group(2) as (left, right):
        waiting = Background(lambda: right.recv(bytearray(1), 0))
        with pytest.raises(ZeroDivisionError), left:
            raise ZeroDivisionError
        with pytest.raises(PeerLost, match="closed its backend"):
            waiting.result()


def test_a_closed_group_leaves_no_descriptor() -> None:
    """Sockets, pollers and wake-up pipes are all returned, also those of lost peers."""
    before = open_descriptors()
    with mesh_group(4) as group:
        together(*[mesh.barrier for mesh in group])
        assert len(open_descriptors()) > len(before)
        group[3].close()
        for mesh in group[:3]:
            with pytest.raises(PeerLost):
                mesh.recv(bytearray(1), 3)
    assert open_descriptors() <= before


def test_a_goodbye_in_the_middle_of_a_message_loses_that_message_only() -> None:
    """What was whole stays; the half one is the loss that the receive reports."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        peer.send(frame(Kind.EAGER, b"whole", operation=1))
        receive = mesh.post_recv_into(bytearray(BIG), 1, tag=3)
        peer.send(frame(Kind.OFFER, BIG.to_bytes(8, "little"), operation=2, tag=3))
        pump_until(mesh, lambda: mesh._senders[1].offers != {})
        peer.send(frame(Kind.DATA, bytes(1000), operation=2, tag=3), frame(Kind.GOODBYE))
        with pytest.raises(PeerLost, match="closed its backend"):
            receive.wait()
        assert received(mesh, 1, 5) == b"whole"


def test_what_was_only_offered_is_lost_with_its_sender() -> None:
    """A receive that comes afterwards fails at once, instead of asking a dead peer for it."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        peer.send(frame(Kind.OFFER, BIG.to_bytes(8, "little"), operation=1))
        peer.send(frame(Kind.EAGER, bytes(100), operation=2, tag=1)[:80])
        pump_until(mesh, lambda: kept_messages(mesh) == 2)
        peer.close()
        for size, tag in ((BIG, 0), (100, 1)):
            with pytest.raises(PeerLost):
                mesh.recv(bytearray(size), 1, tag=tag, timeout=20)
        assert kept_messages(mesh) == 0


def test_an_interrupted_receive_leaves_the_next_one_intact() -> None:
    """Ctrl-C in a blocking call: its buffer is free, and the message goes to the next receive."""
    with mesh_group(2, SMALL) as (left, right):
        awaited = right._inbox._mailbox.awaited_keys
        for pumped_by_another in (False, True):
            other = Background(lambda: right.recv(bytearray(3), 0, tag=9))
            if pumped_by_another:
                eventually(right._turns._turn.locked)
            else:
                left.send(b"end", 1, tag=9)
                other.result()
            inbox = bytearray(5)
            with interrupted_when(lambda: (0, 0, 0) in awaited()), pytest.raises(KeyboardInterrupt):
                right.recv(inbox, 0)
            left.send(b"after", 1)
            assert received(right, 0, 5) == b"after"
            assert inbox == bytes(5)
            if pumped_by_another:
                left.send(b"end", 1, tag=9)
                other.result()


def test_an_interrupt_in_the_middle_of_a_read_costs_that_link_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody knows how far it got: the link is lost, in words; all others go on."""
    with mesh_group(3, SMALL) as (left, right, third):
        reader = left._links[1].reader

        def read() -> None:
            FrameReader.read(reader)
            raise KeyboardInterrupt

        monkeypatch.setattr(reader, "read", read)
        right.send(b"12345", 0)
        with pytest.raises(KeyboardInterrupt):
            left.recv(bytearray(99), 2)
        with pytest.raises(PeerLost, match="this side was interrupted") as caught:
            left.recv(bytearray(5), 1, tag=1)
        assert caught.value.rank == 1
        third.send(b"fine", 0)
        assert received(left, 2, 4) == b"fine"


def test_several_threads_may_close_at_once() -> None:
    """While something is still on its way out: all of them return when it is over."""
    with mesh_group(2) as (left, right):
        right.post_recv_into(bytearray(64 << 20), 0)
        sending = left.post_send(bytes(64 << 20), 1)
        right.progress(1)
        left.progress(1)
        assert not left._links[1].writer.is_idle
        together(*[left.close] * 4)
        with pytest.raises(ChannelClosed):
            sending.wait()


@pytest.mark.parametrize("use", [MeshBackend.close, lambda mesh: mesh.recv(bytearray(1), 1)])
def test_a_signal_handler_that_uses_the_group_gets_an_error(
    use: Callable[[MeshBackend], None],
) -> None:
    """The call it interrupted would have to return first: it ends with the error instead."""
    with (
        mesh_group(2) as (left, _),
        signalled_when(left._turns._turn.locked, lambda: use(left)),
        pytest.raises(BackendUnavailable, match="signal handler"),
    ):
        left.recv(bytearray(1), 1, timeout=20)
