"""Aborting a mesh: everything ends at once, with the error given, for good."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck import (
    BackendUnavailable,
    Disconnected,
    InvalidRank,
    NoConnection,
    SimulatedBackend,
    SizeMismatch,
    SubBackend,
    Timeout,
)
from potluck import ChannelClosed as potluck_ChannelClosed
from potluck import DistributedError as potluck_DistributedError
from potluck import PeerLost as potluck_PeerLost
from potluck.backend import mesh as mesh_module
from potluck.backend.framing import FrameReader
from potluck.backend.mesh import MeshBackend, peer_lost
from potluck.backend.messages import MAX_OFFERS, MESSAGE_COST, MessageLimits
from potluck.backend.operation import Operation
from potluck.errors import Aborted, ChannelClosed, DistributedError, PeerLost
from potluck.net.frames import MAX_PIECE, FrameType, encode
from potluck.net.records import PeerEnded
from potluck.net.tcp import SelectorPoller, make_poller
from potluck.net.transport import Poller
from support.meshes import (
    SMALL,
    RawPeer,
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
from support.threads import (
    PATIENCE,
    Background,
    eventually,
    interrupted_when,
    signalled_when,
    together,
)

OVER = Aborted("the view is over")


def post_everything(backend: SimulatedBackend) -> list[Operation]:
    """Operations that do not end by themselves."""
    return [
        backend.post_recv_into(bytearray(4), 1),
        backend.post_recv_into(bytearray(4), backend.rank),
        backend.post_barrier(),
    ]


def test_all_operations_end_with_the_error_given() -> None:
    """Those that somebody waits for, those that nobody does, and later ones."""
    with SimulatedBackend.create_group(3)[0] as backend:
        posted = post_everything(backend)
        waiting = [Background(partial(one.wait, PATIENCE)) for one in posted[:2]]
        backend.abort(OVER)
        for one in waiting:
            with pytest.raises(Aborted, match="the view is over"):
                one.result()
        for operation in posted:
            assert operation.done
            assert isinstance(operation.error, Aborted)
        laters: list[Callable[[], None]] = [
            partial(backend.send, b"more", 1),
            partial(backend.recv, bytearray(4), 1),
            backend.barrier,
            backend.progress,
        ]
        for later in laters:
            with pytest.raises(Aborted, match="the view is over"):
                later()
        assert isinstance(backend.loss_of(1), Aborted)


def test_the_peers_see_a_rank_that_has_closed() -> None:
    """They are not told that it crashed; what it said before still arrives."""
    left, right = SimulatedBackend.create_group(2)
    with left, right:
        left.send(b"last", 1)
        left.abort(OVER)
        inbox = bytearray(4)
        right.recv(inbox, 0)
        assert inbox == b"last"
        with pytest.raises(PeerLost, match="it closed its backend"):
            right.recv(inbox, 0, timeout=PATIENCE)


def test_the_first_ending_counts() -> None:
    """Whether that is an abort or a close, and however many threads try."""
    left, right = SimulatedBackend.create_group(2)
    errors = [Aborted(f"reason {number}") for number in range(8)]
    together(*(lambda error=error: left.abort(error) for error in errors))
    with pytest.raises(Aborted, match="reason ") as caught:
        left.barrier()
    first = str(caught.value)
    left.close()
    left.abort(OVER)
    with pytest.raises(Aborted, match=first):
        left.barrier()
    right.close()
    right.abort(OVER)
    with pytest.raises(ChannelClosed, match="has closed"):
        right.barrier()


def test_abort_and_close_at_once_leave_nobody_waiting() -> None:
    """Whichever is first, all who wait are woken."""
    for _ in range(20):
        left, right = SimulatedBackend.create_group(2)
        waiting = Background(partial(left.recv, bytearray(4), 1))
        gate = threading.Barrier(2)

        def abort(left: SimulatedBackend = left, gate: threading.Barrier = gate) -> None:
            gate.wait(PATIENCE)
            left.abort(OVER)

        def close(left: SimulatedBackend = left, gate: threading.Barrier = gate) -> None:
            gate.wait(PATIENCE)
            left.close()

        eventually(left._turns._turn.locked)
        together(abort, close)
        with pytest.raises(DistributedError):
            waiting.result()
        right.close()


# --------------------------------------------------------------------------------------------------
# Endings: closing and losing wake whoever waits, keep what was sent, and leave nothing behind.

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
            with pytest.raises(potluck_PeerLost) as caught:
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
        with pytest.raises(potluck_PeerLost, match="closed its backend"):
            right.recv(bytearray(BIG), 0)
        with pytest.raises(potluck_PeerLost, match="closed its backend"):
            right.send(b"1", 0)


def test_small_messages_still_in_line_are_flushed() -> None:
    """Posted, not waited for, more than the kernel takes at once: closing lets them leave."""
    limits = MessageLimits(eager=1 << 20, credit=64 << 20)
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
    with raw_peer(MessageLimits(eager=64 << 20, credit=64 << 20)) as (_, (mesh,)):
        stuck = mesh.post_send(bytearray(32 << 20), 1)
        offered = mesh.post_send(bytearray(65 << 20), 1)
        started = time.monotonic()
        mesh.close()
        assert time.monotonic() - started < 5
        for operation in (stuck, offered):
            with pytest.raises(potluck_ChannelClosed):
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
        half = frame(FrameType.EAGER, bytes(100), operation=1)
        right._links[0].stream.sendmsg([half[:80]])
        left.close()
        for one in waiting:
            with pytest.raises(potluck_ChannelClosed, match="Rank 0 has closed this backend"):
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
        with pytest.raises(potluck_PeerLost, match="closed its backend"):
            waiting.result()


def test_a_closed_group_leaves_no_descriptor() -> None:
    """Sockets, pollers and wake-up pipes are all returned, also those of lost peers."""
    before = open_descriptors()
    with mesh_group(4) as group:
        together(*[mesh.barrier for mesh in group])
        assert len(open_descriptors()) > len(before)
        group[3].close()
        for mesh in group[:3]:
            with pytest.raises(potluck_PeerLost):
                mesh.recv(bytearray(1), 3)
    assert open_descriptors() <= before


def test_a_goodbye_in_the_middle_of_a_message_loses_that_message_only() -> None:
    """What was whole stays; the half one is the loss that the receive reports."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        peer.send(frame(FrameType.EAGER, b"whole", operation=1))
        receive = mesh.post_recv_into(bytearray(BIG), 1, tag=3)
        peer.send(frame(FrameType.OFFER, BIG.to_bytes(8, "little"), operation=2, tag=3))
        pump_until(mesh, lambda: mesh._senders[1].offers != {})
        peer.send(frame(FrameType.DATA, bytes(1000), operation=2, tag=3), frame(FrameType.GOODBYE))
        with pytest.raises(potluck_PeerLost, match="closed its backend"):
            receive.wait()
        assert received(mesh, 1, 5) == b"whole"


