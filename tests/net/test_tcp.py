"""TCP: the options of every socket, finishing without loss, dialling and listening.

What the streams and pollers have in common with the twin in memory is in ``test_transport.py``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._platform import HAS_EPOLL, PACING_RATE
from potluck.errors import MalformedFrame
from potluck.net import tcp
from potluck.net.addresses import Address
from potluck.net.tcp import LONGEST, EndpointHint, free_ports
from support.doors import LOOPBACKS, fill, read, socket_pair
from support.hellos import drop
from support.ports import free_port
from support.threads import Background, eventually

LOOPBACK = "127.0.0.1"


def soon(seconds: float = 30.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


# -- options ---------------------------------------------------------------------------------------


def test_every_connection_has_the_options() -> None:
    """No delay for small frames, a vanished host is noticed in 25 s, and nothing ever blocks."""
    for sock in socket_pair():
        with contextlib.closing(tcp.TcpStream(sock)):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert not sock.getblocking()
            for option, value in (
                ("TCP_KEEPIDLE", 10),
                ("TCP_KEEPALIVE", 10),
                ("TCP_KEEPINTVL", 5),
                ("TCP_KEEPCNT", 3),
            ):
                if hasattr(socket, option):
                    assert sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) == value


def test_a_pace_may_be_faster_than_the_system_can_say() -> None:
    """Many ranks of one machine may have a fast cable together."""
    for sock in socket_pair():
        with contextlib.closing(tcp.TcpStream(sock)) as stream:
            stream.pace(1 << 40)
            if PACING_RATE is not None:
                assert sock.getsockopt(socket.SOL_SOCKET, PACING_RATE) == tcp.FASTEST_PACE


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_stream_names_its_peer_as_one_writes_an_address(host: str) -> None:
    """So that it can be pasted into a command."""
    left, right = socket_pair(host)
    port = right.getsockname()[1]
    with contextlib.closing(tcp.TcpStream(left)) as stream, right:
        assert stream.peer_name == str(Address(host, port))


def test_a_socket_for_both_families_shows_ipv4_as_such() -> None:
    """Nobody looks for ::ffff:127.0.0.1 in a list of machines."""
    with (
        tcp.listen("", 0) as listener,
        socket.create_connection((LOOPBACK, listener.getsockname()[1])) as caller,
    ):
        listener.setblocking(True)
        sock, _ = listener.accept()
        with contextlib.closing(tcp.TcpStream(sock)) as stream:
            assert stream.peer_name == f"{LOOPBACK}:{caller.getsockname()[1]}"


def test_a_peer_that_left_before_we_looked_has_no_name() -> None:
    """That is no reason to fail here: reading will tell."""
    with contextlib.closing(tcp.TcpStream(socket.socket())) as stream:
        assert stream.peer_name == "unknown"


def test_without_gathering_writes_the_buffers_are_joined() -> None:
    """Some platforms have no sendmsg."""

    class Plain(socket.socket):
        sendmsg = property()  # looks as if it were not there

    left, right = socket_pair()
    plain = Plain(fileno=left.detach())
    with contextlib.closing(tcp.TcpStream(plain)) as stream, right:
        assert stream.sendmsg([b"ab", memoryview(b"cd")]) == 4
        assert right.recv(10) == b"abcd"


# -- dialling --------------------------------------------------------------------------------------


def test_dialling_nobody_is_refused() -> None:
    """At once, with the system's own error."""
    with pytest.raises(ConnectionRefusedError):
        tcp.connect(Address(LOOPBACK, free_port()), soon())


def test_dialling_reaches_a_name_on_either_family() -> None:
    """A name with several addresses is tried in the resolver's order until one answers."""
    with tcp.listen(LOOPBACK, 0) as listener:
        address = Address("localhost", listener.getsockname()[1])
        with tcp.connect(address, soon()) as sock:
            assert sock.getpeername()[0] == LOOPBACK
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # hellos do not wait


def test_dialling_an_unknown_name_fails_as_an_os_error() -> None:
    """Callers handle one kind of error."""
    with pytest.raises(OSError):  # noqa: PT011 - the words are the resolver's
        tcp.connect(Address("no-such-host.invalid", 1), soon())


