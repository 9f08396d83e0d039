"""What every poller keeps to: epoll, selectors, and the twin in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from support.doors import DOORS, Door, fill, open_door, read, wait_for_event
from support.threads import Background

KEY = 7
EVERY_DOOR = sorted(DOORS)


@pytest.fixture(params=EVERY_DOOR)
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """Each of them in turn."""
    with open_door(request.param) as one:
        yield one


def test_a_poller_without_news_waits_its_time(door: Door) -> None:
    """Zero is a look; anything else sleeps, and not much longer than asked."""
    poller = door.poller()
    poller.register(door.pair()[0], KEY)
    assert poller.wait(0) == []
    begin = time.monotonic()
    assert poller.wait(0.05) == []
    assert time.monotonic() - begin >= 0.045


def test_bytes_are_news_until_they_are_read(door: Door) -> None:
    """A reader that takes only some is told again."""
    left, right = door.pair()
    poller = door.poller()
    poller.register(right, KEY)
    left.sendmsg([b"ab"])
    assert wait_for_event(poller) == [(KEY, True, False)]
    assert poller.wait(0) == [(KEY, True, False)]
    assert read(right, 1) == b"a"
    assert poller.wait(0) == [(KEY, True, False)]
    assert read(right, 1) == b"b"
    assert poller.wait(0) == []


@pytest.mark.parametrize("ending", ["close", "finish"])
def test_the_end_of_a_stream_is_news(door: Door, ending: str) -> None:
    """It counts as readable: reading tells how it ended."""
    left, right = door.pair()
    poller = door.poller()
    poller.register(right, KEY)
    if ending == "close":
        left.close()
    else:
        left.finish(time.monotonic() + 30)
    events = wait_for_event(poller)
    assert [(key, readable) for key, readable, _ in events] == [(KEY, True)]


def test_room_to_write_is_news_only_while_wanted(door: Door) -> None:
    """Nearly always there is room, so nobody is told unasked."""
    left, _ = door.pair()
    poller = door.poller()
    poller.register(left, KEY)
    assert poller.wait(0) == []
    poller.want_write(left, KEY, True)
    assert wait_for_event(poller) == [(KEY, False, True)]
    poller.want_write(left, KEY, False)
    assert all(poller.wait(0) == [] for _ in range(3))


def test_a_full_stream_is_no_news_until_the_other_end_reads(door: Door) -> None:
    """Then the waiting thread wakes."""
    left, right = door.pair()
    taken = fill(left)
    poller = door.poller()
    poller.register(left, KEY)
    poller.want_write(left, KEY, True)
    while poller.wait(0.05):  # the kernel may still move some on
        taken += fill(left)
    waiting = Background(lambda: wait_for_event(poller))
    assert len(read(right, taken)) == taken
    assert waiting.result() == [(KEY, False, True)]


def test_both_news_come_together(door: Door) -> None:
    """Readable and writable in one event."""
    left, right = door.pair()
    poller = door.poller()
    poller.register(left, KEY)
    poller.want_write(left, KEY, True)
    right.sendmsg([b"x"])
    while (events := wait_for_event(poller)) == [(KEY, False, True)]:
        pass
    assert events == [(KEY, True, True)]


def test_streams_are_told_apart(door: Door) -> None:
    """Each event carries the key of its stream."""
    pairs = {key: door.pair() for key in range(1, 6)}
    poller = door.poller()
    for key, (left, _) in pairs.items():
        poller.register(left, key)
    for key in (2, 5):
        pairs[key][1].sendmsg([b"x"])
    while len(events := wait_for_event(poller)) < 2:
        pass
    assert sorted(events) == [(2, True, False), (5, True, False)]


def test_a_wake_ends_a_wait_from_another_thread(door: Door) -> None:
    """Without an event."""
    poller = door.poller()
    poller.register(door.pair()[0], KEY)
    waiting = Background(lambda: poller.wait(30))
    poller.wake()
    assert waiting.result(20) == []


def test_a_wake_before_the_wait_counts_once(door: Door) -> None:
    """A thread that was about to sleep does not; many wakes are one."""
    poller = door.poller()
    for _ in range(1000):
        poller.wake()
    begin = time.monotonic()
    assert poller.wait(30) == []
    assert time.monotonic() - begin < 20
    begin = time.monotonic()
    assert poller.wait(0.05) == []
    assert time.monotonic() - begin >= 0.045


@pytest.mark.parametrize("change", ["register", "want_write"])
def test_a_change_takes_effect_while_another_thread_waits(door: Door, change: str) -> None:
    """Streams come, and writers ask for room, while one thread sleeps for all."""
    left, right = door.pair()
    poller = door.poller()
    if change == "want_write":
        poller.register(left, KEY)
    waiting = Background(lambda: wait_for_event(poller, within=60))
    if change == "want_write":
        poller.want_write(left, KEY, True)
        assert waiting.result() == [(KEY, False, True)]
    else:
        right.sendmsg([b"x"])
        poller.register(left, KEY)
        assert waiting.result() == [(KEY, True, False)]


def test_an_unregistered_stream_is_no_news(door: Door) -> None:
    """Neither its bytes nor its room, nor when somebody asks for room afterwards."""
    left, right = door.pair()
    poller = door.poller()
    poller.register(left, KEY)
    right.sendmsg([b"x"])
    wait_for_event(poller)
    poller.unregister(left)
    poller.want_write(left, KEY, True)
    assert all(poller.wait(0.01) == [] for _ in range(3))
    poller.unregister(left)  # harmless


@pytest.mark.parametrize("order", ["unregister, close", "close, unregister", "close"])
def test_a_key_can_be_used_again(door: Door, order: str) -> None:
    """The next connection of the same rank is not taken for the last one."""
    poller = door.poller()
    for turn in range(3):
        left, right = door.pair()
        poller.register(left, KEY)
        right.sendmsg([bytes([turn])])
        assert wait_for_event(poller) == [(KEY, True, False)]
        assert read(left, 1) == bytes([turn])
        for step in order.split(", "):
            if step == "close":
                left.close()
            else:
                poller.unregister(left)
        poller.want_write(left, KEY, True)  # a writer that has not heard yet


def test_a_closed_poller_may_be_woken_and_closed(door: Door) -> None:
    """Threads that are late do no harm."""
    poller = door.poller()
    poller.close()
    poller.wake()
    poller.close()