def test_what_was_only_offered_is_lost_with_its_sender() -> None:
    """A receive that comes afterwards fails at once, instead of asking a dead peer for it."""
    with raw_peer(SMALL) as (peer, (mesh,)):
        peer.send(frame(FrameType.OFFER, BIG.to_bytes(8, "little"), operation=1))
        peer.send(frame(FrameType.EAGER, bytes(100), operation=2, tag=1)[:80])
        pump_until(mesh, lambda: kept_messages(mesh) == 2)
        peer.close()
        for size, tag in ((BIG, 0), (100, 1)):
            with pytest.raises(potluck_PeerLost):
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
        with pytest.raises(potluck_PeerLost, match="this side was interrupted") as caught:
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
        with pytest.raises(potluck_ChannelClosed):
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


# --------------------------------------------------------------------------------------------------
# Barriers over the mesh: nobody leaves early, the absent are named, all stay in step.


def all_pass(group: list[MeshBackend], laps: int = 3) -> None:
    """Everybody passes a few barriers in step."""
    arrived = dict.fromkeys(range(len(group)), 0)

    def visit(mesh: MeshBackend) -> None:
        for lap in range(1, laps + 1):
            arrived[mesh.rank] = lap
            mesh.barrier(timeout=20)
            assert min(arrived.values()) >= lap

    together(*[partial(visit, mesh) for mesh in group])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_nobody_leaves_before_all_have_arrived(size: int) -> None:
    """Over real sockets, lap after lap."""
    with mesh_group(size) as group:
        all_pass(group, laps=20)


