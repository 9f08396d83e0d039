"""TCP: the real door to the network, with the reason for every socket option.

Streams are non-blocking sockets, watched by :mod:`potluck.net.pollers`.  Nothing here knows frames
or ranks.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from potluck.net import descriptors
from potluck.net.addresses import Address, is_loopback, unmapped

if TYPE_CHECKING:
    from potluck.net.secure_socket import OpeningSocket
    from potluck.net.transport import Buffer

__all__ = [
    "LocalStream",
    "SocketStream",
    "TcpStream",
    "connect",
    "listen",
    "peer_address",
    "prepare",
    "unacknowledged",
]

BACKLOG = 128
"""Connections the kernel holds for us while the acceptor is busy; Linux caps it at 4096."""

CONNECT_ATTEMPT = 3.0
"""Seconds for one address before the next is tried: one lost SYN is sent again after one."""

LOOPBACK_BUFFER = 1 << 18
"""Bytes that may wait on their way within one machine; Linux doubles it."""

MESSAGES_BUFFER = 1 << 22
"""Bytes that may wait on a local socket for a rank that computes: about what TCP would hold.

Linux doubles it, counts some 700 for the smallest message, and allows no more than its
``net.core.wmem_max``: beyond that a send waits until the other rank looks.
"""

SO_MAX_PACING_RATE = 47
"""From Linux's <asm-generic/socket.h>; the socket module does not name it."""

LATE_READS = 128
"""Reads of 64 KiB that empty a socket without waiting: about as much as its buffer holds."""

KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 10, 5, 3
"""A host that vanished without a word is noticed after 10 + 3 x 5 s on an idle connection."""


def prepare(sock: socket.socket) -> None:
    """Set the options every connection has.

    Buffer sizes are left alone on purpose, except on loopback: setting them turns off the kernel's
    own tuning, which knows the path better.  ``TCP_USER_TIMEOUT`` is not set either: Linux also
    ends connections whose peer merely does not read for that long, and a rank may compute for
    minutes.
    """
    # A frame is written whole and somebody waits for it: Nagle's delay would only add latency.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE),
        ("TCP_KEEPALIVE", KEEPALIVE_IDLE),  # macOS's name for the same
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setblocking(False)


class SocketStream:
    """A connected socket as a :class:`~potluck.net.transport.Stream`."""

    is_local = False

    def __init__(self, sock: socket.socket, peer_name: str) -> None:
        descriptors.track(sock)
        self._sock = sock
        self.fileno = sock.fileno
        self.recv_into = sock.recv_into  # bound once: this is the hottest call of all
        self.peer_name = peer_name
        self.sendmsg: Callable[[Sequence[Buffer]], int] = (
            sock.sendmsg if hasattr(sock, "sendmsg") else self._send_joined
        )

    def _send_joined(self, buffers: Sequence[Buffer], /) -> int:
        """For platforms without gathering writes."""
        return self._sock.send(b"".join(buffers))

    def keep_in_cache(self) -> None:
        """Within one machine let no more wait than stays in the cache until it is read.

        For streams whose other end reads all the time; messages rest in the buffer until wanted.
        """

    def expect(self, count: int) -> None:
        """Be woken only when so many bytes are there."""

    def pace(self, rate: int) -> None:
        """Send no faster than this."""

    def finish(self, deadline: float) -> None:
        """Say that nothing follows, wait until the peer's kernel has it all, and close.

        Closing a socket with unread bytes makes the kernel answer with a reset, which would throw
        away what is still on its way out.  So what came in is read and dropped first, even if the
        deadline has passed and nothing is waited for.
        """
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            drain, late = bytearray(1 << 16), LATE_READS
            while (is_early := time.monotonic() < deadline) or late:
                late -= not is_early
                try:
                    if not self._sock.recv_into(drain):
                        break  # the peer has ended its side as well: nothing can be lost any more
                except (BlockingIOError, TimeoutError):
                    if not is_early or unacknowledged(self._sock) == 0:
                        break
                    self._sock.settimeout(0.005)  # from now on, let the read above wait a moment
        self._sock.close()

    def close(self) -> None:
        """Close at once."""
        self._sock.close()


class TcpStream(SocketStream):
    """A connection between two machines, or within one."""

    def __init__(self, sock: socket.socket) -> None:
        prepare(sock)
        super().__init__(sock, peer_address(sock))
        self._expected = 1

    def keep_in_cache(self) -> None:
        """Limit what waits, on loopback."""
        with contextlib.suppress(OSError, ValueError):  # gone already, or no address
            if is_loopback(unmapped(self._sock.getpeername()[0])):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER)

    def expect(self, count: int) -> None:
        """Set the low-water mark, unless it is there already."""
        if count != self._expected:
            self._expected = count
            with contextlib.suppress(OSError):  # not on this system: it is woken more often
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def pace(self, rate: int) -> None:
        """Let the kernel hand on at most so many bytes per second; Linux only."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # an old kernel: it goes without
                self._sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)


class LocalStream(SocketStream):
    """A local socket: see :mod:`potluck.net.shortcut`.

    Its kernel's queue knows neither a low-water mark nor a pace, and needs neither.  What was
    written lies with the peer at once, and survives even a reset.  So nothing is lost without
    :meth:`finish`; it gives a peer that is busy writing to us a moment to read our last words.
    """

    is_local = True

    def __init__(self, sock: socket.socket, peer_name: str) -> None:
        sock.setblocking(False)
        super().__init__(sock, peer_name)
        self._let_wait(MESSAGES_BUFFER)

    def keep_in_cache(self) -> None:
        """Let as much wait as on loopback."""
        self._let_wait(LOOPBACK_BUFFER)

    def _let_wait(self, count: int) -> None:
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, count)


def peer_address(sock: OpeningSocket) -> str:
    """Where the other end of a TCP connection is, for people."""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "unknown"
    return str(Address(unmapped(host), port))


def unacknowledged(sock: socket.socket) -> int:
    """Bytes written that the peer's kernel has not acknowledged; -1 where nobody can tell."""
    if sys.platform == "linux":
        import fcntl
        import termios

        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    if sys.platform == "darwin":
        so_nwrite = 0x1024  # from <sys/socket.h>; the socket module does not name it
        return sock.getsockopt(socket.SOL_SOCKET, so_nwrite)
    return -1


def listen(host: str, port: int) -> socket.socket:
    """Listen on one address, or on every interface when ``host`` is empty (IPv4 and IPv6)."""
    if host:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    else:
        listener = socket.create_server(("", port), backlog=BACKLOG)
    listener.setblocking(False)
    descriptors.track(listener)
    return listener


def connect(address: Address, deadline: float) -> socket.socket:
    """Connect to the first address that answers, in the resolver's order; raise the last error."""
    failure: OSError | None = None
    for family, kind, proto, _, target in socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    ):
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        sock = socket.socket(family, kind, proto)
        descriptors.track(sock)
        try:
            sock.settimeout(min(remaining, CONNECT_ATTEMPT))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # hellos go back and forth
            sock.connect(target)
            if sock.getsockname() == sock.getpeername():
                # Dialling a free local port can, by chance, connect the socket to itself.
                raise ConnectionRefusedError(111, "Connection refused")
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure or TimeoutError("no time left to connect")


def local_host(sock: socket.socket) -> str:
    """The address of ours that this connection uses."""
    return unmapped(sock.getsockname()[0])
