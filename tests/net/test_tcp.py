"""TCP: the options of every socket, finishing without loss, dialling and listening.

What the streams and pollers have in common with the twin in memory is in ``test_transport.py``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from potluck.net import pollers, tcp
from potluck.net.addresses import Address
from support.doors import LOOPBACKS, socket_pair
from support.ports import free_port

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


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_stream_names_its_peer_as_one_writes_an_address(host: str) -> None:
    """So that it can be pasted into a command."""
    left, right = socket_pair(host)
    port = right.getsockname()[1]
    with contextlib.closing(tcp.TcpStream(left)) as stream, right:
        assert stream.peer_name == str(Address(host, port))
        assert tcp.local_host(left) == host


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
            assert tcp.local_host(sock) == LOOPBACK


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
        here = tcp.local_host(listener)
        assert here in LOOPBACKS
        with tcp.connect(Address(here, listener.getsockname()[1]), soon()) as caller:
            assert caller.family == listener.family


def test_a_port_in_use_is_an_error() -> None:
    """Two listeners never share one by mistake, on no family."""
    with tcp.listen("", 0) as listener:
        port = listener.getsockname()[1]
        for host in ("", LOOPBACK):
            with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
                tcp.listen(host, port)


def test_a_port_is_free_again_as_soon_as_its_listener_is_closed() -> None:
    """A job that is restarted need not wait for old connections to be forgotten."""
    with tcp.listen(LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
        with tcp.connect(Address(LOOPBACK, port), soon()) as caller:
            assert select.select([listener], [], [], 30)[0]
            listener.accept()[0].close()  # we end it first: the port is in TIME_WAIT
            assert caller.recv(1) == b""
    tcp.listen(LOOPBACK, port).close()


# -- pollers ---------------------------------------------------------------------------------------


def test_the_poller_is_the_fastest_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is epoll where the platform has it."""
    with contextlib.closing(pollers.make_poller()) as poller:
        has_epoll = hasattr(select, "epoll")
        assert type(poller) is (pollers.EpollPoller if has_epoll else pollers.SelectorPoller)
    monkeypatch.delattr(select, "epoll", raising=False)
    with contextlib.closing(pollers.make_poller()) as poller:
        assert isinstance(poller, pollers.SelectorPoller)


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="needs epoll")
def test_a_late_wake_touches_nobody_elses_file() -> None:
    """The number of a closed descriptor soon belongs to another file."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    poller = pollers.EpollPoller()
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