@pytest.mark.parametrize(("size", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (9, 4)])
def test_a_barrier_is_logarithmic(size: int, rounds: int) -> None:
    """Each rank sends one token for each doubling, not one for each rank."""
    tokens: Counter[int] = Counter()
    with memory_group(size) as group:
        for mesh in group:

            def count(*facts: int, rank: int = mesh.rank, tell: object = mesh._gates._tell) -> None:
                tokens[rank] += facts[1] == FrameType.TOKEN
                assert callable(tell)
                tell(*facts)

            mesh._gates._tell = count
        all_pass(group, laps=1)
    assert tokens == Counter(dict.fromkeys(range(size), rounds))


def test_a_barrier_that_times_out_names_who_did_not_come() -> None:
    """Not those who wait as well, although no token came from some of them."""
    with mesh_group(5) as group:
        waiting = [Background(group[rank].barrier) for rank in (1, 3)]
        arrival = group[0].post_barrier()
        pump_until(group[0], lambda: group[0]._gates.missing(0) == [2, 4])
        with pytest.raises(Timeout, match="ranks 2, 4 have not arrived") as caught:
            arrival.wait(0.01)
        assert (caught.value.missing, caught.value.seconds) == ((2, 4), 0.01)
        together(arrival.wait, group[2].barrier, group[4].barrier)
        for one in waiting:
            one.result()


def test_a_single_absent_rank_is_the_errors_rank() -> None:
    """It is then also the one to look at."""
    with mesh_group(3) as group:
        waiting = Background(group[2].barrier)
        arrival = group[0].post_barrier()
        pump_until(group[0], lambda: group[0]._gates.missing(0) == [1])
        with pytest.raises(Timeout, match="rank 1 has not arrived") as caught:
            arrival.wait(0)
        assert caught.value.rank == 1
        together(arrival.wait, group[1].barrier)
        waiting.result()


def test_a_blocking_barrier_announces_itself_before_it_gives_up() -> None:
    """Also one with little time tells the others that it was there."""
    with mesh_group(4) as group:
        with pytest.raises(Timeout):
            group[0].barrier(timeout=0.4)  # its one token goes to rank 1
        arrival = group[3].post_barrier()
        pump_until(group[3], lambda: group[3]._gates.missing(0) == [1, 2])
        assert arrival.cancel()


def test_a_barrier_that_timed_out_goes_on_where_it_stopped() -> None:
    """Called again, it is the same barrier: afterwards everybody is in step."""
    with mesh_group(4) as group:
        for mesh in group[:3]:
            with pytest.raises(Timeout):
                mesh.barrier(timeout=0.02)
        with pytest.raises(Timeout):
            group[0].barrier(timeout=0.02)
        all_pass(group, laps=5)


def test_a_barrier_passed_after_its_caller_gave_up_counts() -> None:
    """The other has passed it: when the caller comes back it returns at once, and in step."""
    with mesh_group(2) as (left, right):
        with pytest.raises(Timeout):
            left.barrier(timeout=0.02)
        right.barrier()  # the token of the one that gave up is here
        pump_until(left, lambda: left._gates._gates[0].unclaimed)
        left.barrier(timeout=0)
        waiting = Background(right.barrier)
        with pytest.raises(Timeout):
            right.recv_timeout(bytearray(1), 0, 0.05)
        assert not waiting.ended
        left.barrier()
        waiting.result()
        all_pass([left, right])


def test_a_cancelled_barrier_can_be_called_again() -> None:
    """The operation ends, the barrier stays where it is."""
    with mesh_group(2) as group:
        arrival = group[0].post_barrier()
        assert arrival.cancel()
        all_pass(group)


def test_several_threads_of_one_rank_queue_up() -> None:
    """Three threads a side: each call is one barrier, whoever makes it."""
    with mesh_group(3) as group:
        together(*[mesh.barrier for mesh in group for _ in range(4)])
        all_pass(group)


def test_a_barrier_of_others_is_refused() -> None:
    """And leaves the group usable."""
    with mesh_group(3) as group:
        for members in ([1, 2], [0, 7]):
            with pytest.raises(InvalidRank):
                group[0].post_barrier(members=members)
        all_pass(group)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("lost", [0, 1])
def test_the_loss_of_a_rank_wakes_the_barrier(size: int, lost: int) -> None:
    """Everybody that waits in it learns who is gone, and so does everybody who comes later."""
    with mesh_group(size) as group:
        survivors = [mesh for mesh in group if mesh.rank != lost]
        waiting = [Background(mesh.barrier) for mesh in survivors]
        pump_until(group[lost], lambda: group[lost]._gates._gates != {} or size > 2)
        group[lost].close()
        for one in waiting:
            with pytest.raises(potluck_PeerLost) as caught:
                one.result()
            assert caught.value.rank == lost
        for mesh in survivors:
            with pytest.raises(potluck_PeerLost):
                mesh.barrier(timeout=10)


