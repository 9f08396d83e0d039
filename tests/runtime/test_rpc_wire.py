"""Bytes go over a wire and frames come out of it, however they are cut on the way."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import MalformedFrame, RpcInvalidMessage
from potluck.backend.streams import PeerStream
from potluck.core.calls_assembly import Assembly
from potluck.core.calls_frames import Frame, FrameKind, pack_frame
from potluck.core.calls_outbox import Outbox
from potluck.net.memory import pipe
from potluck.runtime.rpc_reader import Reader
from potluck.runtime.rpc_wire import RECORD, SealedWire, Wire, make_wire
from support import sealed_pair

LIMIT = 1 << 20


def wires(*, sealed: bool, capacity: int = 1 << 16, first: bytes = b"") -> tuple[Wire, Wire]:
    """Two connected ends."""
    left, right = pipe(("left", "right"), capacity=capacity)
    if not sealed:
        return make_wire(PeerStream(left)), make_wire(PeerStream(right, None, first))
    pair = sealed_pair.connect()
    return (
        make_wire(PeerStream(left, (pair.a_seals, pair.a_opens))),
        make_wire(PeerStream(right, (pair.b_seals, pair.b_opens), first)),
    )


def read_what_is_here(wire: Wire, size: int = 4096) -> bytes:
    """Everything until there is no more."""
    found = b""
    view = memoryview(bytearray(size))
    while True:
        try:
            count = wire.recv_into(view)
        except BlockingIOError:
            return found
        if not count:
            return found
        found += view[:count]


@pytest.mark.parametrize("sealed", [False, True])
def test_bytes_arrive_in_order_through_a_narrow_pipe(sealed: bool) -> None:
    """What does not fit is kept and sent later."""
    left, right = wires(sealed=sealed, capacity=1000)
    data, found = random.Random(0).randbytes(50_000), b""
    done = left.push([data[:100], b"", data[100:]])
    while not done:
        assert not left.is_idle
        found += read_what_is_here(right, 77)
        done = left.flush()
    found += read_what_is_here(right)
    assert found == data
    assert left.is_idle


def test_what_came_with_the_opening_comes_first() -> None:
    """And shows in no poller, so it is asked for."""
    left, right = wires(sealed=False, first=b"early ")
    left.push([b"late"])
    assert right.has_more
    assert read_what_is_here(right) == b"early late"
    assert not right.has_more


def test_sealed_records_wait_to_be_read() -> None:
    """Several come at once; the poller knows of none of them."""
    left, right = wires(sealed=True)
    for word in (b"one", b"two"):
        left.push([word])
    view = memoryview(bytearray(3))
    assert right.recv_into(view) == 3
    assert right.has_more
    assert read_what_is_here(right) == b"two"
    assert not right.has_more


def test_nothing_on_a_sealed_wire_is_readable_and_damage_is_noticed() -> None:
    """A single bit is enough."""
    left, right = pipe(("left", "right"), capacity=1 << 16)
    pair = sealed_pair.connect()
    wire = SealedWire(left, (pair.a_seals, pair.a_opens))
    wire.push([b"a secret recipe"])
    raw = bytearray(200)
    count = right.recv_into(memoryview(raw))
    assert b"recipe" not in raw
    raw[count // 2] ^= 1
    broken, _ = pipe(("left", "right"), capacity=1 << 16)
    damaged = SealedWire(broken, (pair.b_seals, pair.b_opens), bytes(raw[:count]))
    with pytest.raises(MalformedFrame):
        damaged.recv_into(memoryview(bytearray(100)))


@pytest.mark.parametrize("size", [0, 16, RECORD + 17, 2**32 - 1])
def test_a_record_of_an_impossible_size_is_refused(size: int) -> None:
    """Before anything is allocated."""
    _, right = wires(sealed=True, first=size.to_bytes(4, "little"))
    with pytest.raises(MalformedFrame, match="sealed record"):
        right.recv_into(memoryview(bytearray(100)))


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 120_000), max_size=6),
    st.integers(500, 70_000),
    st.booleans(),
    st.integers(0),
)
def test_messages_arrive_whole_however_they_are_cut(
    sizes: list[int], capacity: int, sealed: bool, seed: int
) -> None:
    """Short ones and long ones, several at a time."""
    left, right = wires(sealed=sealed, capacity=capacity)
    draw = random.Random(seed)
    outbox, reader = Outbox(piece=10_000), Reader(right, Assembly(LIMIT), LIMIT)
    outbox.allow(LIMIT)
    messages = {number: draw.randbytes(size + 1) for number, size in enumerate(sizes)}
    for number, data in messages.items():
        if len(data) < 1000:
            header = pack_frame(FrameKind.RESPONSE, number, len(data))
            outbox.add_short(header + data)
        else:
            outbox.add_long(FrameKind.RESPONSE, number, [memoryview(data)])
    found: dict[int, bytes] = {}

    def deliver(frame: Frame, data: bytes | memoryview) -> None:
        found[frame.number] = bytes(data)

    while not (left.is_idle and outbox.is_empty and found.keys() == messages.keys()):
        if left.flush() and (buffers := outbox.take()):
            left.push(buffers)
        try:
            reader.read(deliver)
        except BlockingIOError:
            continue
    assert found == messages


@given(st.binary(max_size=300))
def test_any_bytes_are_frames_or_refused(data: bytes) -> None:
    """Nothing else is raised, and no more memory is taken than is allowed."""
    _, right = wires(sealed=False, first=data)
    assembly = Assembly(1000)
    reader = Reader(right, assembly, 1000)
    with contextlib.suppress(BlockingIOError, RpcInvalidMessage):
        while reader.read(lambda *_: None):
            pass
    assert assembly.octets <= 1000
