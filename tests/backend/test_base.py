"""What may be sent and received: every contiguous buffer, in place and without a copy."""

from __future__ import annotations

import array
import contextlib
import gc
import mmap
import tracemalloc
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from potluck import SimulatedBackend, SubBackend, TcpBackend, Timeout
from potluck.backend.base import Backend, read_view, write_view
from support.identifiers import shown
from support.meshes import mesh_group
from support.threads import together

SIZES = [0, 1, 3, 1000, 1 << 20]

DTYPES = [
    *("?", "i1", "u1", "i2", "<i4", ">i4", "u8", "f2", "f4", "f8", ">f8", "g"),
    *("c8", "c16", "S5", "U3", "V7", [("a", "i4"), ("b", "f8", (2,))]),
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (5,), (3, 0, 2), (2, 3), (2, 1, 3, 2)]


def pattern(size: int) -> bytes:
    """Bytes that are all different from their neighbours."""
    return bytes(index * 7 % 251 for index in range(size))


def carry(data: Any, into: Any) -> None:
    """Send one object and receive it into another."""
    left, right = SimulatedBackend.create_group(2)
    with left, right:
        left.send(data, 1)
        right.recv(into, 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda b: array.array("B", b)])
def test_every_kind_of_buffer_can_be_sent(make: Any, size: int) -> None:
    """Bytes, a bytearray, a memoryview and an array hold the same message."""
    into = bytearray(size)
    carry(make(pattern(size)), into)
    assert into == pattern(size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "make", [bytearray, lambda n: memoryview(bytearray(n)), lambda n: array.array("B", bytes(n))]
)
def test_every_kind_of_buffer_can_be_received_into(make: Any, size: int) -> None:
    """The destination is written in place, whatever object holds the memory."""
    into = make(size)
    carry(pattern(size), into)
    assert bytes(into) == pattern(size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_of_any_type_and_shape(dtype: Any, shape: tuple[int, ...]) -> None:
    """Numbers of every width and byte order, complex, text, records; scalars and empty ones."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    source = np.frombuffer(pattern(size), dtype).reshape(shape) if size else np.zeros(shape, dtype)
    into = np.zeros(shape, dtype)
    carry(source, into)
    assert into.tobytes() == source.tobytes()


def test_what_lies_behind_the_view_does_not_matter() -> None:
    """A slice of a larger buffer, a window of an array, mapped memory."""
    whole = bytearray(b"........")
    carry(memoryview(b"no[yes]no")[2:7], memoryview(whole)[1:6])
    assert whole == b".[yes].."
    grid = np.zeros((4, 4), np.float32)
    carry(np.ones((2, 4), np.float32), grid[1:3])
    assert grid.sum(axis=1).tolist() == [0, 4, 4, 0]
    with mmap.mmap(-1, 4096) as mapped:
        carry(pattern(4096), mapped)
        assert mapped[:] == pattern(4096)


def test_sent_and_received_types_may_differ() -> None:
    """A message is bytes: eight of them are one double or four halves."""
    into = array.array("d", [0.0])
    carry(np.array([0, 0, 0, 0x3FF0], "<u2"), into)
    assert into[0] == 1.0


@pytest.mark.parametrize("into", [b"fixed", memoryview(b"fixed"), b""], ids=shown)
def test_a_read_only_destination_is_refused(into: Any) -> None:
    """Before anything is received, with the way out."""
    backend = SimulatedBackend.create_group(1)[0]
    with backend, pytest.raises(TypeError, match=r"it is read-only\. Use a bytearray"):
        backend.recv(into, 0)


def test_a_read_only_array_is_refused() -> None:
    """The flag counts, not the type."""
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="ndarray: it is read-only"):
        write_view(frozen)
    assert len(read_view(frozen)) == 32


@pytest.mark.parametrize(
    "scattered",
    [
        np.zeros((4, 4))[:, ::2],
        np.zeros((3, 4), order="F"),
        np.zeros(8)[::-1],
        memoryview(bytearray(8))[::2],
    ],
    ids=["columns", "fortran", "backwards", "strided"],
)
def test_a_buffer_with_gaps_is_refused(scattered: Any) -> None:
    """A copy behind the caller's back would be slow to send and useless to receive into."""
    for view in (read_view, write_view):
        with pytest.raises(ValueError, match=r"not contiguous in memory\. Make a contiguous copy"):
            view(scattered)


@pytest.mark.parametrize("thing", ["text", 5, None, [1, 2], object()], ids=shown)
def test_an_object_without_a_buffer_is_refused(thing: Any) -> None:
    """The sentence names the type and what to pass instead."""
    for view in (read_view, write_view):
        with pytest.raises(TypeError, match=f"{type(thing).__name__} has no buffer.*Pass bytes"):
            view(thing)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, "datetime64[s]", object], ids=str)
