"""What every door to the network keeps to: TCP with either poller, and the twin in memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.doors import DOORS, Door, fill, open_door, read, wait_for_event
from support.threads import PATIENCE, Background

KEY, OTHER = 7, 8
EVERY_DOOR = sorted(DOORS)


@pytest.fixture(params=EVERY_DOOR)
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """Each of them in turn."""
    with open_door(request.param) as one:
        yield one


@pytest.mark.parametrize("name", ["selector", "memory"])
@given(writes=st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=5), max_size=8))
@settings(max_examples=30)
def test_bytes_arrive_in_order(name: str, writes: list[list[bytes]]) -> None:
    """Several buffers of one write are joined; what comes out is what went in."""
    with open_door(name) as door:
        left, right = door.pair()
        sent = b"".join(part for parts in writes for part in parts)
        for parts in writes:
            assert left.sendmsg(parts) == sum(map(len, parts))
        left.finish(time.monotonic() + 30)
        assert read(right, len(sent) + 1) == sent


def test_both_directions_are_independent(door: Door) -> None:
    """Each end reads what the other wrote."""
    left, right = door.pair()
    left.sendmsg([b"to the right"])
    right.sendmsg([memoryview(b"to the left")])
    assert read(left, 11) == b"to the left"
    assert read(right, 12) == b"to the right"


def test_a_read_takes_only_what_fits(door: Door) -> None:
    """The rest waits for the next read."""
    left, right = door.pair()
    left.sendmsg([b"abcdef"])
    assert read(right, 2) == b"ab"
    assert read(right, 4) == b"cdef"


def test_nothing_to_read_and_no_room_both_would_block(door: Door) -> None:
    """Streams never block; a full one takes bytes again once the other end has read."""
    left, right = door.pair()
    with pytest.raises(BlockingIOError):
        left.recv_into(memoryview(bytearray(1)))
    taken = fill(left)
    assert taken > 0
    for words in ([b"more"], [b"", b"more"]):
        with pytest.raises(BlockingIOError):
            left.sendmsg(words)
    assert len(read(right, taken)) == taken
    poller = door.poller()
    poller.register(left, KEY)
    poller.want_write(left, KEY, True)
    assert wait_for_event(poller) == [(KEY, False, True)]
    assert left.sendmsg([b"more"]) == 4


@pytest.mark.parametrize("again", [False, True])
def test_a_finished_stream_ends_after_its_last_byte(door: Door, again: bool) -> None:
    """Zero bytes is the end, not an error; closing once more afterwards changes nothing."""
    left, right = door.pair()
    left.sendmsg([b"last words"])
    left.finish(time.monotonic() + 30)
    if again:
        left.close()
    assert read(right, 10) == b"last words"
    assert right.recv_into(memoryview(bytearray(1))) == 0


def test_what_was_written_before_a_close_can_be_read(door: Door) -> None:
    """Then the stream has ended, orderly or with an error."""
    left, right = door.pair()
    left.sendmsg([b"last words"])
    left.close()
    assert read(right, 10) == b"last words"
    with contextlib.suppress(ConnectionResetError):
        assert read(right, 1) == b""


def test_writing_to_one_that_is_gone_fails(door: Door) -> None:
    """Sooner or later, with an error and not with silence."""
    left, right = door.pair()
    right.close()
    poller = door.poller()
    poller.register(left, KEY)
    assert wait_for_event(poller)[0][0] == KEY
    with pytest.raises(ConnectionError):
        deque(map(left.sendmsg, [[b"anybody there?"]] * 1000))


@pytest.mark.parametrize("ending", ["close", "finish"])
def test_a_stream_we_closed_is_of_no_more_use(door: Door, ending: str) -> None:
    """It raises what a closed socket raises, and may be closed again."""
    left, _ = door.pair()
    if ending == "close":
        left.close()
    else:
        left.finish(time.monotonic() + 30)
    with pytest.raises(OSError, match=r"Bad file descriptor"):
        left.recv_into(memoryview(bytearray(1)))
    with pytest.raises(OSError, match=r"Bad file descriptor|Broken pipe"):
        left.sendmsg([b"x"])
    left.close()
    left.finish(time.monotonic())


def test_both_ends_have_a_name_for_people(door: Door) -> None:
    """It says where the other end is."""
    left, right = door.pair()
    assert left.peer_name
    assert right.peer_name
    assert left.peer_name != right.peer_name


# --------------------------------------------------------------------------------------------------
# What every poller keeps to: epoll, selectors, and the twin in memory.

POLLERS_KEY = 7
POLLERS_EVERY_DOOR = sorted(DOORS)


@pytest.fixture(params=POLLERS_EVERY_DOOR)
def pollers_door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """Each of them in turn."""
    with open_door(request.param) as one:
        yield one


def test_a_poller_without_news_waits_its_time(pollers_door: Door) -> None:
    """Zero is a look; anything else sleeps, and not much longer than asked."""
    poller = pollers_door.poller()
    poller.register(pollers_door.pair()[0], POLLERS_KEY)
    assert poller.wait(0) == []
    begin = time.monotonic()
    assert poller.wait(0.05) == []
    assert time.monotonic() - begin >= 0.045


def test_bytes_are_news_until_they_are_read(pollers_door: Door) -> None:
    """A reader that takes only some is told again."""
    left, right = pollers_door.pair()
    poller = pollers_door.poller()
    poller.register(right, POLLERS_KEY)
    left.sendmsg([b"ab"])
    assert wait_for_event(poller) == [(POLLERS_KEY, True, False)]
    assert poller.wait(0) == [(POLLERS_KEY, True, False)]
    assert read(right, 1) == b"a"
    assert poller.wait(0) == [(POLLERS_KEY, True, False)]
    assert read(right, 1) == b"b"
    assert poller.wait(0) == []


@pytest.mark.parametrize("ending", ["close", "finish"])
def test_the_end_of_a_stream_is_news(pollers_door: Door, ending: str) -> None:
    """It counts as readable: reading tells how it ended."""
    left, right = pollers_door.pair()
    poller = pollers_door.poller()
    poller.register(right, POLLERS_KEY)
    if ending == "close":
        left.close()
    else:
        left.finish(time.monotonic() + 30)
    events = wait_for_event(poller)
    assert [(key, readable) for key, readable, _ in events] == [(POLLERS_KEY, True)]


def test_room_to_write_is_news_only_while_wanted(pollers_door: Door) -> None:
    """Nearly always there is room, so nobody is told unasked."""
    left, _ = pollers_door.pair()
    poller = pollers_door.poller()
    poller.register(left, POLLERS_KEY)
    assert poller.wait(0) == []
    poller.want_write(left, POLLERS_KEY, True)
    assert wait_for_event(poller) == [(POLLERS_KEY, False, True)]
    poller.want_write(left, POLLERS_KEY, False)
    assert all(poller.wait(0) == [] for _ in range(3))


def test_a_stream_that_is_not_to_be_read_is_no_news(pollers_door: Door) -> None:
    """Until it is again: then a thread that waits already is told what had arrived."""
    left, right = pollers_door.pair()
    poller = pollers_door.poller()
    poller.register(right, POLLERS_KEY)
    left.sendmsg([b"x"])
    assert wait_for_event(poller) == [(POLLERS_KEY, True, False)]
    poller.want_read(right, POLLERS_KEY, False)
    assert all(poller.wait(0) == [] for _ in range(3))
    begun = threading.Event()

    def wait() -> object:
        begun.set()
        return wait_for_event(poller, within=2 * PATIENCE)

    waiting = Background(wait)
    begun.wait()
    poller.want_read(right, POLLERS_KEY, True)
    assert waiting.result() == [(POLLERS_KEY, True, False)]


def test_a_full_stream_is_no_news_until_the_other_end_reads(pollers_door: Door) -> None:
    """Then the waiting thread wakes."""
    left, right = pollers_door.pair()
    taken = fill(left)
    poller = pollers_door.poller()
    poller.register(left, POLLERS_KEY)
    poller.want_write(left, POLLERS_KEY, True)
    while poller.wait(0.05):  # the kernel may still move some on
        taken += fill(left)
    waiting = Background(lambda: wait_for_event(poller))
    assert len(read(right, taken)) == taken
    assert waiting.result() == [(POLLERS_KEY, False, True)]


def test_both_news_come_together(pollers_door: Door) -> None:
    """Readable and writable in one event."""
    left, right = pollers_door.pair()
    poller = pollers_door.poller()
    poller.register(left, POLLERS_KEY)
    poller.want_write(left, POLLERS_KEY, True)
    right.sendmsg([b"x"])
    while (events := wait_for_event(poller)) == [(POLLERS_KEY, False, True)]:
        pass
    assert events == [(POLLERS_KEY, True, True)]


def test_streams_are_told_apart(pollers_door: Door) -> None:
    """Each event carries the key of its stream."""
    pairs = {key: pollers_door.pair() for key in range(1, 6)}
    poller = pollers_door.poller()
    for key, (left, _) in pairs.items():
        poller.register(left, key)
    for key in (2, 5):
        pairs[key][1].sendmsg([b"x"])
    while len(events := wait_for_event(poller)) < 2:
        pass
    assert sorted(events) == [(2, True, False), (5, True, False)]


def test_a_wake_ends_a_wait_from_another_thread(pollers_door: Door) -> None:
    """Without an event."""
    poller = pollers_door.poller()
    poller.register(pollers_door.pair()[0], POLLERS_KEY)
    waiting = Background(lambda: poller.wait(30))
    poller.wake()
    assert waiting.result(20) == []


def test_a_wake_before_the_wait_counts_once(pollers_door: Door) -> None:
    """A thread that was about to sleep does not; many wakes are one."""
    poller = pollers_door.poller()
    for _ in range(1000):
        poller.wake()
    begin = time.monotonic()
    assert poller.wait(30) == []
    assert time.monotonic() - begin < 20
    begin = time.monotonic()
    assert poller.wait(0.05) == []
    assert time.monotonic() - begin >= 0.045


@pytest.mark.parametrize("change", ["register", "want_write"])
def test_a_change_takes_effect_while_another_thread_waits(pollers_door: Door, change: str) -> None:
    """Streams come, and writers ask for room, while one thread sleeps for all."""
    left, right = pollers_door.pair()
    poller = pollers_door.poller()
    if change == "want_write":
        poller.register(left, POLLERS_KEY)
    waiting = Background(lambda: wait_for_event(poller, within=60))
    if change == "want_write":
        poller.want_write(left, POLLERS_KEY, True)
        assert waiting.result() == [(POLLERS_KEY, False, True)]
    else:
        right.sendmsg([b"x"])
        poller.register(left, POLLERS_KEY)
        assert waiting.result() == [(POLLERS_KEY, True, False)]


def test_an_unregistered_stream_is_no_news(pollers_door: Door) -> None:
    """Neither its bytes nor its room, nor when somebody asks for room afterwards."""
    left, right = pollers_door.pair()
    poller = pollers_door.poller()
    poller.register(left, POLLERS_KEY)
    right.sendmsg([b"x"])
    wait_for_event(poller)
    poller.unregister(left)
    poller.want_write(left, POLLERS_KEY, True)
    assert all(poller.wait(0.01) == [] for _ in range(3))
    begin = time.monotonic()
    poller.wait(0.05)
    assert time.monotonic() - begin >= 0.045  # its bytes wake nobody
    poller.unregister(left)  # harmless


@pytest.mark.parametrize("order", ["unregister, close", "close, unregister", "close"])
def test_a_key_can_be_used_again(pollers_door: Door, order: str) -> None:
    """The next connection of the same rank is not taken for the last one."""
    poller = pollers_door.poller()
    for turn in range(3):
        left, right = pollers_door.pair()
        poller.register(left, POLLERS_KEY)
        right.sendmsg([bytes([turn])])
        assert wait_for_event(poller) == [(POLLERS_KEY, True, False)]
        assert read(left, 1) == bytes([turn])
        for step in order.split(", "):
            if step == "close":
                left.close()
            else:
                poller.unregister(left)
        poller.want_write(left, POLLERS_KEY, True)  # a writer that has not heard yet


def test_a_closed_poller_may_be_woken_and_closed(pollers_door: Door) -> None:
    """Threads that are late do no harm."""
    poller = pollers_door.poller()
    poller.close()
    poller.wake()
    poller.close()
