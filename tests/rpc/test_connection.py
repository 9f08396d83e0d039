"""Frames of remote calls: whole and in order, however the bytes are cut on the way."""

from __future__ import annotations

import contextlib
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import RpcInvalidMessage
from potluck.rpc.connection import FrameAssembler
from potluck.rpc.protocol import Assembly, CallOutbox, FrameKind, RpcFrame, pack_frame
from support.sealed_pair import wires

LIMIT = 1 << 20


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
    outbox, reader = CallOutbox(piece=10_000), FrameAssembler(right, Assembly(LIMIT), LIMIT)
    outbox.allow(LIMIT)
    messages = {number: draw.randbytes(size + 1) for number, size in enumerate(sizes)}
    for number, data in messages.items():
        if len(data) < 1000:
            header = pack_frame(FrameKind.RESPONSE, number, len(data))
            outbox.add_short(header + data)
        else:
            outbox.add_long(FrameKind.RESPONSE, number, [memoryview(data)])
    found: dict[int, bytes] = {}

    def deliver(frame: RpcFrame, data: bytes | memoryview) -> None:
        found[frame.number] = bytes(data)

    while not (left.is_flushed and outbox.is_empty and found.keys() == messages.keys()):
        if left.flush() and (buffers := outbox.take()):
            left.send(buffers)
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
    reader = FrameAssembler(right, assembly, 1000)
    with contextlib.suppress(BlockingIOError, RpcInvalidMessage):
        while reader.read(lambda *_: None):
            pass
    assert sum(len(each.view) for each in assembly._parts.values()) <= 1000