def test_an_array_that_offers_no_buffer_is_refused_in_words(dtype: Any) -> None:
    """Numpy exports no buffer for some types; its own message would not help anybody."""
    for view in (read_view, write_view):
        with pytest.raises((TypeError, ValueError), match="ndarray has no buffer"):
            view(np.zeros(3, dtype))


def test_a_refused_buffer_starts_nothing() -> None:
    """After the refusal the next message is the first."""
    left, right = SimulatedBackend.create_group(2)
    with left, right:
        for wrong in ("text", np.zeros(8)[::2]):
            with pytest.raises((TypeError, ValueError)):
                left.send(wrong, 1)
            with pytest.raises((TypeError, ValueError)):
                right.recv(wrong, 0)
        left.send(b"right", 1)
        into = bytearray(5)
        right.recv(into, 0)
        assert into == b"right"


def test_whole_numbers_of_numpy_are_ranks_and_tags() -> None:
    """Loops over arrays give those."""
    number: Any = np.int64
    left, right = SimulatedBackend.create_group(number(2))
    with left, right:
        left.send(b"1", number(1), tag=number(3))
        right.recv(bytearray(1), 0, tag=3)
        members: Any = np.array([1, 0])
        assert SubBackend(left, members).members == (0, 1)


@pytest.mark.parametrize("size", ["2", 2.0, True, None])
def test_a_world_size_is_a_whole_number(size: Any) -> None:
    """Variables of the environment are text: the error says so instead of comparing them."""
    for create in (SimulatedBackend.create_group, lambda n: TcpBackend(0, n, "localhost:1")):
        with pytest.raises(TypeError, match="world_size must be an integer"):
            create(size)


@pytest.mark.parametrize("member", ["0", 0.0, False])
def test_a_member_of_a_subgroup_is_a_whole_number(member: Any) -> None:
    """What only compares equal would give the group another identity here than elsewhere."""
    left, right = SimulatedBackend.create_group(2)
    with left, right, pytest.raises(TypeError, match="rank must be an integer"):
        SubBackend(left, [member, 1])


@pytest.mark.parametrize("tag", [-1, 1 << 32, 1.5, "tag", None])
def test_a_tag_out_of_range_is_refused(tag: Any) -> None:
    """At the call, in words, and nothing is left behind: all further messages are sent as usual."""
    left, right = SimulatedBackend.create_group(2)
    with left, right:
        for action in (
            partial(left.post_send, b"12345", 1),
            partial(left.post_send, b"12345", 0),
            partial(right.post_recv_into, bytearray(5), 0),
        ):
            with pytest.raises((TypeError, ValueError), match=r"(?i)\btag\b"):
                action(tag=tag)
        left.send(b"1", 1, tag=(1 << 32) - 1)
        right.recv(bytearray(1), 0, tag=(1 << 32) - 1)
        credit = left._outboxes[1]._credit
        assert credit == left._limits.credit - 257


def test_a_large_message_is_not_copied() -> None:
    """64 MiB from one array into another: less than a tenth of that is ever allocated."""
    size = 64 << 20
    source = np.arange(size // 8, dtype=np.int64)
    into = np.zeros_like(source)
    with mesh_group(2) as (left, right):
        tracemalloc.start()
        try:
            together(lambda: left.send(source, 1), lambda: right.recv(into, 0))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert np.array_equal(source, into)
    assert peak < size // 10


@pytest.mark.parametrize("size", [10, 100_000, 3 << 20])
def test_buffers_are_free_afterwards(size: int) -> None:
    """Without waiting for the garbage collector: they can be resized and their memory returned."""
    gc.disable()
    try:
        with mesh_group(2) as (left, right):
            outgoing, incoming = bytearray(size), bytearray(size)
            for _ in range(2):
                together(partial(left.send, outgoing, 1), partial(right.recv, incoming, 0))
                outgoing.append(1)
                incoming.append(1)
            with contextlib.suppress(Timeout):
                right.recv_timeout(incoming, 0, 0)
            incoming.append(1)
    finally:
        gc.enable()


def test_the_blocking_calls_stand_on_the_port() -> None:
    """A backend that implements the port has send, recv, barrier and the context manager."""
    assert Backend.__abstractmethods__ == {"rank", "world_size"}
    with pytest.raises(TypeError, match="abstract"):
        Backend()  # type: ignore[abstract]
