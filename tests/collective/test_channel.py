"""Channels: units between two ranks, in clear and sealed, whatever the stream does to them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.collective.channel import (
    LONG,
    MOST_HELD,
    TOGETHER,
    Channel,
    ChannelBroken,
    Disagreement,
    EncryptedChannel,
    PlainChannel,
    SharedChannel,
)
from potluck.collective.fingerprint import Fingerprint
from potluck.collective.program import SlotPool
from potluck.errors import MalformedFrame
from potluck.net.aead import SECRET_SIZE, derive_keys, seal_context
from potluck.net.frames import HEADER_SIZE, FrameType, encode
from potluck.net.memory import pipe
from potluck.net.records import PeerEnded
from potluck.net.tcp import LocalStream
from potluck.net.unix_socket import SLOT_SIZE, SLOTS, SharedMemory, share_memory
from support.threads import PATIENCE, together

Pair = tuple[Channel, Channel]

SUM = Fingerprint(0, 0, 11, 0, 0, 100, 0, 7)


def opening(number: int = 1, fingerprint: Fingerprint = SUM) -> bytes:
    """The beginning of an operation."""
    return encode(FrameType.COLLECTIVE, operation=number) + fingerprint.pack()


def plain_pair(capacity: int = 1 << 16, first: bytes = b"") -> Pair:
    """Two ends in clear."""
    left, right = pipe(("left", "right"), capacity=capacity)
    return PlainChannel(1, left), PlainChannel(0, right, first)


def sealed_pair(capacity: int = 1 << 16) -> Pair:
    """Two ends that share keys."""
    left, right = pipe(("left", "right"), capacity=capacity)
    halves = os.urandom(SECRET_SIZE), os.urandom(SECRET_SIZE)
    context = seal_context(connection=b"", epoch=0, initiator="a", responder="b", lane="test")
    mine = derive_keys(*halves, context=context, initiator=True)
    theirs = derive_keys(*halves, context=context, initiator=False)
    return EncryptedChannel(1, left, mine), EncryptedChannel(0, right, theirs)


both_kinds = pytest.mark.parametrize("make", [plain_pair, sealed_pair])


def carry(source: Channel, target: Channel, units: list[bytes]) -> list[bytes]:
    """Send units from one end to the other, taking turns, as long as something moves."""
    got: list[bytes] = []
    waiting = [memoryview(unit) for unit in units]
    inbox = bytearray(len(units[0])) if units else bytearray()
    is_free = True
    while len(got) < len(units):
        if is_free and waiting:
            is_free = source.push(waiting.pop(0))
        elif not is_free:
            is_free = source.flush()
        while len(got) < len(units) and target.pull(memoryview(inbox)):
            got.append(bytes(inbox))
            if len(got) < len(units):
                inbox = bytearray(len(units[len(got)]))
    return got


@both_kinds
@given(
    st.lists(st.lists(st.integers(0, 3 * TOGETHER), min_size=1, max_size=4), max_size=4),
    st.integers(7, 50_000),
)
def test_units_arrive_whole_and_in_order(
    make: Callable[[int], Pair], operations: list[list[int]], capacity: int
) -> None:
    """Over several operations, on streams that hold any number of bytes."""
    left, right = make(capacity)
    for number, sizes in enumerate(operations):
        units = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
        for channel in (left, right):
            channel.begin(opening(number))
        assert carry(left, right, units) == units
        assert left.flush()


@both_kinds
def test_both_directions_are_independent(make: Callable[[], Pair]) -> None:
    """Each has an opening of its own."""
    left, right = make()
    for channel in (left, right):
        channel.begin(opening())
    assert carry(left, right, [b"there"]) == [b"there"]
    assert carry(right, left, [b"back", b"again"]) == [b"back", b"again"]


@both_kinds
@pytest.mark.parametrize("size", [0, 5, 4 * TOGETHER])
def test_another_operation_is_noticed_at_its_first_byte(
    make: Callable[[], Pair], size: int
) -> None:
    """Whether it sends less or more than ours; nothing of it is delivered."""
    left, right = make()
    other = SUM._replace(elements=3)
    left.begin(opening(1, other))
    right.begin(opening(1))
    left.push(memoryview(b"x" * size))
    inbox = bytearray(100)

    def pull_on() -> None:
        while not right.pull(memoryview(inbox)):
            left.flush()

    with pytest.raises(Disagreement) as found:
        pull_on()
    assert found.value.peer == 0
    assert found.value.operation == 1
    assert found.value.fingerprint == other
    assert inbox == bytearray(100)


@both_kinds
def test_the_end_of_a_stream_names_the_peer(make: Callable[[], Pair]) -> None:
    """In either direction."""
    left, right = make()
    left.begin(opening())
    right.begin(opening())
    left.stream.close()
    with pytest.raises(ChannelBroken) as found:
        right.pull(memoryview(bytearray(3)))
    assert found.value.peer == 0
    with pytest.raises(ChannelBroken):
        right.push(memoryview(b"abc"))


@both_kinds
def test_what_is_kept_may_be_changed_by_its_owner(make: Callable[[int], Pair]) -> None:
    """A full stream takes a part; the rest is ours, and more can follow it."""
    left, right = make(50)
    for channel in (left, right):
        channel.begin(opening())
    unit = bytearray(b"a" * 300)
    assert not left.push(memoryview(unit))
    left.keep()
    unit[:] = b"z" * 300
    assert not left.push(memoryview(b"b" * 10))
    left.keep()
    got = []
    for size in (300, 10):
        inbox = bytearray(size)
        while not right.pull(memoryview(inbox)):
            left.flush()
        got.append(bytes(inbox))
    assert got == [b"a" * 300, b"b" * 10]


def test_what_came_early_is_read_first() -> None:
    """Bytes that were read together with the end of the handshake."""
    data = opening() + b"hello"
    left, right = plain_pair(first=data[:50])
    right.begin(opening())
    left.stream.sendmsg([data[50:]])
    inbox = bytearray(5)
    right.pull(memoryview(inbox))  # all that came early, and no more
    assert right.pull(memoryview(inbox))
    assert inbox == b"hello"


@pytest.mark.parametrize("position", [0, 3, HEADER_SIZE, HEADER_SIZE + 31, -1])
def test_a_changed_bit_on_a_sealed_channel_delivers_nothing(position: int) -> None:
    """In the header, the fingerprint, the unit or its tag."""
    left, right = sealed_pair()
    for channel in (left, right):
        channel.begin(opening())
    sent: list[bytes] = []
    left.stream.sendmsg = lambda buffers, /: sent.append(b"".join(buffers)) or len(sent[-1])  # type: ignore[method-assign,func-returns-value]
    left.push(memoryview(b"secret"))
    damaged = bytearray(sent[0])
    damaged[position] ^= 1
    middle, far = pipe(("a", "b"), capacity=1 << 16)
    middle.sendmsg([bytes(damaged)])
    right.stream = far
    inbox = bytearray(6)
    with pytest.raises(ChannelBroken) as found:
        right.pull(memoryview(inbox))
    assert isinstance(found.value.reason, MalformedFrame)
    assert inbox == bytes(6)


@both_kinds
def test_something_else_than_a_collective_is_refused(make: Callable[[], Pair]) -> None:
    """A frame of another kind, or no frame at all."""
    for data in (encode(FrameType.GRANT) + bytes(200), b"GET / HTTP/1.1\r\n\r\n".ljust(200)):
        left, right = make()
        right.begin(opening())
        left.stream.sendmsg([data])
        with pytest.raises(ChannelBroken) as found:
            right.pull(memoryview(bytearray(10)))
        assert isinstance(found.value.reason, MalformedFrame)


def test_a_foreign_frame_cannot_make_us_allocate_much() -> None:
    """Its length is checked first."""
    left, right = sealed_pair()
    right.begin(opening())
    left.stream.sendmsg([encode(FrameType.COLLECTIVE, length=(1 << 32) - 1) + SUM.pack()])
    with pytest.raises(ChannelBroken) as found:
        right.pull(memoryview(bytearray(10)))
    assert "over the limit" in str(found.value.reason)


# -- shared memory -----------------------------------------------------------------------------


@dataclass
class Shared:
    """Two ends that share memory, and what lies under the right one."""

    left: SharedChannel
    right: SharedChannel
    stream: LocalStream
    memory: SharedMemory


@pytest.fixture
def shared() -> Iterator[Shared]:
    """A pair in the middle of an operation."""
    ends = socket.socketpair()
    soon = time.monotonic() + PATIENCE
    here, there = together(
        lambda: share_memory(ends[0], soon, is_dialler=True),
        lambda: share_memory(ends[1], soon, is_dialler=False),
    )
    assert here is not None
    assert there is not None
    streams = LocalStream(ends[0], "left", here), LocalStream(ends[1], "right", there)
    left, right = SharedChannel(1, streams[0], here), SharedChannel(0, streams[1], there)
    for channel in (left, right):
        channel.begin(opening())
    yield Shared(left, right, streams[1], there)
    for stream in streams:
        stream.close()


def long_unit(number: int, size: int = LONG + 1) -> bytes:
    """A unit that travels in shared memory, unlike any other."""
    return (b"%09d" % number) * (size // 9) + bytes(size % 9)


@pytest.mark.parametrize("sizes", [[SLOT_SIZE] * 9, [LONG + 1, 5, LONG, SLOT_SIZE, SLOT_SIZE + 1]])
def test_long_units_arrive_in_order_among_short_ones(shared: Shared, sizes: list[int]) -> None:
    """More of them than there are slots, in one operation after the other."""
    for number in range(3):
        for channel in (shared.left, shared.right):
            channel.begin(opening(number))
        units = [long_unit(index, size) for index, size in enumerate(sizes)]
        assert carry(shared.left, shared.right, units) == units
        assert shared.left.flush()
        assert carry(shared.right, shared.left, units) == units


def test_a_unit_waits_for_a_slot_and_can_be_kept(shared: Shared) -> None:
    """Its memory may change meanwhile; the credits tell when it goes on."""
    unit = bytearray(long_unit(1))
    inbox = memoryview(bytearray(len(unit)))
    for _ in range(SLOTS):
        assert shared.left.push(memoryview(unit))
        assert shared.left.credits is None
    assert not shared.left.push(memoryview(unit))
    assert shared.left.credits is not None
    shared.left.keep()
    unit[:] = bytes(len(unit))
    assert not shared.left.flush()
    for _ in range(SLOTS):
        assert shared.right.pull(inbox)
    assert shared.left.flush()
    assert shared.left.credits is None
    assert shared.right.pull(inbox)
    assert inbox == long_unit(1)


def test_units_behind_one_that_waits_keep_their_order(shared: Shared) -> None:
    """Long and short ones."""
    units = [*(long_unit(number) for number in range(SLOTS + 2)), b"short", long_unit(99)]
    sent = [shared.left.push(memoryview(unit)) for unit in units]
    assert sent == [True] * SLOTS + [False] * 4
    for unit in units:
        inbox = memoryview(bytearray(len(unit)))
        assert shared.right.pull(inbox)
        assert inbox == unit
        shared.left.flush()
    assert shared.left.flush()


def test_a_slot_stands_for_what_the_peer_wrote_until_it_is_given_back(shared: Shared) -> None:
    """Nothing is copied, and the peer gets its memory back; beyond some, all is copied at once."""
    pool = SlotPool()
    pool.fit(SLOT_SIZE)
    taken = [pool.take() for _ in range(SLOTS)]
    size = LONG + 1
    for number, slot in enumerate(taken):
        assert shared.left.push(memoryview(long_unit(number)))
        assert shared.right.pull(slot.raw[:size], slot)
        assert bytes(slot.array[:size]) == long_unit(number)
    assert [slot.is_borrowed for slot in taken] == [True] * MOST_HELD + [False] * (
        SLOTS - MOST_HELD
    )
    with pytest.raises(ValueError, match="read-only"):
        taken[0].array[0] = 1
    taken[0].make_own()
    assert not taken[0].is_borrowed
    assert bytes(taken[0].array[:size]) == long_unit(0)
    for slot in taken:
        pool.give_back(slot)
        assert not slot.is_borrowed
    for _ in range(SLOTS):
        assert shared.left.push(memoryview(long_unit(0)))


@pytest.mark.parametrize("place", [SLOTS, 255])
def test_a_unit_in_a_slot_that_does_not_exist_ends_the_channel(shared: Shared, place: int) -> None:
    """A peer says so that lies."""
    shared.stream.sendmsg([opening(), bytes([place])])
    with pytest.raises(ChannelBroken) as found:
        shared.left.pull(memoryview(bytearray(LONG + 1)))
    assert isinstance(found.value.reason, MalformedFrame)


def test_a_unit_in_a_slot_that_is_still_held_ends_the_channel(shared: Shared) -> None:
    """It would change under whoever reads it."""
    pool = SlotPool()
    pool.fit(SLOT_SIZE)
    first, second = pool.take(), pool.take()
    shared.stream.sendmsg([opening(), b"\1\1"])
    assert shared.left.pull(first.raw[: LONG + 1], first)
    with pytest.raises(ChannelBroken, match="1"):
        shared.left.pull(second.raw[: LONG + 1], second)


@pytest.mark.parametrize("places", [[SLOTS], [255], [0, 0]])
def test_a_slot_given_back_that_was_not_given_ends_the_channel(
    shared: Shared, places: list[int]
) -> None:
    """Else two units could lie in one place."""
    for _ in range(SLOTS):
        assert shared.left.push(memoryview(long_unit(0)))
    for place in places:
        shared.memory.give_back(place)
    with pytest.raises(ChannelBroken) as found:
        shared.left.push(memoryview(long_unit(0)))
    assert isinstance(found.value.reason, MalformedFrame)


def test_a_peer_that_ends_while_a_unit_waits_is_noticed(shared: Shared) -> None:
    """And what it had sent before can still be read."""
    assert shared.right.push(memoryview(long_unit(7)))
    for _ in range(SLOTS):
        assert shared.left.push(memoryview(long_unit(0)))
    shared.stream.close()
    inbox = memoryview(bytearray(LONG + 1))
    assert shared.left.pull(inbox)
    assert inbox == long_unit(7)
    with pytest.raises(ChannelBroken) as found:
        shared.left.push(memoryview(long_unit(0)))
    assert isinstance(found.value.reason, PeerEnded)


def test_another_operation_is_noticed_before_a_long_unit(shared: Shared) -> None:
    """Nothing of it is delivered."""
    shared.right.begin(opening(1, SUM._replace(elements=3)))
    shared.right.push(memoryview(long_unit(0)))
    with pytest.raises(Disagreement):
        shared.left.pull(memoryview(bytearray(LONG + 1)))
