"""An acceptor with somebody who writes down whom it let in, and callers of all sorts."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Iterator
from typing import TypeAlias

from potluck.net import tcp
from potluck.net.addresses import Address
from potluck.net.listener import Acceptor
from potluck.net.opening import answer, exchange_hello
from potluck.net.secure_socket import OpeningSocket
from potluck.wire_messages import Join, OpenReply, OpenRequest, unpack

Hello: TypeAlias = Join | OpenRequest

HONEST = OpenRequest(session=b"s" * 16, rank=1, to=0)


def bare(sock: OpeningSocket) -> socket.socket:
    """The socket of a connection in clear."""
    assert isinstance(sock, socket.socket)
    return sock


class Reception:
    """A door on loopback.  Complete hellos are welcomed at once and listed."""

    def __init__(self) -> None:
        self.hellos: queue.SimpleQueue[Hello] = queue.SimpleQueue()
        self._calls = 0
        self._sockets = contextlib.ExitStack()
        self.acceptor = Acceptor(tcp.listen("127.0.0.1", 0), self._welcome)
        self.address = Address("127.0.0.1", self.acceptor.port)

    def _welcome(self, sock: OpeningSocket, payload: bytes) -> None:
        hello: Hello = unpack(payload, Join | OpenRequest)  # type: ignore[arg-type]
        with bare(sock), contextlib.suppress(OSError):  # it may have left
            answer(sock, OpenReply(rank=0))
        self.hellos.put(hello)

    def call(self, data: bytes = b"") -> socket.socket:
        """Connect and say something."""
        sock = self._sockets.enter_context(socket.create_connection(self.address, timeout=30))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(data)
        return sock

    def call_honestly(self) -> float:
        """Come in as one should; how many seconds it took."""
        self._calls += 1
        hello = OpenRequest(session=b"h" * 16, rank=self._calls, to=0)
        begin = time.monotonic()
        with tcp.connect(self.address, begin + 30) as sock:
            assert exchange_hello(sock, hello, OpenReply, begin + 30) == OpenReply(rank=0)
        taken = time.monotonic() - begin
        while self.hellos.get(timeout=30) != hello:  # others may come in as well
            pass
        return taken

    def hang_up(self) -> None:
        """End all calls."""
        self._sockets.close()

    def close(self) -> None:
        """End the acceptor and all calls."""
        self.acceptor.close()
        self.hang_up()


@contextlib.contextmanager
def open_reception() -> Iterator[Reception]:
    """Open for the length of a test."""
    with contextlib.closing(Reception()) as reception:
        yield reception


def last_words(sock: socket.socket) -> bytes:
    """All that comes until the other side hangs up, politely or not."""
    data = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(1 << 16):
            data += chunk
    return bytes(data)
