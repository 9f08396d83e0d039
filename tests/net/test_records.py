"""Bytes over a stream: in order and whole, in clear and encrypted, however few fit at a time."""

from __future__ import annotations

import random

import pytest

from potluck import MalformedFrame
from potluck.net.memory import pipe
from potluck.net.records import RECORD, BufferedStream, EncryptedStream
from support import sealed_pair
from support.allocations import allocating_at_most
from support.sealed_pair import wires


def read_what_is_here(wire: BufferedStream, size: int = 4096) -> bytes:
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
    done = left.send([data[:100], b"", data[100:]])
    while not done:
        assert not left.is_flushed
        found += read_what_is_here(right, 77)
        done = left.flush()
    found += read_what_is_here(right)
    assert found == data
    assert left.is_flushed


def test_what_came_with_the_opening_comes_first() -> None:
    """And shows in no poller, so it is asked for."""
    left, right = wires(sealed=False, first=b"early ")
    left.send([b"late"])
    assert right.has_more
    assert read_what_is_here(right) == b"early late"
    assert not right.has_more


def test_encrypted_records_wait_to_be_read() -> None:
    """Several come at once; the poller knows of none of them."""
    left, right = wires(sealed=True)
    for word in (b"one", b"two"):
        left.send([word])
    view = memoryview(bytearray(3))
    assert right.recv_into(view) == 3
    assert right.has_more
    assert read_what_is_here(right) == b"two"
    assert not right.has_more


def test_nothing_on_an_encrypted_stream_is_readable_and_damage_is_noticed() -> None:
    """A single bit is enough."""
    left, right = pipe(("left", "right"), capacity=1 << 16)
    pair = sealed_pair.connect()
    wire = EncryptedStream(left, (pair.a_seals, pair.a_opens))
    wire.send([b"a secret recipe"])
    raw = bytearray(200)
    count = right.recv_into(memoryview(raw))
    assert b"recipe" not in raw
    raw[count // 2] ^= 1
    broken, _ = pipe(("left", "right"), capacity=1 << 16)
    damaged = EncryptedStream(broken, (pair.b_seals, pair.b_opens), bytes(raw[:count]))
    with pytest.raises(MalformedFrame):
        damaged.recv_into(memoryview(bytearray(100)))


@pytest.mark.parametrize("size", [0, 16, RECORD + 17, 2**32 - 1])
def test_a_record_of_an_impossible_size_is_refused(size: int) -> None:
    """Before anything is allocated for it."""
    _, right = wires(sealed=True, first=size.to_bytes(4, "little"))
    with allocating_at_most(RECORD), pytest.raises(MalformedFrame, match="encrypted record"):
        right.recv_into(memoryview(bytearray(100)))