def test_dialling_without_time_left_does_not_begin() -> None:
    """The deadline is absolute."""
    with tcp.listen(LOOPBACK, 0) as listener, pytest.raises(TimeoutError):
        tcp.connect(Address(LOOPBACK, listener.getsockname()[1]), soon(-1))


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port whose connection attempts get no answer: its queue is full and nobody accepts."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=0))
        port = int(listener.getsockname()[1])
        for _ in range(20):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex((LOOPBACK, port))
        yield port


def test_dialling_one_that_does_not_answer_ends_at_the_deadline(silent_port: int) -> None:
    """A machine that is switched off says nothing at all."""
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        tcp.connect(Address(LOOPBACK, silent_port), soon(0.2))
    assert time.monotonic() - begin < 10


def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each address gets a bounded part of the time."""
    monkeypatch.setattr(tcp, "CONNECT_ATTEMPT", 0.1)
    with tcp.listen(LOOPBACK, 0) as listener:
        answers = [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", (LOOPBACK, port))
            for port in (silent_port, listener.getsockname()[1])
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
        with tcp.connect(Address("desk", 1), soon()) as sock:
            assert sock.getpeername() == listener.getsockname()


def test_a_socket_that_reached_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dialling a free port of this machine can draw the same port for our own end."""
    made = []

    class Unlucky(socket.socket):
        def connect(self, target: Any) -> None:
            self.bind(target)
            super().connect(target)
            assert self.getsockname() == self.getpeername()
            made.append(self)

    address = Address(LOOPBACK, free_port())
    monkeypatch.setattr(socket, "socket", Unlucky)
    with pytest.raises(ConnectionRefusedError):
        tcp.connect(address, soon())
    assert [sock.fileno() for sock in made] == [-1]


# -- listening -------------------------------------------------------------------------------------


