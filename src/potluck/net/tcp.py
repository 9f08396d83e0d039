"""TCP: the real door to the network, with the reason for every socket option.

Streams are non-blocking sockets; the poller is ``epoll`` where there is one and :mod:`selectors`
elsewhere.  Nothing here knows frames or ranks.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from potluck.net import descriptors
from potluck.net.addresses import Address, unmapped

if TYPE_CHECKING:
    from potluck.net.transport import Buffer, Event, Poller, Stream

__all__ = ["TcpStream", "connect", "listen", "make_poller", "prepare"]

BACKLOG = 128
"""Connections the kernel holds for us while the acceptor is busy; Linux caps it at 4096."""

CONNECT_ATTEMPT = 3.0
"""Seconds for one address before the next is tried: one lost SYN is sent again after one."""

KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 10, 5, 3
"""A host that vanished without a word is noticed after 10 + 3 x 5 s on an idle connection."""


def prepare(sock: socket.socket) -> None:
    """Set the options every connection has.

    Buffer sizes are left alone on purpose: setting them turns off the kernel's own tuning, which
    knows the path better.  ``TCP_USER_TIMEOUT`` is not set either: Linux also ends connections
    whose peer merely does not read for that long, and a rank may compute for minutes.
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


class TcpStream:
    """A connected socket as a :class:`~potluck.net.transport.Stream`."""

    def __init__(self, sock: socket.socket) -> None:
        prepare(sock)
        descriptors.track(sock)
        self._sock = sock
        self.fileno = sock.fileno
        self.recv_into = sock.recv_into  # bound once: this is the hottest call of all
        self.peer_name = _peer_name(sock)
        self.sendmsg: Callable[[Sequence[Buffer]], int] = (
            sock.sendmsg if hasattr(sock, "sendmsg") else self._send_joined
        )

    def _send_joined(self, buffers: Sequence[Buffer], /) -> int:
        """For platforms without gathering writes."""
        return self._sock.send(b"".join(buffers))

    def finish(self, deadline: float) -> None:
        """Say that nothing follows, wait until the peer's kernel has it all, and close.

        Closing a socket with unread bytes makes the kernel answer with a reset, which would throw
        away what is still on its way out.  So what came in is read and dropped first.
        """
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            drain = bytearray(1 << 16)
            while time.monotonic() < deadline:
                try:
                    if not self._sock.recv_into(drain):
                        break  # the peer has ended its side as well: nothing can be lost any more
                except (BlockingIOError, TimeoutError):
                    if _unsent(self._sock) == 0:
                        break
                    self._sock.settimeout(0.005)  # from now on, let the read above wait a moment
        self._sock.close()

    def close(self) -> None:
        """Close at once."""
        self._sock.close()


def _peer_name(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "unknown"
    return str(Address(unmapped(host), port))


def _unsent(sock: socket.socket) -> int:
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


def make_poller() -> Poller:
    """The fastest poller of this platform."""
    return EpollPoller() if hasattr(select, "epoll") else SelectorPoller()


class EpollPoller:
    """Linux: changes made by another thread take effect while one is waiting."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._keys: dict[int, int] = {}
        descriptors.track(self)

    def register(self, stream: Stream, key: int) -> None:
        """Watch a stream for reading."""
        descriptor = stream.fileno()  # type: ignore[attr-defined]
        self._keys[descriptor] = key
        self._epoll.register(descriptor, select.EPOLLIN)

    def want_write(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: ARG002, FBT001
        """Watch for room to write as well, or stop."""
        mask = select.EPOLLIN | select.EPOLLOUT if wanted else select.EPOLLIN
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile: the reader will say so
            self._epoll.modify(stream.fileno(), mask)  # type: ignore[attr-defined]

    def unregister(self, stream: Stream) -> None:
        """Stop watching; harmless for a stream already closed."""
        descriptor = stream.fileno()  # type: ignore[attr-defined]
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(descriptor)
        self._keys.pop(descriptor, None)

    def wait(self, timeout: float | None) -> list[Event]:
        """Sleep until something can move."""
        events: list[Event] = []
        for descriptor, mask in self._epoll.poll(timeout):
            key = self._keys.get(descriptor)
            if key is not None:
                events.append((key, bool(mask & ~select.EPOLLOUT), bool(mask & select.EPOLLOUT)))
            elif descriptor == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
        return events

    def wake(self) -> None:
        """End the current or next wait."""
        with contextlib.suppress(OSError, ValueError):  # the latter: closed already
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Release both descriptors.  Never unregisters: a forked child shares the kernel's list."""
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._wake)
            self._wake = -1  # a late wake must not write into whatever gets the number next


class SelectorPoller:
    """Everywhere else.  A waiting thread is woken to see changes made by another."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        descriptors.track(self)
        self._selector.register(self._receiver, selectors.EVENT_READ, None)
        self._changes: list[tuple[Stream, int, int, bool]] = []

    def register(self, stream: Stream, key: int) -> None:
        """Watch a stream for reading."""
        self._change(stream, key, selectors.EVENT_READ, new=True)

    def want_write(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: FBT001
        """Watch for room to write as well, or stop."""
        write = selectors.EVENT_WRITE if wanted else 0
        self._change(stream, key, selectors.EVENT_READ | write)

    def unregister(self, stream: Stream) -> None:
        """Stop watching."""
        self._change(stream, 0, 0)

    def _change(self, stream: Stream, key: int, mask: int, *, new: bool = False) -> None:
        with self._lock:
            self._changes.append((stream, key, mask, new))
        self.wake()

    def _apply_changes(self) -> None:
        with self._lock:
            changes, self._changes = self._changes, []
        for stream, key, mask, new in changes:
            known = True
            try:
                self._selector.unregister(stream)  # type: ignore[arg-type]
            except (KeyError, ValueError, OSError):
                known = False
            if mask and (new or known):  # one that is watched no more stays so
                with contextlib.suppress(ValueError, OSError):
                    self._selector.register(stream, mask, key)  # type: ignore[arg-type]

    def wait(self, timeout: float | None) -> list[Event]:
        """Sleep until something can move."""
        self._apply_changes()
        events: list[Event] = []
        for entry, mask in self._selector.select(timeout):
            if entry.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._receiver.recv(4096)
            else:
                readable, writable = mask & selectors.EVENT_READ, mask & selectors.EVENT_WRITE
                events.append((entry.data, bool(readable), bool(writable)))
        return events

    def wake(self) -> None:
        """End the current or next wait."""
        with contextlib.suppress(OSError):  # a full pipe already wakes it
            self._sender.send(b"\0")

    def close(self) -> None:
        """Release the selector and its pipe."""
        self._selector.close()
        self._receiver.close()
        self._sender.close()
