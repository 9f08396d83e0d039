"""Finishing a TCP stream: everything written arrives, and nobody holds up the one who leaves."""

from __future__ import annotations

import fcntl
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from potluck.net import tcp
from support.doors import fill, read, socket_pair
from support.hellos import drop
from support.threads import Background


@pytest.fixture
def pair() -> Iterator[tuple[tcp.TcpStream, tcp.TcpStream]]:
    """Two connected streams."""
    left, right = map(tcp.TcpStream, socket_pair())
    yield left, right
    left.close()
    right.close()


def soon(seconds: float = 30.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def test_finishing_delivers_everything_although_we_have_not_read_all(
    pair: tuple[tcp.TcpStream, tcp.TcpStream],
) -> None:
    """A plain close would answer unread bytes with a reset and lose what is under way."""
    left, right = pair
    fill(right)
    written = fill(left)
    finishing = Background(lambda: left.finish(soon()))
    assert len(read(right, written)) == written
    assert right.recv_into(memoryview(bytearray(1))) == 0
    finishing.result()


def test_finishing_keeps_its_deadline_when_the_peer_does_not_read(
    pair: tuple[tcp.TcpStream, tcp.TcpStream],
) -> None:
    """A stopped peer holds up nobody."""
    left, _ = pair
    fill(left)
    begin = time.monotonic()
    left.finish(soon(0.2))
    assert 0.15 < time.monotonic() - begin < 10


def test_finishing_keeps_its_deadline_when_the_peer_never_stops() -> None:
    """Neither does one that writes faster than we can throw away."""

    class Flooded(socket.socket):
        def recv_into(self, *_: Any) -> int:
            return 1

    left, right = socket_pair()
    flooded = Flooded(fileno=left.detach())
    with right:
        finishing = Background(lambda: tcp.TcpStream(flooded).finish(soon(0.1)))
        finishing.result(10)
        assert flooded.fileno() == -1


def test_finishing_a_connection_that_is_broken_just_closes(
    pair: tuple[tcp.TcpStream, tcp.TcpStream],
) -> None:
    """There is nothing left to deliver."""
    left, right = pair
    drop(right._sock)
    left.finish(soon())
    assert left.fileno() == -1


def test_finishing_works_with_many_open_files() -> None:
    """A data loader may have opened a thousand; select() would refuse the number."""
    left, right = socket_pair()
    high = socket.socket(fileno=fcntl.fcntl(left, fcntl.F_DUPFD, 1500))
    left.close()
    stream = tcp.TcpStream(high)
    with right:
        right.settimeout(30)
        written = fill(stream)
        finishing = Background(lambda: stream.finish(soon()))
        assert sum(iter(lambda: len(right.recv(1 << 16)), 0)) == written
        finishing.result()


def test_where_nobody_can_tell_what_is_unsent_we_wait_for_the_end(
    pair: tuple[tcp.TcpStream, tcp.TcpStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the peer's own end of the stream says that it has everything."""
    monkeypatch.setattr(tcp, "_unsent", lambda _: -1)
    left, right = pair
    left.sendmsg([b"last"])
    finishing = Background(lambda: left.finish(soon()))
    assert read(right, 5) == b"last"
    right.finish(soon(0))
    finishing.result()