@pytest.mark.parametrize("size", [3, 4])
def test_who_waits_alone_is_woken_too(size: int) -> None:
    """Although the ranks that would have told it have not come to the barrier."""
    for lost in range(1, size):
        with mesh_group(size) as group:
            waiting = Background(group[0].barrier)
            group[lost].close()
            with pytest.raises(potluck_PeerLost) as caught:
                waiting.result(within=10)
            assert caught.value.rank == lost


@pytest.mark.parametrize("size", [2, 3, 5])
def test_who_has_passed_may_leave_at_once(size: int) -> None:
    """Its goodbye does not overtake its arrival: the others pass as well."""

    def visit(mesh: MeshBackend) -> None:
        mesh.barrier()
        mesh.close()

    for _ in range(10):
        with mesh_group(size) as group:
            together(*[partial(visit, mesh) for mesh in group])


def test_a_lost_rank_breaks_only_the_barriers_it_is_in() -> None:
    """A group without it goes on."""
    with mesh_group(3) as group:
        waiting = [Background(mesh.barrier) for mesh in group[:2]]
        group[2].close()
        for one in waiting:
            with pytest.raises(potluck_PeerLost):
                one.result()
        for _ in range(3):
            pair = [mesh.post_barrier(group=9, members=[0, 1]) for mesh in group[:2]]
            together(*[one.wait for one in pair])


def test_barriers_and_cancels_in_a_storm_stay_in_step() -> None:
    """Time-outs of random length on all sides; counted by calls that returned, nobody is ahead."""
    laps = [0] * 3

    def visit(mesh: MeshBackend) -> None:
        pause = 0.0001 * (mesh.rank + 1)
        while laps[mesh.rank] < 30:
            with contextlib.suppress(Timeout):
                mesh.barrier(timeout=pause)
                laps[mesh.rank] += 1
                assert max(laps) - min(laps) <= 1
            pause = min(2 * pause, 0.05)

    with mesh_group(3) as group:
        try:
            together(*[partial(visit, mesh) for mesh in group])
        except potluck_DistributedError as error:
            pytest.fail(str(error))
    assert laps == [30] * 3


# --------------------------------------------------------------------------------------------------
# A peer that does not keep to the protocol loses its link, and nobody else loses anything.

HOSTILE_PEERS_BIG = 5_000


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

    together(
        partial(talk, mesh, 2, HOSTILE_PEERS_BIG, 9), partial(talk, honest, 0, 9, HOSTILE_PEERS_BIG)
    )


