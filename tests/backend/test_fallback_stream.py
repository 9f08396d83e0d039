"""Streams carried by messages: collectives on a backend that can only send and receive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import (
    Backend,
    CollectiveMismatch,
    DistributedContext,
    DistributedError,
    Operation,
    PeerLost,
    SimulatedBackend,
    SubBackend,
    Timeout,
)
from potluck.backend.base import WORLD
from potluck.backend.fallback_stream import CHUNK, IN_FLIGHT, MessageStream, MessageStreamPoller
from support.meshes import mesh_group
from support.programs import Step, compare, run, steps
from support.threads import Background, eventually, together


class Courier(Backend):
    """What somebody else's backend must have, and no more."""

    def __init__(self, below: SimulatedBackend) -> None:
        self.below = below

    @property
    def rank(self) -> int:
        """As below."""
        return self.below.rank

    @property
    def world_size(self) -> int:
        """As below."""
        return self.below.world_size

    def post_send(self, data: Any, dst: int, *, tag: int = 0, group: int = WORLD) -> Operation:
        """As below."""
        return self.below.post_send(data, dst, tag=tag, group=group)

    def post_recv_into(
        self, into: Any, src: int, *, tag: int = 0, group: int = WORLD, at_most: bool = False
    ) -> Operation:
        """As below."""
        return self.below.post_recv_into(into, src, tag=tag, group=group)

    def post_barrier(
        self, *, group: int = WORLD, members: Sequence[int] | None = None
    ) -> Operation:
        """As below."""
        return self.below.post_barrier(group=group, members=members)

    def progress(self, timeout: float | None = 0) -> None:
        """As below."""
        self.below.progress(timeout)

    def close(self) -> None:
        """As below."""
        self.below.close()


def on_couriers(size: int, action: Callable[[DistributedContext], Any]) -> list[Any]:
    """What every rank of a group of such backends returns."""
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(DistributedContext(Courier(below)))
            for below in SimulatedBackend.create_group(size)
        ]
        return together(*(lambda rank=rank: action(rank) for rank in ranks))


PROGRAMS = st.integers(1, 4).flatmap(lambda size: st.lists(steps(size), min_size=1, max_size=8))


@settings(max_examples=15)
@given(PROGRAMS)
def test_collectives_run_on_any_backend(program: list[Step]) -> None:
    """Sending and receiving is all that they need."""
    size = len(program[0].counts)
    for rank, results in enumerate(on_couriers(size, lambda context: run(program, context))):
        compare(program, rank, results)


def test_large_arrays_travel_in_many_messages() -> None:
    """More than fits into one, by every algorithm."""

    def act(context: DistributedContext) -> bool:
        for strategy in ("ring", "direct", "tree", "centralized"):
            array = np.full(500_000, context.rank + 1.0)
            context.all_reduce(array, strategy=strategy)
            assert (array == 6).all()
        return True

    assert on_couriers(3, act) == [True] * 3


def test_meshes_without_doors_serve_too() -> None:
    """Connections made by hand have nobody who could open more of them."""
    with mesh_group(2) as group, contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(DistributedContext(each)) for each in group]
        assert together(*(lambda rank=rank: rank.all_reduce(1) for rank in ranks)) == [2, 2]


def test_subgroups_are_kept_apart() -> None:
    """Each purpose has messages of its own."""

    def act(context: DistributedContext) -> tuple[int, int]:
        other = context.rank ^ 1
        pair = DistributedContext(SubBackend(context.backend, [context.rank, other]))
        return pair.all_reduce(1 << context.rank), context.all_reduce(1 << context.rank)

    assert on_couriers(4, act) == [(3, 15), (3, 15), (12, 15), (12, 15)]


def test_ranks_that_disagree_are_told_so() -> None:
    """As over connections; afterwards the group goes on with fresh streams."""

    def act(context: DistributedContext) -> int:
        with pytest.raises(CollectiveMismatch):
            context.all_reduce(np.ones(context.rank + 1))
        return context.all_reduce(1)

    assert on_couriers(2, act) == [2, 2]


def test_a_rank_that_does_not_come_is_a_time_out() -> None:
    """Nothing waits forever for a message."""
    with contextlib.ExitStack() as stack:
        first, _ = [
            stack.enter_context(DistributedContext(Courier(below)))
            for below in SimulatedBackend.create_group(2)
        ]
        with pytest.raises(Timeout):
            first.all_reduce(1, timeout=0.1)


def test_a_rank_that_is_gone_is_noticed() -> None:
    """The messages that it owes us fail, and so does the operation."""
    with contextlib.ExitStack() as stack:
        first, second = [
            stack.enter_context(DistributedContext(Courier(below)))
            for below in SimulatedBackend.create_group(2)
        ]
        waiting = Background(lambda: first.all_reduce(np.ones(3), timeout=20))
        eventually(lambda: first.group._is_busy)
        backend = second.backend
        assert isinstance(backend, Courier)
        backend.below.lose()
        with pytest.raises(DistributedError) as caught:
            waiting.result()
        assert isinstance(caught.value, PeerLost)


# --- streams and pollers by themselves ---


@pytest.fixture
def ends() -> Iterator[tuple[MessageStream, MessageStream, list[SimulatedBackend]]]:
    """Both ends of a stream."""
    group = SimulatedBackend.create_group(2)
    left, right = (MessageStream(group[rank], 1 - rank, "test") for rank in (0, 1))
    yield left, right, group
    for stream in (left, right):
        stream.close()
    for backend in group:
        backend.close()


