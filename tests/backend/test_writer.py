"""Writing frames: in order, gathered, in turns, and never from a buffer that was called back."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.backend.writer import GATHER, FrameWriter, Parcel
from potluck.net.frames import HEADER_SIZE, MAX_PIECE, Header, Kind, decode, encode
from support.meshes import frame
from support.threads import Background
from support.valve import Owner, Valve


def frames_in(valve: Valve) -> list[tuple[Header, bytes]]:
    """What was taken, cut into frames; it must end with a whole one."""
    found, place = [], 0
    while place < len(valve.taken):
        header = decode(valve.taken, place, MAX_PIECE)
        place += HEADER_SIZE + header.length
        assert place <= len(valve.taken)
        found.append((header, bytes(valve.taken[place - header.length : place])))
    return found


def make_writer(room: int = 0) -> tuple[FrameWriter, Valve, list[bool]]:
    """A writer, its stream, and what it asked the poller for."""
    valve, watched = Valve(room), list[bool]()
    return FrameWriter(valve, watched.append), valve, watched  # type: ignore[arg-type]


def parcel(number: int, size: int) -> tuple[Parcel, Owner, bytearray]:
    """A large message, its operation, and its buffer."""
    buffer = bytearray(random.Random(number).randbytes(1) * size)
    owner = Owner()
    made = Parcel(owner, memoryview(buffer), group=0, tag=0)
    made.number = number
    return made, owner, buffer


def test_a_frame_leaves_at_once() -> None:
    """With its payload, in one call, and nobody is asked to watch the stream."""
    writer, valve, watched = make_writer(1000)
    assert writer.write(encode(Kind.EAGER, length=5), memoryview(b"12345"))
    assert valve.taken == frame(Kind.EAGER, b"12345")
    assert valve.calls == [[HEADER_SIZE, 5]]
    assert watched == []
    assert writer.is_idle


@given(st.lists(st.integers(1, 400), max_size=60))
def test_frames_leave_in_order_however_little_the_stream_takes(rooms: list[int]) -> None:
    """Small frames and a parcel, written while the stream takes a few bytes now and then."""
    writer, valve, _ = make_writer()
    large, owner, buffer = parcel(99, 3_000)
    expected = []
    for number in range(12):
        payload = bytes([number]) * (number * 7 % 50)
        header = encode(Kind.EAGER, operation=number, length=len(payload))
        writer.write(header, memoryview(payload))
        expected.append(payload)
        if number == 5:
            writer.send(large)
        if rooms:
            valve.room = rooms.pop()
            writer.flush()
    for room in (*rooms, 1 << 20):
        valve.room = room
        writer.flush()
    frames = frames_in(valve)
    assert [body for header, body in frames if header.kind == Kind.EAGER] == expected
    assert b"".join(body for header, body in frames if header.kind == Kind.DATA) == buffer
    assert owner.done
    assert writer.is_idle


def test_frames_that_wait_leave_together() -> None:
    """In one call for as many buffers as one call takes."""
    writer, valve, _ = make_writer()
    for number in range(20):
        writer.write(encode(Kind.GRANT, operation=number))
    valve.calls.clear()
    valve.room = 1 << 20
    writer.flush()
    assert [header.operation for header, _ in frames_in(valve)] == list(range(20))
    assert list(map(len, valve.calls)) == [GATHER, GATHER, 20 - 2 * GATHER]


def test_the_stream_is_watched_while_something_waits() -> None:
    """And no longer: a poller that is asked without need never sleeps."""
    writer, valve, watched = make_writer(10)
    writer.write(encode(Kind.GRANT))
    assert watched == [True]
    writer.write(encode(Kind.GRANT))
    writer.flush()
    assert watched == [True]
    valve.room = 1 << 20
    writer.flush()
    assert watched == [True, False]
    assert len(frames_in(valve)) == 2


def test_two_parcels_take_turns() -> None:
    """Piece by piece: the second large message does not wait for the first."""
    writer, valve, _ = make_writer()
    for number in (1, 2):
        writer.send(parcel(number, 12 * MAX_PIECE)[0])
    valve.room = 1 << 30
    writer.flush()
    numbers = [header.operation for header, _ in frames_in(valve)]
    assert sorted(numbers) == [1] * 12 + [2] * 12
    in_line = GATHER // 2
    assert numbers[:in_line] == [1] * in_line
    assert numbers[in_line : in_line + 16] in ([1, 2] * 8, [2, 1] * 8)


def test_a_small_frame_waits_for_a_few_pieces_only() -> None:
    """Behind 64 MiB it leaves after what is already in line."""
    writer, valve, _ = make_writer()
    writer.send(parcel(1, 64 * MAX_PIECE)[0])
    writer.write(encode(Kind.TOKEN))
    valve.room = 1 << 30
    writer.flush()
    kinds = [header.kind for header, _ in frames_in(valve)]
    assert kinds.index(Kind.TOKEN) <= GATHER // 2
    assert len(kinds) == 65


def test_pieces_are_numbered_and_say_where_they_belong() -> None:
    """Every piece carries group, tag, message number and its own."""
    writer, valve, _ = make_writer(1 << 30)
    made = Parcel(Owner(), memoryview(bytes(2 * MAX_PIECE + 5)), group=7, tag=3)
    made.number = 11
    writer.send(made)
    facts = [(h.group, h.tag, h.operation, h.piece, h.length) for h, _ in frames_in(valve)]
    assert facts == [(7, 3, 11, 0, MAX_PIECE), (7, 3, 11, 1, MAX_PIECE), (7, 3, 11, 2, 5)]


def test_an_owner_is_finished_when_its_last_byte_has_left() -> None:
    """Not before, and its thread wakes."""
    writer, valve, _ = make_writer()
    made, owner, _ = parcel(1, MAX_PIECE + 10)
    writer.send(made)
    valve.room = 2 * HEADER_SIZE + MAX_PIECE + 9
    writer.flush()
    assert not owner.done
    valve.room = 1
    writer.flush()
    assert owner.done
    assert owner.error is None


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_frame_that_could_not_leave_is_adopted(size: int, behind: bool) -> None:
    """Its operation is finished with its last byte, whether it was first in line or behind."""
    writer, valve, _ = make_writer(10)
    if behind:
        writer.write(encode(Kind.GRANT))
    owner = Owner()
    header = encode(Kind.EAGER, length=size)
    assert not writer.write(header, memoryview(bytes(size)))
    writer.adopt(owner)
    assert not owner.done
    valve.room = 1 << 20
    writer.flush()
    assert owner.done
    assert frames_in(valve)[-1][0].length == size


def test_a_recalled_parcel_is_copied_only_where_it_is_in_line() -> None:
    """Of 64 MiB a few pieces; the caller's buffer may change, what leaves does not."""
    writer, valve, _ = make_writer(MAX_PIECE + MAX_PIECE // 2)
    made, owner, buffer = parcel(1, 64 * MAX_PIECE)
    writer.send(made)
    original = bytes(buffer[:1])
    tracemalloc.start()
    try:
        writer.recall(owner)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= (GATHER // 2 + 1) * MAX_PIECE
    buffer[:] = bytes(len(buffer))
    writer.write(encode(Kind.WITHDRAW, operation=1))
    valve.room = 1 << 30
    writer.flush()
    *pieces, last = frames_in(valve)
    assert last[0].kind == Kind.WITHDRAW
    assert len(pieces) <= GATHER
    assert all(body == original * MAX_PIECE for _, body in pieces)
    assert not owner.done
    assert writer.is_idle


@pytest.mark.parametrize("behind", [False, True])
def test_a_recalled_frame_is_copied(behind: bool) -> None:
    """A small message half gone, or still behind others, leaves as it was."""
    writer, valve, _ = make_writer(0 if behind else HEADER_SIZE + 3)
    if behind:
        writer.write(encode(Kind.GRANT))
    buffer, owner = bytearray(b"0123456789"), Owner()
    writer.write(encode(Kind.EAGER, length=10), memoryview(buffer))
    writer.adopt(owner)
    writer.recall(owner)
    buffer[:] = b"XXXXXXXXXX"
    valve.room = 1000
    writer.flush()
    assert frames_in(valve)[-1][1] == b"0123456789"
    assert not owner.done


def test_a_broken_stream_reads_from_no_buffer_any_more() -> None:
    """Nothing is queued, nobody is told that its bytes have left; the reader will say why."""
    writer, valve, _ = make_writer()
    made, owner, buffer = parcel(1, 100)
    writer.send(made)
    valve.broken = True
    writer.flush()
    assert writer.is_broken
    assert writer.is_idle
    assert not writer.write(encode(Kind.GRANT))
    writer.adopt(owner)
    writer.flush()
    assert not owner.done
    del made
    buffer.append(1)  # no view of it is left


def test_a_write_from_another_thread_wakes_the_owner() -> None:
    """A thread that waits for its bytes to leave returns when somebody else flushes them."""
    writer, valve, _ = make_writer()
    made, owner, _ = parcel(1, 100)
    writer.send(made)
    valve.room = 1000
    Background(writer.flush).result()
    owner.wait(0)
