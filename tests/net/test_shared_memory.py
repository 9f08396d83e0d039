"""Shared memory between two processes: what both get, and what a peer that lies does not get."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from potluck.net.unix_socket import SHARED_SIZE, SLOT_SIZE, SLOTS, SharedMemory, share_memory
from support.threads import PATIENCE, together

Pair = tuple[socket.socket, socket.socket]
SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def soon() -> float:
    """A deadline."""
    return time.monotonic() + PATIENCE


@pytest.fixture
def line() -> Iterator[Pair]:
    """A local socket: the dialler's end, and the other."""
    dialler, called = socket.socketpair()
    with dialler, called:
        yield dialler, called


@contextlib.contextmanager
def shared(line: Pair) -> Iterator[tuple[SharedMemory, SharedMemory]]:
    """Both ends, which must agree to share."""
    here, there = together(
        lambda: share_memory(line[0], soon(), is_dialler=True),
        lambda: share_memory(line[1], soon(), is_dialler=False),
    )
    assert here is not None
    assert there is not None
    with contextlib.closing(here), contextlib.closing(there):
        yield here, there


def descriptors() -> int:
    """How many this process has, without those that wait to be collected."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_one_writes_the_other_reads(line: Pair) -> None:
    """In every slot, both ways; and the socket stays as it was."""
    with shared(line) as ends:
        for one, other in (ends, ends[::-1]):
            for number in range(SLOTS):
                one.mine[number][:5] = b"hell%d" % number
                assert other.theirs[number][:5] == b"hell%d" % number
                assert len(other.theirs[number]) == SLOT_SIZE
    line[0].sendall(b"on")
    assert line[1].recv(10) == b"on"


def test_what_the_other_wrote_can_only_be_read(line: Pair) -> None:
    """A mistake of ours does not reach its memory."""
    with shared(line) as (here, _), pytest.raises(TypeError, match="read-only"):
        here.theirs[0][0] = 1


def test_slots_are_given_back(line: Pair) -> None:
    """In any order, and asking never waits."""
    with shared(line) as (here, there):
        with pytest.raises(BlockingIOError):
            here.take_back()
        there.give_back(3)
        there.give_back(0)
        assert here.take_back() == b"\x03\x00"
        there.close()
        here.give_back(1)  # it has left: no harm
        assert here.take_back() == b""


def test_an_end_that_was_made_to_block_does_not_block(line: Pair) -> None:
    """A peer has had our end in its hands."""
    with shared(line) as (_, there):
        os.set_blocking(there.credits.fileno(), True)
        with pytest.raises(BlockingIOError):
            there.take_back()


def test_memory_is_given_back_when_the_last_piece_is_released(line: Pair) -> None:
    """A piece that is still used stays readable."""
    before = descriptors()
    with shared(line) as (here, there):
        there.mine[2][:3] = b"abc"
        piece = here.theirs[2][:3]
    assert bytes(piece) == b"abc"
    assert descriptors() == before + 1
    piece.release()
    assert descriptors() == before


def test_nobody_else_can_write_or_shrink_it(line: Pair) -> None:
    """Whoever has the descriptor of our memory can map it for reading, and nothing else."""
    dialler, called = line

    def look() -> int:
        _, (descriptor, credits_), _, _ = socket.recv_fds(called, 1, 2)
        os.close(credits_)
        called.sendall(b"\0\0")
        return descriptor

    outcome, descriptor = together(lambda: share_memory(dialler, soon(), is_dialler=True), look)
    assert outcome is None
    assert isinstance(descriptor, int)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, SHARED_SIZE)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
    finally:
        os.close(descriptor)


def memory(size: int = SHARED_SIZE, seals: int = SEALED) -> int:
    """The descriptor of memory."""
    made = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(made, size)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


def of_huge_pages() -> int:
    """Sealed memory of huge pages: its reader is killed where the system has none left."""
    try:
        made = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError:
        pytest.skip("this kernel has no huge pages")
    os.ftruncate(made, SHARED_SIZE)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, SEALED)
    return made


def of_another_user() -> int:
    """Memory that another user owns."""
    if os.geteuid() != 0:
        pytest.skip("only root can give memory to another user")
    made = memory()
    os.fchown(made, 1, 1)
    return made


def a_file() -> int:
    """The descriptor of a file of the right size: its owner can shrink it at any time."""
    made = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)  # noqa: S108 - it has no name
    os.ftruncate(made, SHARED_SIZE)
    return made


LIES: dict[str, list[Callable[[], int]]] = {
    "not sealed": [lambda: memory(seals=0)],
    "too short": [lambda: memory(SHARED_SIZE - 1)],
    "too long": [lambda: memory(SHARED_SIZE + 1)],
    "huge pages": [of_huge_pages],
    "another user": [of_another_user],
    "a file": [a_file],
    "a socket": [lambda: socket.socket(socket.AF_UNIX).detach()],
    "nothing": [],
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_not_sealed_memory_of_the_right_size_is_not_mapped(line: Pair, lie: str) -> None:
    """It could vanish under us.  Both go on over the socket, and no descriptor stays."""
    dialler, called = line
    before = descriptors()
    given = [make() for make in LIES[lie]]
    socket.send_fds(called, [b"\1"], given)
    for descriptor in given:
        os.close(descriptor)
    called.sendall(b"\1")
    assert share_memory(dialler, soon(), is_dialler=True) is None
    assert called.recv(1) == b"\1"
    assert called.recv(1) == b"\0"
    assert descriptors() == before


def test_a_dialler_that_sends_no_socket_shares_nothing(line: Pair) -> None:
    """There would be no way to give a slot back."""
    dialler, called = line
    given = [memory(), memory()]
    socket.send_fds(dialler, [b"\1"], given)
    for descriptor in given:
        os.close(descriptor)
    dialler.sendall(b"\1")
    assert share_memory(called, soon(), is_dialler=False) is None


def test_descriptors_that_nobody_asked_for_do_not_stay(line: Pair) -> None:
    """The last word comes with none; another process could use up those that we may have."""
    dialler, called = line
    before = descriptors()
    called.sendall(b"\0")
    given = [memory() for _ in range(3)]
    socket.send_fds(called, [b"\0"], given)
    for descriptor in given:
        os.close(descriptor)
    assert share_memory(dialler, soon(), is_dialler=True) is None
    assert descriptors() == before


@pytest.mark.parametrize("is_dialler", [False, True])
def test_one_that_cannot_share_is_enough(line: Pair, *, is_dialler: bool) -> None:
    """It says so, and both know."""
    mine, other = line if is_dialler else line[::-1]
    other.sendall(b"\0\0")
    assert share_memory(mine, soon(), is_dialler=is_dialler) is None


@pytest.mark.parametrize("is_dialler", [False, True])
def test_where_the_system_gives_no_memory_nothing_is_shared(
    line: Pair, monkeypatch: pytest.MonkeyPatch, *, is_dialler: bool
) -> None:
    """As in a container that forbids it: the other side hears of it."""

    def refuse(*_: object) -> int:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    mine, other = line if is_dialler else line[::-1]
    other.sendall(b"\1\1")
    assert share_memory(mine, soon(), is_dialler=is_dialler) is None
    assert other.recv(2) == b"\0\0"


def test_one_that_leaves_is_noticed(line: Pair) -> None:
    """At once."""
    line[1].close()
    with pytest.raises(OSError, match=r"left|Broken pipe"):
        share_memory(line[0], soon(), is_dialler=True)


def test_one_that_says_nothing_is_waited_for_until_the_deadline(line: Pair) -> None:
    """And no longer."""
    with pytest.raises(TimeoutError, match="shares memory"):
        share_memory(line[0], time.monotonic() + 0.05, is_dialler=True)