Ends = tuple[MessageStream, MessageStream, list[SimulatedBackend]]


def received(stream: MessageStream, backend: SimulatedBackend, count: int) -> bytes:
    """So many bytes of a stream."""
    data = bytearray(count)
    rest = memoryview(data)
    poller = MessageStreamPoller(backend)
    poller.register(stream, 5)
    while rest:
        assert poller.wait(10) == [(5, True, False)]
        rest = rest[stream.recv_into(rest) :]
    return bytes(data)


def test_bytes_come_in_order_and_in_any_portions(ends: Ends) -> None:
    """What was written in two pieces can be read in three."""
    left, right, group = ends
    assert left.sendmsg([b"pot", b"luck"]) == 7
    assert received(right, group[1], 2) == b"po"
    assert received(right, group[1], 5) == b"tluck"
    with pytest.raises(BlockingIOError):
        right.recv_into(memoryview(bytearray(1)))


def test_a_stream_takes_no_more_than_it_can_hold(ends: Ends) -> None:
    """A write is cut at the size of a message, and refused while too many are under way."""
    left, right, group = ends
    large = bytes(CHUNK + 5)
    assert left.sendmsg([large]) == CHUNK
    assert left.sendmsg([b""]) == 0
    assert received(right, group[1], CHUNK) == large[:CHUNK]
    stuck = MessageStream(_Stuck(group[0]), 1, "stuck")
    for _ in range(IN_FLIGHT // 2):
        assert stuck.sendmsg([b"x"]) == 1
    assert not stuck.is_writable()
    with pytest.raises(BlockingIOError):
        stuck.sendmsg([b"x"])
    stuck.close()


class _Stuck:
    """A backend whose sends never end."""

    def __init__(self, below: SimulatedBackend) -> None:
        self._below = below
        self.peer_name = below.peer_name
        self.progress = below.progress
        self.post_recv_into = below.post_recv_into

    def post_send(self, data: Any, dst: int, *, tag: int = 0, group: int = 0) -> Operation:
        """Something that is not done: a receive of what nobody sends."""
        return self._below.post_recv_into(bytearray(data), dst, tag=tag + 9, group=group)


def test_the_end_of_a_stream_is_seen_after_its_bytes(ends: Ends) -> None:
    """Zero bytes, again and again, like a socket; writing to it is an error."""
    left, right, group = ends
    left.sendmsg([b"bye"])
    left.finish(time.monotonic() + 10)
    left.close()
    assert received(right, group[1], 3) == b"bye"
    eventually(lambda: _pumped(group[1], right.is_readable))
    assert right.recv_into(memoryview(bytearray(1))) == 0
    with pytest.raises(BrokenPipeError):
        right.sendmsg([b"?"])
    with pytest.raises(OSError, match="Bad file"):
        left.recv_into(memoryview(bytearray(1)))
    assert left.is_broken()
    assert left.is_writable()
    assert "rank 1" in left.peer_name


def _pumped(backend: SimulatedBackend, condition: Callable[[], bool]) -> bool:
    backend.progress(0)
    return condition()


def test_a_peer_that_is_gone_breaks_the_stream(ends: Ends) -> None:
    """Reading and writing fail, and a poller says so."""
    left, _, group = ends
    for _ in range(IN_FLIGHT // 2):
        left.sendmsg([bytes(CHUNK)])
    group[1].lose()
    eventually(lambda: _pumped(group[0], left.is_broken))
    assert left.is_readable()
    with pytest.raises(OSError, match="rank 1"):
        left.recv_into(memoryview(bytearray(1)))


def test_what_is_no_error_of_a_stream_becomes_one(ends: Ends) -> None:
    """A message of another size than was announced ends the stream like any break."""
    left, right, group = ends
    group[0].post_send((5).to_bytes(8, "little"), 1, group=left._group).wait(10)
    group[0].post_send(b"123", 1, group=left._group).wait(10)
    eventually(lambda: _pumped(group[1], right.is_readable))
    with pytest.raises(ConnectionAbortedError, match="3 bytes"):
        right.recv_into(memoryview(bytearray(9)))


def test_a_length_beyond_all_bounds_breaks_the_stream(ends: Ends) -> None:
    """Nothing is allocated for it."""
    left, right, group = ends
    group[0].post_send((1 << 40).to_bytes(8, "little"), 1, group=left._group).wait(10)
    eventually(lambda: _pumped(group[1], right.is_readable))
    with pytest.raises(ConnectionAbortedError, match="announced"):
        right.recv_into(memoryview(bytearray(1)))


def test_a_poller_sees_room_silence_and_breaks(ends: Ends) -> None:
    """Muted streams report only that they are broken; a wake-up ends a wait."""
    left, right, group = ends
    poller = MessageStreamPoller(group[0])
    poller.register(left, 3)
    assert poller.wait(0) == []
    poller.want_write(left, 3, True)
    assert poller.wait(1) == [(3, False, True)]
    poller.want_write(left, 3, False)
    right.sendmsg([b"x"])
    assert poller.wait(10) == [(3, True, False)]
    poller.want_read(left, 3, False)
    assert poller.wait(0.01) == []
    group[1].lose()
    with contextlib.suppress(OSError):
        left.recv_into(memoryview(bytearray(1)))
    assert poller.wait(10) == [(3, True, False)]
    poller.unregister(left)
    waiting = Background(lambda: poller.wait(None))
    poller.wake()
    assert waiting.result() == []
    poller.close()