ATTACKS = {
    "data without an offer": frame(FrameType.DATA, b"12345", operation=1),
    "data before the grant": frame(FrameType.OFFER, size_of(HOSTILE_PEERS_BIG), operation=1)
    + frame(FrameType.DATA, b"12345", operation=1),
    "empty data": frame(FrameType.DATA, operation=1),
    "an offer without a size": frame(FrameType.OFFER, operation=1),
    "an offer with a strange size": frame(FrameType.OFFER, b"123", operation=1),
    "the same offer twice": frame(FrameType.OFFER, size_of(HOSTILE_PEERS_BIG), operation=1) * 2,
    "too many offers": b"".join(
        frame(FrameType.OFFER, size_of(HOSTILE_PEERS_BIG), operation=number)
        for number in range(MAX_OFFERS + 1)
    ),
    "more than the credit": frame(FrameType.EAGER, bytes(200)) * (SMALL.credit // 456 + 1),
    "more empty messages than the credit": frame(FrameType.EAGER)
    * (SMALL.credit // MESSAGE_COST + 1),
    "an eager message that is too large": encode(FrameType.EAGER, length=SMALL.eager + 1),
    "a piece that is too large": encode(FrameType.DATA, length=MAX_PIECE + 1),
    "credit that nobody owed": frame(FrameType.CREDIT, operation=1),
    "absurd credit": frame(FrameType.CREDIT, operation=(1 << 64) - 1),
    "a token of an absurd round": frame(FrameType.TOKEN, operation=1, piece=mesh_module.MAX_ROUNDS),
    "a token with a payload": frame(FrameType.TOKEN, b"1", operation=1),
    "a barrier broken by nobody": frame(FrameType.BROKEN, operation=1, piece=1 << 31),
    "a goodbye at length": frame(FrameType.GOODBYE, b"farewell"),
    "a grant with a payload": frame(FrameType.GRANT, b"1", operation=1),
    "a withdrawal with a payload": frame(FrameType.WITHDRAW, b"1", operation=1),
    "a late hello": frame(FrameType.HELLO, b"hello"),
    "a late empty hello": frame(FrameType.HELLO),
    "a late welcome": frame(FrameType.WELCOME),
    "a late refusal": frame(FrameType.REFUSAL, b"no"),
    "no frame at all": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" + bytes(40),
    "another version": frame(FrameType.GRANT).replace(b"PL\x01", b"PL\x02"),
    "an unknown kind": frame(FrameType.GRANT)[:3] + b"\xff" + frame(FrameType.GRANT)[4:],
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_who_breaks_the_protocol_is_lost_with_the_reason(attack: bytes) -> None:
    """Whoever waits for it learns who and why; what waits for others is not touched."""
    with victim() as (peer, mesh, honest):
        receive = mesh.post_recv_into(bytearray(7), 1, tag=77)
        send = mesh.post_send(bytes(HOSTILE_PEERS_BIG), 1)
        other = mesh.post_recv_into(bytearray(9), 2, tag=77)
        barrier = mesh.post_barrier()
        peer.send(attack)
        for operation in (receive, send, barrier):
            with pytest.raises(potluck_PeerLost, match="it sent an invalid message") as caught:
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
        whole = bytearray(HOSTILE_PEERS_BIG + 100)
        receive = mesh.post_recv_into(memoryview(whole)[:HOSTILE_PEERS_BIG], 1)
        peer.send(frame(FrameType.OFFER, size_of(HOSTILE_PEERS_BIG), operation=1))
        pump_until(mesh, lambda: mesh._senders[1].offers != {})
        peer.send(frame(FrameType.DATA, b"\xff" * (HOSTILE_PEERS_BIG - 1), operation=1))
        peer.send(frame(FrameType.DATA, b"\xff" * 2, operation=1))
        with pytest.raises(potluck_PeerLost, match="more than it had offered"):
            receive.wait(20)
        assert whole[HOSTILE_PEERS_BIG:] == bytes(100)
        assert_honest_is_undisturbed(mesh, honest)


def test_an_offer_of_absurd_size_takes_no_memory() -> None:
    """It waits, is refused for its size by a receive, and nothing is ever allocated for it."""
    with victim() as (peer, mesh, honest):
        peer.send(frame(FrameType.OFFER, size_of((1 << 64) - 1), operation=1))
        with pytest.raises(Timeout):
            mesh.send(
                bytes(HOSTILE_PEERS_BIG), 1, timeout=0.2
            )  # waiting long enough to be courteous
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
        peer.send(frame(FrameType.BROKEN, operation=1, piece=rank))
        with pytest.raises(potluck_PeerLost):
            barrier.wait(20)
        assert not other.done
        honest.send(bytes(9), 0)
        other.wait(20)


def test_a_peer_cannot_use_up_the_groups_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names one group after the other; it is cut off, and the others still have theirs."""
    monkeypatch.setattr(mesh_module, "MAX_GROUPS", 100)
    with victim() as (peer, mesh, honest):
        receive = mesh.post_recv_into(bytearray(1), 1)
        for group in range(1, 102):
            peer.send(frame(FrameType.TOKEN, group=group, operation=1))
        with pytest.raises(potluck_PeerLost, match="groups"):
            receive.wait(20)
        assert_honest_is_undisturbed(mesh, honest)


def test_groups_that_we_have_too_are_no_burden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long job makes many subgroups, and the same rank is always first: nobody is cut off."""
    monkeypatch.setattr(mesh_module, "MAX_GROUPS", 3)
    with mesh_group(2) as (left, right):
        for group in range(1, 20):
            first = left.post_barrier(group=group)
            pump_until(right, lambda group=group: group in right._gates._gates)  # type: ignore[misc]
            right.post_barrier(group=group).wait(20)
            first.wait(20)


def test_silence_in_the_middle_of_a_frame_disturbs_nobody() -> None:
    """A peer that stops half-way only keeps those waiting who wait for it."""
    for fragment in (
        b"P",
        encode(FrameType.EAGER, length=100),
        frame(FrameType.EAGER, bytes(100))[:-1],
    ):
        with victim() as (peer, mesh, honest):
            peer.send(fragment)
            waiting = Background(partial(received, mesh, 1, 100))
            assert_honest_is_undisturbed(mesh, honest)
            assert not waiting.ended
            peer.close()
            with pytest.raises(potluck_PeerLost):
                waiting.result()


def loss_of(mesh: MeshBackend, rank: int) -> potluck_PeerLost:
    """The error for a lost peer; what it sent whole before may still be received first."""
    while True:
        try:
            mesh.recv(bytearray(100), rank, tag=2)
        except potluck_PeerLost as error:
            return error
        except ValueError:
            continue  # of another size


# -- any sequence of legal headers -------------------------------------------------------------

numbers = st.one_of(st.integers(0, 6), st.sampled_from([255, (1 << 32) - 1]))
payloads = st.one_of(
    st.just(b""),
    st.integers(0, 400).map(bytes),
    st.sampled_from([0, 1, 100, 300, HOSTILE_PEERS_BIG, 1 << 40]).map(size_of),
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A frame that the decoder accepts, whatever it means."""
    return frame(
        draw(st.sampled_from(FrameType)),
        draw(payloads),
        group=draw(st.sampled_from([0, 1, (1 << 64) - 1])),
        epoch=draw(st.sampled_from([0, 1])),
        tag=draw(st.integers(0, 2)),
        operation=draw(st.one_of(numbers, st.just((1 << 64) - 1))),
        piece=draw(numbers),
    )


@settings(max_examples=40)
@given(st.lists(frames(), max_size=25), st.binary(max_size=50))
@example([frame(FrameType.BROKEN, piece=2)], b"")  # says that the honest one is lost
@example([frame(FrameType.BROKEN, operation=1, piece=0)], b"")
@example(
    [frame(FrameType.OFFER, size_of(100), operation=1), frame(FrameType.WITHDRAW, operation=1)], b""
)
def test_no_sequence_of_frames_disturbs_anybody_else(sequence: list[bytes], end: bytes) -> None:
    """Neither a hang, nor a foreign error, nor unbounded memory; then the peer hangs up."""
    with victim() as (peer, mesh, honest):
        operations = [
            *[mesh.post_recv_into(bytearray(100), 1, tag=tag) for tag in (0, 0, 1)],
            *[mesh.post_send(bytes(size), 1) for size in (10, 300, HOSTILE_PEERS_BIG)],
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
            with contextlib.suppress(potluck_PeerLost, ValueError):  # ValueError: of another size
                operation.wait(20)
        assert loss_of(mesh, 1).rank == 1
        assert_honest_is_undisturbed(mesh, honest)


# --------------------------------------------------------------------------------------------------
# Losing a peer: what was seen becomes words that help.


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (PeerEnded(), "crashed or was killed"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "crashed or was killed"),
        (OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)), "no longer answers"),
        (OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)), "no longer answers"),
        (OSError(errno.ENETDOWN, os.strerror(errno.ENETDOWN)), "no longer answers"),
        (OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)), os.strerror(errno.ENOBUFS)),
    ],
)
def test_the_reason_is_told_in_words(reason: OSError, words: str) -> None:
    """A laptop that was closed is unreachable for its neighbours: the error says so."""
    error = peer_lost(1, "laptop at 10.0.0.7:4000", reason)
    assert error.rank == 1
    assert error.cause is not None
    assert words in error.cause
    assert str(error).startswith("Rank 1 (laptop at 10.0.0.7:4000) is gone: ")


# --------------------------------------------------------------------------------------------------
# The mesh: messages between ranks keep their order, and nobody's wait is another's.

SIZES = [0, 1, 255, 256, 257, 5_000, 70_000, 1_200_000]
"""Around the largest eager message of SMALL, and around one piece."""


def content(*facts: int, size: int) -> bytes:
    """Bytes that only this message has."""
    return random.Random(repr(facts)).randbytes(size)


@pytest.mark.parametrize("limits", [None, SMALL], ids=["usual", "small"])
def test_messages_of_one_pair_and_tag_keep_their_order(limits: MessageLimits | None) -> None:
    """Small and large in turns: one that travels at once does not overtake one that was offered."""
    sizes = random.Random(5).choices(SIZES, k=60)
    with mesh_group(2, limits) as (left, right):

        def send() -> None:
            for index, size in enumerate(sizes):
                left.send(content(index, size=size), 1)

        def receive() -> None:
            for index, size in enumerate(sizes):
                assert received(right, 0, size) == content(index, size=size)

        together(send, receive)


def test_posted_receives_are_served_in_order() -> None:
    """The first receive gets the first message, although all were posted before any was sent."""
    with mesh_group(2, SMALL) as (left, right):
        inboxes = [bytearray(size) for size in SIZES]
        receives = [right.post_recv_into(inbox, 0) for inbox in inboxes]
        sends = [left.post_send(content(index, size=size), 1) for index, size in enumerate(SIZES)]
        together(partial(wait_all, sends), partial(wait_all, receives))
        for index, inbox in enumerate(inboxes):
            assert inbox == content(index, size=len(inbox))


def test_tags_do_not_wait_for_each_other() -> None:
    """Messages are taken in another order than they were sent in, large ones too."""
    with mesh_group(2, SMALL) as (left, right):
        sends = [left.post_send(content(tag, size=9_000), 1, tag=tag) for tag in range(8)]
        sends += [left.post_send(content(tag, size=9), 1, tag=tag) for tag in range(8, 16)]

        def receive() -> None:
            for tag in random.Random(2).sample(range(16), 16):
                size = 9_000 if tag < 8 else 9
                assert received(right, 0, size, tag=tag) == content(tag, size=size)

        together(receive, partial(wait_all, sends))


def test_groups_do_not_wait_for_each_other() -> None:
    """The same tag in two groups is two conversations."""
    with mesh_group(2, SMALL) as (left, right):
        for group in (1, 2, (1 << 64) - 1):
            left.post_send(group.to_bytes(8, "big"), 1, group=group).wait()
        for group in ((1 << 64) - 1, 1, 2):
            inbox = bytearray(8)
            right.post_recv_into(inbox, 0, group=group).wait()
            assert int.from_bytes(inbox, "big") == group


def test_senders_do_not_wait_for_each_other() -> None:
    """Rank 0 takes from rank 2 what rank 1 has not sent, and from rank 1 afterwards."""
    with mesh_group(3, SMALL) as group:
        waiting = Background(lambda: received(group[0], 1, 9_000))
        sending = Background(lambda: group[2].send(content(2, size=9_000), 0))
        assert received(group[0], 2, 9_000) == content(2, size=9_000)
        sending.result()
        assert not waiting.ended
        group[1].send(content(1, size=9_000), 0)
        assert waiting.result() == content(1, size=9_000)


@pytest.mark.parametrize("poller", [make_poller, SelectorPoller])
@pytest.mark.parametrize("limits", [None, SMALL], ids=["usual", "small"])
def test_many_threads_use_both_directions_of_one_pair(
    limits: MessageLimits | None, poller: Callable[[], Poller]
) -> None:
    """Six threads a side send and six receive, each with its own tag; every byte is checked."""
    laps, threads = 12, 6
    sizes = {tag: random.Random(tag).choices(SIZES, k=laps) for tag in range(threads)}

    def send(mesh: MeshBackend, tag: int) -> None:
        for lap, size in enumerate(sizes[tag]):
            mesh.send(content(mesh.rank, tag, lap, size=size), 1 - mesh.rank, tag=tag)

    def receive(mesh: MeshBackend, tag: int) -> None:
        peer = 1 - mesh.rank
        for lap, size in enumerate(sizes[tag]):
            expected = content(peer, tag, lap, size=size)
            assert received(mesh, peer, size, tag=tag) == expected

    with mesh_group(2, limits, poller=poller) as group:
        together(
            *[
                partial(action, mesh, tag)
                for mesh in group
                for tag in range(threads)
                for action in (send, receive)
            ]
        )


def test_threads_that_share_a_tag_share_the_messages() -> None:
    """Four threads receive from one sender: each message goes to one of them, none is lost."""
    count = 200
    taken: list[int] = []
    lock = threading.Lock()

    with mesh_group(2, SMALL) as (left, right):

        def receive() -> None:
            for _ in range(count // 4):
                number = int.from_bytes(received(right, 0, 4), "big")
                with lock:
                    taken.append(number)

        def send() -> None:
            for number in range(count):
                left.send(number.to_bytes(4, "big"), 1)

        together(send, *[receive] * 4)
    assert sorted(taken) == list(range(count))


def test_threads_that_share_a_tag_send_whole_messages() -> None:
    """Four threads send large messages to one receiver: pieces of two never mix."""
    size = 3 << 20
    with mesh_group(2) as (left, right):

        def receive() -> list[int]:
            firsts = []
            for _ in range(8):
                message = received(right, 0, size)
                assert message == message[:1] * size
                firsts.append(message[0])
            return firsts

        def send(mark: int) -> None:
            for _ in range(2):
                left.send(bytes([mark]) * size, 1)

        receiving = Background(receive)
        together(*[partial(send, mark) for mark in range(4)])
        assert sorted(receiving.result()) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("size", [3, 4, 8])
def test_everybody_talks_to_everybody(size: int) -> None:
    """All pairs at once, in rounds kept in step by a barrier."""

    def visit(mesh: MeshBackend) -> None:
        others = [rank for rank in range(size) if rank != mesh.rank]
        for lap in range(3):
            receives = [(rank, bytearray(9_000)) for rank in others]
            operations = [mesh.post_recv_into(inbox, rank) for rank, inbox in receives]
            for rank in others:
                mesh.send(content(mesh.rank, rank, lap, size=9_000), rank)
            for operation in operations:
                operation.wait()
            for rank, inbox in receives:
                assert inbox == content(rank, mesh.rank, lap, size=9_000)
            mesh.barrier()

    with mesh_group(size, SMALL) as group:
        together(*[partial(visit, mesh) for mesh in group])


def test_empty_messages_are_messages() -> None:
    """Whether sent at once or offered, each is matched with one receive, in order."""
    with mesh_group(2, MessageLimits(eager=0, credit=600)) as (left, right):
        sends = [left.post_send(b"", 1) for _ in range(5)]  # two within the credit, three offered
        assert [send.done for send in sends] == [True, True, False, False, False]
        sends.append(left.post_send(b"x", 1))

        def receive() -> None:
            for _ in range(5):
                right.recv(bytearray(0), 0)
            with pytest.raises(SizeMismatch):
                right.recv(bytearray(0), 0)

        together(receive, partial(wait_all, sends))


def test_a_rank_without_a_link_is_not_connected() -> None:
    """A mesh that is not complete says to whom there is no connection."""
    with MeshBackend(0, 3, make_poller()) as alone:
        for action, data in ((alone.send, b"1"), (alone.recv, bytearray(1))):
            with pytest.raises(NoConnection, match="no connection to rank 2") as caught:
                action(data, 2)
            assert caught.value.rank == 2


def test_progress_alone_completes_operations() -> None:
    """Whoever never blocks can drive both sides by hand."""
    with mesh_group(2, SMALL) as (left, right):
        inbox = bytearray(1 << 20)
        receive = right.post_recv_into(inbox, 0)
        send = left.post_send(content(1, size=1 << 20), 1)
        for _ in range(10_000):
            if send.done and receive.done:
                break
            left.progress()
            right.progress()
        assert inbox == content(1, size=1 << 20)


def test_a_timeout_of_zero_takes_what_has_arrived() -> None:
    """Asking again and again without waiting finds the message; there is no need to block."""
    with mesh_group(2, SMALL) as (left, right):
        with pytest.raises(Timeout):
            right.recv_timeout(bytearray(5), 0, 0)
        sending = Background(lambda: left.send(b"12345", 1))
        sending.result()
        inbox = bytearray(5)
        for _ in range(10_000):
            try:
                right.recv_timeout(inbox, 0, 0)
            except Timeout:
                continue
            break
        assert inbox == b"12345"


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_an_impossible_timeout_leaves_nothing_behind(timeout: float) -> None:
    """It is refused, and the next message goes to the next receive."""
    with mesh_group(2, SMALL) as (left, right):
        with pytest.raises(ValueError, match="zero or more seconds"):
            right.recv_timeout(bytearray(5), 0, timeout)
        with pytest.raises(ValueError, match="zero or more seconds"):
            left.send(bytes(5_000), 1, tag=1, timeout=timeout)
        with pytest.raises(ValueError, match="zero or more seconds"):
            right.progress(timeout)
        left.send(b"12345", 1)
        assert received(right, 0, 5) == b"12345"


def test_an_error_raised_again_and_again_does_not_grow() -> None:
    """A caller that retries after a loss does not collect every frame it ever ran in."""
    depths = []
    with mesh_group(2) as (left, right):
        right.close()
        for _ in range(20):
            with pytest.raises(potluck_PeerLost) as caught:
                left.recv(bytearray(1), 1)
            depths.append(len(caught.traceback))
    assert len(set(depths[1:])) == 1
