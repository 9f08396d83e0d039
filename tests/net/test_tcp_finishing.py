"""Finishing a TCP stream: everything written arrives, and nobody holds up the one who leaves."""

from __future__ import annotations

import fcntl
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
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
    monkeypatch.setattr(tcp, "unacknowledged", lambda _: -1)
    left, right = pair
    left.sendmsg([b"last"])
    finishing = Background(lambda: left.finish(soon()))
    assert read(right, 5) == b"last"
    right.finish(soon(0))
    finishing.result()


@pytest.fixture
def local_pair() -> Iterator[tuple[tcp.LocalStream, tcp.LocalStream]]:
    """Two streams over a local socket."""
    left, right = (tcp.LocalStream(sock, "here") for sock in socket.socketpair())
    yield left, right
    left.close()
    right.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has shortcuts")
def test_what_was_written_to_a_local_socket_outlives_its_writer(
    local_pair: tuple[tcp.LocalStream, tcp.LocalStream],
) -> None:
    """Even one that closes at once with unread bytes: the reset comes behind the last words."""
    left, right = local_pair
    fill(right)
    written = fill(left)
    left.close()
    with pytest.raises(BrokenPipeError):
        right.sendmsg([b"x"])
    assert len(read(right, written)) == written
    with pytest.raises(ConnectionResetError):
        right.recv_into(memoryview(bytearray(1)))


def test_finishing_a_local_stream_waits_for_a_reader_only_until_the_deadline(
    local_pair: tuple[tcp.LocalStream, tcp.LocalStream],
) -> None:
    """And what it wrote is there afterwards, followed by an end instead of a reset."""
    left, right = local_pair
    right.sendmsg([b"unread"])
    written = fill(left)
    left.finish(soon(0.05))
    assert len(read(right, written)) == written
    assert right.recv_into(memoryview(bytearray(1))) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has shortcuts")
def test_a_local_socket_holds_messages_for_a_busy_rank_as_tcp_does(
    local_pair: tuple[tcp.LocalStream, tcp.LocalStream],
) -> None:
    """As far as the system allows; a stream that is read all the time keeps to the cache."""
    allowed = int(Path("/proc/sys/net/core/wmem_max").read_text())
    left, _ = local_pair
    assert buffer_of(left) == 2 * min(allowed, tcp.MESSAGES_BUFFER)
    left.keep_in_cache()
    assert buffer_of(left) == 2 * min(allowed, tcp.LOOPBACK_BUFFER)


def buffer_of(stream: tcp.SocketStream) -> int:
    """Bytes that may wait on their way out; Linux doubles what was asked for."""
    return stream._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
