"""The mesh: messages between ranks keep their order, and nobody's wait is another's."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial

import pytest

from potluck import NoConnection, PeerLost, SizeMismatch, Timeout
from potluck.backend.limits import Limits
from potluck.backend.mesh import MeshBackend
from potluck.net.pollers import SelectorPoller, make_poller
from potluck.net.transport import Poller
from support.meshes import SMALL, mesh_group, received, wait_all
from support.threads import Background, together

SIZES = [0, 1, 255, 256, 257, 5_000, 70_000, 1_200_000]
"""Around the largest eager message of SMALL, and around one piece."""


def content(*facts: int, size: int) -> bytes:
    """Bytes that only this message has."""
    return random.Random(repr(facts)).randbytes(size)


@pytest.mark.parametrize("limits", [None, SMALL], ids=["usual", "small"])
def test_messages_of_one_pair_and_tag_keep_their_order(limits: Limits | None) -> None:
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
    limits: Limits | None, poller: Callable[[], Poller]
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
    with mesh_group(2, Limits(eager=0, credit=600)) as (left, right):
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
            with pytest.raises(PeerLost) as caught:
                left.recv(bytearray(1), 1)
            depths.append(len(caught.traceback))
    assert len(set(depths[1:])) == 1
