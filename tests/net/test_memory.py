"""The twin in memory: capacity, delay, and the two ways in which a stream ends.

What it has in common with TCP is in ``test_transport.py``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.net.memory import MemoryPoller, MemoryStream, pipe
from support.doors import read
from support.threads import Background


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def read_all(stream: MemoryStream) -> bytes:
    """Everything that is there now."""
    data, buffer = bytearray(), memoryview(bytearray(3))
    while True:
        try:
            got = stream.recv_into(buffer)
        except BlockingIOError:
            return bytes(data)
        data += buffer[:got]


def test_each_end_is_named_after_the_other() -> None:
    """As seen from its holder."""
    left, right = pipe(("left", "right"), capacity=1)
    assert (left.peer_name, right.peer_name) == ("right", "left")


@given(
    capacity=st.integers(1, 20),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 30))),
)
def test_a_pipe_holds_exactly_its_capacity(capacity: int, steps: list[tuple[bool, int]]) -> None:
    """A write takes what fits, in order, and only a full pipe would block."""
    left, right = pipe(("left", "right"), capacity=capacity)
    numbers = itertools.cycle(range(256))
    held = b""
    for is_write, size in steps:
        if is_write:
            data = bytes(itertools.islice(numbers, size))
            if size and len(held) == capacity:
                with pytest.raises(BlockingIOError):
                    left.sendmsg([data])
                continue
            taken = left.sendmsg([data[:1], data[1:]])
            assert taken == min(size, capacity - len(held))
            held += data[:taken]
        elif size and held:
            buffer = memoryview(bytearray(size))
            got = right.recv_into(buffer)
            assert 0 < got <= min(size, len(held))
            assert buffer[:got] == held[:got]
            held = held[got:]
        assert left.writable() is (len(held) < capacity)
    assert read_all(right) == held


def test_a_read_takes_many_small_writes_at_once() -> None:
    """As from a socket: a pipe that is full does not stay cut into small pieces."""
    left, right = pipe(("left", "right"), capacity=100)
    for index in range(100):
        left.sendmsg([bytes([index])])
    buffer = bytearray(60)
    assert right.recv_into(memoryview(buffer)) == 60
    assert left.sendmsg([bytes(50), bytes(50)]) == 60
    assert read(right, 100) == bytes(range(60, 100)) + bytes(60)


def test_a_write_of_many_buffers_takes_what_fits_of_them_joined() -> None:
    """Small ones first, then one that fits no more."""
    left, right = pipe(("left", "right"), capacity=60)
    assert left.sendmsg([b"a", b"b" * 50, b"c" * 50]) == 60
    assert read(right, 60) == b"a" + b"b" * 50 + b"c" * 9


def test_a_read_that_ends_within_a_write_leaves_the_rest_of_it() -> None:
    """In front of what was written later."""
    left, right = pipe(("left", "right"), capacity=100)
    left.sendmsg([b"abc"])
    left.sendmsg([b"def"])
    assert read(right, 2) == b"ab"
    buffer = bytearray(3)
    assert right.recv_into(memoryview(buffer)) == 3
    assert buffer == b"cde"
    assert read_all(right) == b"f"


def test_what_was_written_is_a_copy() -> None:
    """The writer may use its buffer again at once, as after a write to a socket."""
    left, right = pipe(("left", "right"), capacity=10)
    buffer = bytearray(b"before")
    left.sendmsg([buffer])
    buffer[:] = b"after!"
    assert read_all(right) == b"before"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1))
def test_delayed_bytes_keep_their_order(writes: list[tuple[int, int]]) -> None:
    """Nothing comes before its time, nothing overtakes, and the last one due brings the rest."""
    clock = Clock()
    delays = iter([delay for _, delay in writes])
    left, right = pipe(("left", "right"), capacity=1000, delay=lambda: next(delays), clock=clock)
    due: list[float] = []
    for number, (pause, delay) in enumerate(writes):
        clock.now += pause
        left.sendmsg([bytes([number % 256])])
        due.append(max([clock.now + delay, *due]) if delay else max([0.0, *due]))
    expected = bytes(number % 256 for number in range(len(writes)))
    arrived = b""
    while len(arrived) < len(expected):
        arrived += read_all(right)
        assert arrived == expected[: sum(moment <= clock.now for moment in due)]
        clock.now += 1


def test_a_delayed_end_comes_after_the_delayed_bytes() -> None:
    """The end of the stream overtakes nothing either."""
    clock = Clock()
    left, right = pipe(("left", "right"), capacity=10, delay=lambda: 5.0, clock=clock)
    left.sendmsg([b"late"])
    left.finish(0)
    assert read_all(right) == b""
    clock.now += 5
    buffer = memoryview(bytearray(10))
    assert (right.recv_into(buffer), right.recv_into(buffer)) == (4, 0)


def test_a_poller_knows_when_delayed_bytes_are_due() -> None:
    """Before that they are no news."""
    clock = Clock()
    left, right = pipe(("left", "right"), capacity=10, delay=lambda: 5.0, clock=clock)
    poller = MemoryPoller(clock)
    poller.register(right, 7)
    left.sendmsg([b"x"])
    assert poller.wait(0) == []
    clock.now += 5
    assert poller.wait(0) == [(7, True, False)]


def test_a_sleeping_poller_wakes_when_the_first_bytes_are_due() -> None:
    """Of several streams the earliest counts; nobody has to wake it."""
    poller = MemoryPoller()
    begin = time.monotonic()
    delays = {1: 40.0, 2: 0.05, 3: 50.0}
    ends = [
        (key, pipe(("left", "right"), capacity=10, delay=lambda delay=delay: delay))  # type: ignore[misc]
        for key, delay in delays.items()
    ]
    for key, (left, right) in ends:
        poller.register(right, key)
        left.sendmsg([b"x"])
    assert poller.wait(30) == [(2, True, False)]
    assert 0.05 <= time.monotonic() - begin < 20


def test_finish_is_an_end_and_close_is_a_reset() -> None:
    """A process that says goodbye and one that vanishes look different, after the last byte."""
    buffer = memoryview(bytearray(10))
    for vanish in (False, True):
        left, right = pipe(("left", "right"), capacity=10)
        left.sendmsg([b"last"])
        if vanish:
            left.close()
        else:
            left.finish(0)
        assert right.recv_into(buffer) == 4
        if vanish:
            with pytest.raises(ConnectionResetError):
                right.recv_into(buffer)
        else:
            assert right.recv_into(buffer) == 0
        with pytest.raises(BrokenPipeError):
            right.sendmsg([b"too late"])
        assert right.writable()  # to find that out


def test_one_that_has_vanished_does_not_end_orderly_later() -> None:
    """The other end lost bytes, for all it knows."""
    left, right = pipe(("left", "right"), capacity=10)
    left.close()
    left.finish(0)
    with pytest.raises(ConnectionResetError):
        right.recv_into(memoryview(bytearray(10)))


@pytest.fixture
def sleeper() -> Iterator[tuple[MemoryPoller, MemoryStream, MemoryStream]]:
    """A poller that watches one end of a pipe that is full."""
    left, right = pipe(("left", "right"), capacity=4)
    left.sendmsg([b"full"])
    poller = MemoryPoller()
    poller.register(left, 7)
    yield poller, left, right
    poller.close()


def test_a_sleeping_poller_wakes_for_bytes_room_and_endings(
    sleeper: tuple[MemoryPoller, MemoryStream, MemoryStream],
) -> None:
    """Whatever the other end does that we care about."""
    poller, left, right = sleeper
    poller.want_write(left, 7, True)
    waiting = Background(lambda: poller.wait(60))
    assert read(right, 4) == b"full"
    assert waiting.result() == [(7, False, True)]
    poller.want_write(left, 7, False)
    waiting = Background(lambda: poller.wait(60))
    right.sendmsg([b"x"])
    assert waiting.result() == [(7, True, False)]
    assert read(left, 1) == b"x"
    waiting = Background(lambda: poller.wait(60))
    right.close()
    assert waiting.result() == [(7, True, False)]


def test_a_closed_poller_watches_nothing() -> None:
    """It forgets its streams."""
    left, right = pipe(("left", "right"), capacity=4)
    poller = MemoryPoller()
    poller.register(left, 7)
    right.sendmsg([b"x"])
    poller.close()
    assert poller.wait(0) == []
