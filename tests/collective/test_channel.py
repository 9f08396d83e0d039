"""Channels: units between two ranks, in clear and sealed, whatever the stream does to them."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.collective.channel import (
    TOGETHER,
    Broken,
    Channel,
    Disagreement,
    PlainChannel,
    SealedChannel,
)
from potluck.collective.fingerprint import Fingerprint
from potluck.errors import MalformedFrame
from potluck.net.aead import SECRET_SIZE, derive_keys, seal_context
from potluck.net.frames import HEADER_SIZE, Kind, encode
from potluck.net.memory import pipe

Pair = tuple[Channel, Channel]

SUM = Fingerprint(0, 0, 11, 0, 0, 100, 0, 7)


def opening(number: int = 1, fingerprint: Fingerprint = SUM) -> bytes:
    """The beginning of an operation."""
    return encode(Kind.COLLECTIVE, operation=number) + fingerprint.pack()


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
    return SealedChannel(1, left, mine), SealedChannel(0, right, theirs)


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
        assert left.is_flushed


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
    with pytest.raises(Broken) as found:
        right.pull(memoryview(bytearray(3)))
    assert found.value.peer == 0
    with pytest.raises(Broken):
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
    with pytest.raises(Broken) as found:
        right.pull(memoryview(inbox))
    assert isinstance(found.value.reason, MalformedFrame)
    assert inbox == bytes(6)


@both_kinds
def test_something_else_than_a_collective_is_refused(make: Callable[[], Pair]) -> None:
    """A frame of another kind, or no frame at all."""
    for data in (encode(Kind.GRANT) + bytes(200), b"GET / HTTP/1.1\r\n\r\n".ljust(200)):
        left, right = make()
        right.begin(opening())
        left.stream.sendmsg([data])
        with pytest.raises(Broken) as found:
            right.pull(memoryview(bytearray(10)))
        assert isinstance(found.value.reason, MalformedFrame)


def test_a_foreign_frame_cannot_make_us_allocate_much() -> None:
    """Its length is checked first."""
    left, right = sealed_pair()
    right.begin(opening())
    left.stream.sendmsg([encode(Kind.COLLECTIVE, length=(1 << 32) - 1) + SUM.pack()])
    with pytest.raises(Broken) as found:
        right.pull(memoryview(bytearray(10)))
    assert "over the limit" in str(found.value.reason)