def test_without_a_host_both_families_are_served() -> None:
    """One port for everybody."""
    with tcp.listen("", 0) as listener:
        port = listener.getsockname()[1]
        for host in LOOPBACKS:
            with tcp.connect(Address(host, port), soon()):
                assert select.select([listener], [], [], 30)[0]
                listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_without_ipv6_the_other_family_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may have been built without it."""
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with tcp.listen("", 0) as listener:
        assert listener.family == socket.AF_INET


@pytest.mark.parametrize("host", [*LOOPBACKS, "localhost"])
def test_with_a_host_only_that_address_is_served(host: str) -> None:
    """Nobody from outside reaches a listener on loopback."""
    with tcp.listen(host, 0) as listener:
        here = listener.getsockname()[0]
        assert here in LOOPBACKS
        with tcp.connect(Address(here, listener.getsockname()[1]), soon()) as caller:
            assert caller.family == listener.family


def test_the_first_address_of_a_name_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the resolver's order, which callers take as well."""
    answers = [
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in ("127.0.0.2", LOOPBACK)
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    with tcp.listen("desk", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.2"


def test_a_port_in_use_is_an_error() -> None:
    """Two listeners never share one by mistake, on no family."""
    with tcp.listen("", 0) as listener:
        port = listener.getsockname()[1]
        for host in ("", LOOPBACK):
            with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
                tcp.listen(host, port)


def test_a_port_is_free_again_as_soon_as_its_listener_is_closed() -> None:
    """A job that is restarted need not wait for old connections to be forgotten."""
    port = free_port()
    with (
        tcp.listen(LOOPBACK, port) as listener,
        tcp.connect(Address(LOOPBACK, port), soon()) as caller,
    ):
        assert select.select([listener], [], [], 30)[0]
        listener.accept()[0].close()  # we end it first: the port is in TIME_WAIT
        assert caller.recv(1) == b""
    tcp.listen(LOOPBACK, port).close()


# -- pollers ---------------------------------------------------------------------------------------


def test_the_poller_is_the_fastest_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is epoll where the platform has it."""
    with contextlib.closing(tcp.make_poller()) as poller:
        assert type(poller) is (tcp.EpollPoller if HAS_EPOLL else tcp.SelectorPoller)
    monkeypatch.setattr(tcp, "HAS_EPOLL", False)
    with contextlib.closing(tcp.make_poller()) as poller:
        assert isinstance(poller, tcp.SelectorPoller)


@pytest.mark.skipif(not HAS_EPOLL, reason="needs epoll")
def test_a_late_wake_touches_nobody_elses_file() -> None:
    """The number of a closed descriptor soon belongs to another file."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    poller = tcp.EpollPoller()
    number = poller._wake
    poller.close()
    os.dup2(writer, number)
    try:
        poller.wake()
        with pytest.raises(BlockingIOError):
            os.read(reader, 8)
    finally:
        for descriptor in (reader, writer, number):
            os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# Finishing a TCP stream: everything written arrives, and nobody holds up the one who leaves.


@pytest.fixture
def pair() -> Iterator[tuple[tcp.TcpStream, tcp.TcpStream]]:
    """Two connected streams."""
    left, right = map(tcp.TcpStream, socket_pair())
    yield left, right
    left.close()
    right.close()


def test_finishing_delivers_everything_although_we_have_not_read_all(
    pair: tuple[tcp.TcpStream, tcp.TcpStream],
) -> None:
    """A plain close would answer unread bytes with a reset and lose what is under way."""
    left, right = pair
    fill(right)
    written = fill(left)
    finishing = Background(lambda: left.finish(soon()))
    assert len(read(right, written)) == written

    def has_ended() -> bool:
        try:
            return right.recv_into(memoryview(bytearray(1))) == 0
        except BlockingIOError:  # the last bytes were there before the end
            return False

    eventually(has_ended)
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


# --------------------------------------------------------------------------------------------------
# Whereabouts: what a process says of where it is, and what others make of it.


def test_it_survives_the_way() -> None:
    """The same comes out at the other end, with as many ports as were asked for."""
    here = EndpointHint.here(3)
    assert EndpointHint.from_bytes(here.to_bytes(), "rank 1") == here
    assert len(set(here.ports)) == 3
    assert here.machine == EndpointHint.here().machine


def test_addresses_fit_who_asks() -> None:
    """Loopback among processes of one machine, or where there is nothing else."""
    there = EndpointHint("m", ["10.0.0.5", "fe80::1"], [7, 8])
    assert there.addresses(is_local=True) == ["127.0.0.1:7", "127.0.0.1:8"]
    assert there.addresses(is_local=False)[:3] == ["10.0.0.5:7", "[fe80::1]:7", "10.0.0.5:8"]
    assert there.addresses(is_local=False, also="desk.vpn")[0] == "desk.vpn:7"
    assert there.addresses(is_local=True, also="desk.vpn") == ["127.0.0.1:7", "127.0.0.1:8"]
    odd = EndpointHint("m", ["evil.example", "10.0.0.5:1", "a b", "fe80::1%eth0"], [7])
    assert odd.addresses(is_local=False) == ["[fe80::1%eth0]:7"]
    assert EndpointHint("m", [], [7]).addresses(is_local=False) == ["127.0.0.1:7"]


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{}", b"null", b"\xff", b'{"machine": 1, "hosts": [], "ports": []}'),
        *(b'{"machine": "", "hosts": [], "ports": [0]}', b" " * (LONGEST + 1)),
        b'{"machine": "", "hosts": [' + b'"a",' * 30 + b'"a"], "ports": []}',
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    """A store is open to everybody: what is in it may be anything."""
    with pytest.raises(MalformedFrame, match="What is said of rank 3"):
        EndpointHint.from_bytes(data, "rank 3")


GOOD = EndpointHint("machine", ["10.0.0.5"], [29500]).to_bytes()


@given(st.binary(max_size=64), st.integers(0, len(GOOD)), st.integers(0, 64))
def test_noise_is_refused_or_means_something(noise: bytes, start: int, length: int) -> None:
    """Also in the middle of what would be right."""
    for data in (noise, GOOD[:start] + noise + GOOD[start + length :]):
        with contextlib.suppress(MalformedFrame):
            found = EndpointHint.from_bytes(data, "rank 0")
            assert all(0 < port < 65536 for port in found.ports)


def test_ports_are_free() -> None:
    """And none is proposed twice."""
    assert len(set(free_ports(8))) == 8
