"""SimulatedBackend: all ranks in one process, with faults on demand."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from potluck import (
    ChannelClosed,
    InvalidRank,
    InvalidWorldSize,
    PeerLost,
    SimulatedBackend,
    SimulatedFaults,
    Timeout,
)
from potluck.net.memory import MemoryStream
from support.meshes import received
from support.threads import PATIENCE, Background, eventually, together


@contextlib.contextmanager
def simulated(size: int, faults: SimulatedFaults | None = None) -> Iterator[list[SimulatedBackend]]:
    """A group that is closed at the end."""
    with contextlib.ExitStack() as stack:
        group = SimulatedBackend.create_group(size, faults=faults)
        for backend in group:
            stack.enter_context(backend)
        yield group


def test_simulated_send_recv() -> None:
    """Bytes sent on one thread arrive on another."""
    with simulated(2) as (left, right):
        sender = Background(lambda: left.send(bytes([1, 2, 3, 4]), 1))
        inbox = bytearray(4)
        right.recv(inbox, 0)
        sender.result()
        assert inbox == bytes([1, 2, 3, 4])


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13])
def test_simulated_barrier(size: int) -> None:
    """Nobody leaves a barrier before the last one has arrived, time after time."""
    arrived = [0] * size

    def visit(backend: SimulatedBackend) -> None:
        for lap in range(1, 21):
            arrived[backend.rank] = lap
            backend.barrier()
            assert min(arrived) >= lap

    with simulated(size) as group:
        together(*[partial(visit, backend) for backend in group])


def test_simulated_rank_world_size() -> None:
    """Ranks are numbered in order and know how many they are."""
    with simulated(3) as group:
        assert [backend.rank for backend in group] == [0, 1, 2]
        assert [backend.world_size for backend in group] == [3, 3, 3]


@pytest.mark.parametrize("size", [0, -1])
def test_invalid_world_size(size: int) -> None:
    """A group without ranks is refused, with the number that was asked for."""
    with pytest.raises(InvalidWorldSize) as caught:
        SimulatedBackend.create_group(size)
    assert caught.value.world_size == size


@pytest.mark.parametrize("rank", [5, 2, -1])
def test_send_to_invalid_rank(rank: int) -> None:
    """Neither a send nor a receive accepts a rank that is not there; -1 is not the last one."""
    with simulated(2) as (left, _):
        for action, data in ((left.send, b"1"), (left.recv, bytearray(1))):
            with pytest.raises(InvalidRank) as caught:
                action(data, rank)
            assert (caught.value.rank, caught.value.world_size) == (rank, 2)


@pytest.mark.parametrize("rank", [True, "1", 1.0, None])
def test_a_rank_is_a_whole_number(rank: object) -> None:
    """What only happens to compare equal to a rank is a mistake of the caller."""
    with simulated(2) as (left, _), pytest.raises(TypeError, match="must be an integer"):
        left.send(b"1", rank)  # type: ignore[arg-type]


def test_a_group_of_one_works() -> None:
    """Alone, a rank passes barriers at once and can write to itself."""
    with simulated(1) as (alone,):
        alone.barrier(timeout=0)
        alone.barrier()
        alone.send(b"note", 0)
        assert received(alone, 0, 4) == b"note"


def test_a_message_to_oneself_arrives() -> None:
    """In order, per tag, whether the receive or the send is posted first."""
    with simulated(2) as (me, _):
        for text in (b"first", b"other"):
            me.send(text, 0)
        me.send(b"apart", 0, tag=7)
        assert received(me, 0, 5, tag=7) == b"apart"
        assert [received(me, 0, 5), received(me, 0, 5)] == [b"first", b"other"]
        inbox = bytearray(4)
        receive = me.post_recv_into(inbox, 0)
        assert not receive.done
        me.send(b"late", 0)
        receive.wait()
        assert inbox == b"late"


@pytest.mark.parametrize("size", [1, 2])
def test_two_threads_of_one_rank_may_exchange_messages(size: int) -> None:
    """Whoever waits for the other is woken at once, although no byte moves on any link."""
    with simulated(size) as (me, *_):
        receiving = Background(lambda: received(me, 0, 5, timeout=30))
        eventually(me._turns._turn.locked)
        me.send(b"hello", 0)
        assert receiving.result(within=5) == b"hello"


def test_a_message_to_oneself_is_a_copy() -> None:
    """After send() returns the buffer may be changed, although nobody has received yet."""
    with simulated(1) as (alone,):
        outgoing = bytearray(b"before")
        alone.send(outgoing, 0)
        outgoing[:] = b"after!"
        assert received(alone, 0, 6) == b"before"


def test_one_thread_may_play_all_ranks() -> None:
    """Send here, receive there, on one thread, for many times the credit of a link."""
    block = bytearray(4 << 20)
    with simulated(2) as (left, right):
        for index in range(40):
            block[0] = index
            left.send(block, 1, timeout=5)
            inbox = bytearray(len(block))
            right.recv(inbox, 0, timeout=5)
            assert inbox[0] == index


def test_a_closed_backend_refuses_everything() -> None:
    """Every call on a closed backend says so; closing again is harmless."""
    with simulated(2) as (left, _):
        left.close()
        left.close()
        for action in (
            partial(left.send, b"1", 1),
            partial(left.recv, bytearray(1), 1),
            partial(left.barrier),
            partial(left.progress),
        ):
            with pytest.raises(ChannelClosed, match="Rank 0 has closed"):
                action()


def test_closing_wakes_own_waiters() -> None:
    """Threads blocked in their own backend end when it is closed."""
    with simulated(2) as (left, _):
        waiting = [
            Background(lambda: left.recv(bytearray(1), 1)),
            Background(lambda: left.recv(bytearray(1), 0)),
            Background(left.barrier),
        ]
        left.close()
        for one in waiting:
            with pytest.raises(ChannelClosed):
                one.result()


def test_closing_wakes_the_peers() -> None:
    """Whoever waits for a rank that closes learns who it was and that it meant to."""
    with simulated(3) as (left, right, third):
        receive = Background(lambda: right.recv(bytearray(1), 0))
        barrier = Background(third.barrier)
        left.close()
        for one in (receive, barrier):
            with pytest.raises(PeerLost) as caught:
                one.result()
            assert caught.value.rank == 0
        with pytest.raises(PeerLost, match="closed its backend"):
            right.send(b"1", 0)


def test_what_was_sent_before_closing_can_be_received() -> None:
    """A sender that is done and leaves takes nothing back."""
    with simulated(2) as (left, right):
        left.send(b"testament", 1)
        left.close()
        assert received(right, 0, 9) == b"testament"
        with pytest.raises(PeerLost):
            right.recv(bytearray(9), 0)


def test_a_lost_rank_is_named() -> None:
    """A rank that vanishes without a word ends the waits for it, and no others."""
    with simulated(3) as (left, right, third):
        blocked = Background(lambda: right.recv(bytearray(1), 0))
        left.lose()
        with pytest.raises(PeerLost, match="crashed or was killed") as caught:
            blocked.result()
        assert caught.value.rank == 0
        right.send(b"still here", 2)
        assert received(third, 1, 10) == b"still here"


def test_a_rank_is_lost_after_its_writes() -> None:
    """The fault comes at the same write each time: two messages arrive, the third does not."""
    for _ in range(3):
        with simulated(3, SimulatedFaults(lose={1: 2})) as (left, doomed, third):
            doomed.send(b"one", 0)
            doomed.send(b"two", 2)
            with pytest.raises(PeerLost):
                doomed.send(b"three", 0)
            assert received(left, 1, 3) == b"one"
            assert received(third, 1, 3) == b"two"
            for backend in (left, third):
                with pytest.raises(PeerLost) as caught:
                    backend.recv(bytearray(5), 1)
                assert caught.value.rank == 1


def dues(backend: SimulatedBackend, peer: int, start: float) -> list[float]:
    """When the writes of ``peer`` become readable here, after ``start``."""
    stream = backend._links[peer].stream
    assert isinstance(stream, MemoryStream)
    return [due - start for due, _ in stream._arrived]


def delays(seed: int, *, answers: int = 0, writes: int = 8) -> list[float]:
    """The delays rank 1 sees from rank 0, while rank 1 also writes ``answers`` messages."""
    faults = SimulatedFaults(seed=seed, delay=(100.0, 200.0))
    with simulated(2, faults) as (left, right):
        start = time.monotonic()
        for index in range(writes):
            left.send(bytes([index]), 1)
            for _ in range(answers):
                right.send(b"x", 0)
        return dues(right, 0, start)


def test_delays_follow_the_seed() -> None:
    """The same seed gives the same delays, another seed others."""
    assert delays(7) == pytest.approx(delays(7), abs=1.0)
    assert delays(7) != pytest.approx(delays(8), abs=1.0)


def test_delays_of_one_direction_do_not_depend_on_the_other() -> None:
    """Which thread writes first must not change what a replay sees."""
    assert delays(7, answers=3) == pytest.approx(delays(7), abs=1.0)


def test_delayed_messages_keep_their_order() -> None:
    """However the delays fall, nothing overtakes."""
    faults = SimulatedFaults(seed=3, delay=(0.0, 0.002))
    with simulated(2, faults) as (left, right):
        for index in range(100):
            left.send(bytes([index]), 1)
        assert [received(right, 0, 1)[0] for _ in range(100)] == list(range(100))


def test_a_delayed_message_is_not_there_before_its_time() -> None:
    """A receive that gives up early times out; the message comes later and whole."""
    with simulated(2, SimulatedFaults(delay=(0.2, 0.2))) as (left, right):
        sent = time.monotonic()
        left.send(b"slow", 1)
        with pytest.raises(Timeout):
            right.recv_timeout(bytearray(4), 0, 0.01)
        assert received(right, 0, 4) == b"slow"
        assert time.monotonic() - sent >= 0.2


def test_barriers_hold_under_delay() -> None:
    """Late tokens of one barrier do not open the next."""
    arrived = [0] * 4
    guard = threading.Lock()

    def visit(backend: SimulatedBackend) -> None:
        for lap in range(1, 11):
            with guard:
                arrived[backend.rank] = lap
            backend.barrier()
            assert min(arrived) >= lap

    with simulated(4, SimulatedFaults(seed=11, delay=(0.0, 0.003))) as group:
        together(*[partial(visit, backend) for backend in group])


def test_a_thread_may_send_any_number_of_messages_before_it_receives_them() -> None:
    """The channels have no bound: one thread can play all ranks."""
    left, right = SimulatedBackend.create_group(2)
    block = bytes(8 << 20)
    with left, right:
        for _ in range(10):
            left.send(block, 1, timeout=PATIENCE)
        left.send(bytes(70 << 20), 1, timeout=PATIENCE)
        inbox = bytearray(8 << 20)
        for _ in range(10):
            right.recv(inbox, 0, timeout=PATIENCE)
        right.recv(bytearray(70 << 20), 0, timeout=PATIENCE)
