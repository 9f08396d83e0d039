"""What every door to the network keeps to: TCP with either poller, and the twin in memory."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.doors import DOORS, Door, fill, open_door, read, wait_for_event

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
    with pytest.raises(BlockingIOError):
        left.sendmsg([b"more"])
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
