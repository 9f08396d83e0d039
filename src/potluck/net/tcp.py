"""TCP: the real door to the network, with the reason for every socket option.

Streams are non-blocking sockets, watched by :mod:`potluck.net.tcp`.  Nothing here knows frames
or ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import selectors
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from potluck import _process
from potluck._decode import decode_json
from potluck._platform import HAS_EPOLL, PACING_RATE, gathering_send, keep_alive, unacknowledged
from potluck.errors import MalformedFrame
from potluck.net.addresses import Address, is_literal, is_loopback, unmapped, usable_hosts

if TYPE_CHECKING:
    from potluck.net.secure_socket import OpeningSocket
    from potluck.net.transport import Event, Poller, Stream
    from potluck.net.unix_socket import SharedMemory


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
    keep_alive(sock, idle=KEEPALIVE_IDLE, interval=KEEPALIVE_INTERVAL, count=KEEPALIVE_COUNT)
    sock.setblocking(False)


FASTEST_PACE = (1 << 31) - 1
"""Bytes per second; the option is a C int."""


class SocketStream:
    """A connected socket as a :class:`~potluck.net.transport.Stream`."""

    is_local = False
    shared: SharedMemory | None = None

    def __init__(self, sock: socket.socket, peer_name: str) -> None:
        _process.track(sock)
        self._sock = sock
        self.fileno = sock.fileno
        self.recv_into = sock.recv_into  # bound once: this is the hottest call of all
        self.peer_name = peer_name
        self.sendmsg = gathering_send(sock)

    def keep_in_cache(self) -> None:
        """Within one machine let no more wait than stays in the cache until it is read.

        For streams whose other end reads all the time; messages rest in the buffer until wanted.
        """

    def expect(self, count: int) -> None:
        """Be woken only when this many bytes are there."""

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
        with contextlib.suppress(OSError):  # gone already
            # An address is that of one machine: to have the same on both ends is to be there.
            self.is_local = sock.getsockname()[:1] == sock.getpeername()[:1]

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
        """Let the kernel send at most this many bytes per second; Linux only."""
        if PACING_RATE is not None:
            with contextlib.suppress(OSError):  # an old kernel: it goes without
                self._sock.setsockopt(socket.SOL_SOCKET, PACING_RATE, min(rate, FASTEST_PACE))


class LocalStream(SocketStream):
    """A local socket: see :mod:`potluck.net.unix_socket`.

    Its kernel's queue knows neither a low-water mark nor a pace, and needs neither.  What was
    written lies with the peer at once, and survives even a reset.  So nothing is lost without
    :meth:`finish`; it gives a peer that is busy writing to us a moment to read our last words.
    """

    is_local = True

    def __init__(
        self, sock: socket.socket, peer_name: str, shared: SharedMemory | None = None
    ) -> None:
        sock.setblocking(False)
        super().__init__(sock, peer_name)
        self.shared = shared
        self._let_wait(MESSAGES_BUFFER)

    def finish(self, deadline: float) -> None:
        """Close when the peer has had a moment to read; what lies in shared memory stays there."""
        super().finish(deadline)
        self.close()

    def close(self) -> None:
        """Close at once."""
        super().close()
        if self.shared is not None:
            self.shared.close()

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
    _process.track(listener)
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
        _process.track(sock)
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


# --------------------------------------------------------------------------------------------------
# Pollers: sleep until one of many sockets can move bytes.
#
# ``epoll`` where there is one, :mod:`selectors` elsewhere.


def make_poller() -> Poller:
    """The fastest poller of this platform."""
    if sys.platform == "linux" and HAS_EPOLL:
        return EpollPoller()
    return SelectorPoller()


if sys.platform == "linux":  # the type checker knows no other way to ask

    class EpollPoller:
        """Linux: changes made by another thread take effect while one is waiting."""

        def __init__(self) -> None:
            self._epoll = select.epoll()
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._wake, select.EPOLLIN)
            self._keys: dict[int, int] = {}
            self._masks: dict[int, int] = {}
            _process.track(self)

        def register(self, stream: Stream, key: int) -> None:
            """Watch a stream for reading."""
            descriptor = stream.fileno()  # type: ignore[attr-defined]
            self._keys[descriptor] = key
            self._masks[descriptor] = select.EPOLLIN
            self._epoll.register(descriptor, select.EPOLLIN)

        def want_write(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: ARG002, FBT001
            """Watch for room to write as well, or stop."""
            self._want(stream, select.EPOLLOUT, wanted)

        def want_read(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: ARG002, FBT001
            """Stop watching for bytes to read, or do so again."""
            self._want(stream, select.EPOLLIN, wanted)

        def _want(self, stream: Stream, what: int, wanted: bool) -> None:  # noqa: FBT001
            descriptor = stream.fileno()  # type: ignore[attr-defined]
            with contextlib.suppress(
                OSError, ValueError, KeyError
            ):  # closed: the reader will say so
                mask = self._masks[descriptor]
                new = mask | what if wanted else mask & ~what
                if new != mask:
                    self._epoll.modify(descriptor, new)
                    self._masks[descriptor] = new

        def unregister(self, stream: Stream) -> None:
            """Stop watching; harmless for a stream already closed."""
            descriptor = stream.fileno()  # type: ignore[attr-defined]
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(descriptor)
            self._keys.pop(descriptor, None)
            self._masks.pop(descriptor, None)

        def wait(self, timeout: float | None) -> list[Event]:
            """Sleep until something can move."""
            events: list[Event] = []
            for descriptor, mask in self._epoll.poll(timeout):
                key = self._keys.get(descriptor)
                if key is not None:
                    events.append(
                        (key, bool(mask & ~select.EPOLLOUT), bool(mask & select.EPOLLOUT))
                    )
                elif descriptor == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
            return events

        def wake(self) -> None:
            """End the current or next wait."""
            with contextlib.suppress(OSError, ValueError):  # the latter: closed already
                os.eventfd_write(self._wake, 1)

        def close(self) -> None:
            """Release both descriptors; unregisters none: a forked child shares the list."""
            if not self._epoll.closed:
                self._epoll.close()
                # First forgotten: a late wake must not write into whatever gets the number next.
                wake, self._wake = self._wake, -1
                os.close(wake)


class Waker:
    """Ends the wait of a selector from another thread; its events carry the waker itself."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
            _process.track(end)
        selector.register(self._receiver, selectors.EVENT_READ, self)

    def wake(self) -> None:
        """End the current or next wait."""
        with contextlib.suppress(OSError):  # full, so that it wakes up anyway; or closed
            self._sender.send(b"\0")

    def drain(self) -> None:
        """Take back what has ended a wait, so that the next one is one."""
        with contextlib.suppress(BlockingIOError):
            self._receiver.recv(4096)

    def close(self) -> None:
        """Release both ends."""
        self._receiver.close()
        self._sender.close()


class SelectorPoller:
    """Everywhere else.  A waiting thread is woken to see changes made by another."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._waker = Waker(self._selector)
        _process.track(self._selector)
        self._masks: dict[Stream, int] = {}
        self._changes: list[tuple[Stream, int, int]] = []

    def register(self, stream: Stream, key: int) -> None:
        """Watch a stream for reading."""
        with self._lock:
            self._masks[stream] = 0
        self._want(stream, key, selectors.EVENT_READ, wanted=True)

    def want_write(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: FBT001
        """Watch for room to write as well, or stop."""
        self._want(stream, key, selectors.EVENT_WRITE, wanted)

    def want_read(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: FBT001
        """Stop watching for bytes to read, or do so again."""
        self._want(stream, key, selectors.EVENT_READ, wanted)

    def unregister(self, stream: Stream) -> None:
        """Stop watching."""
        with self._lock:
            if self._masks.pop(stream, None) is not None:
                self._changes.append((stream, 0, 0))
        self.wake()

    def _want(self, stream: Stream, key: int, what: int, wanted: bool) -> None:  # noqa: FBT001
        with self._lock:
            mask = self._masks.get(stream)
            if mask is None:  # one that is watched no more stays so
                return
            self._masks[stream] = mask = mask | what if wanted else mask & ~what
            self._changes.append((stream, key, mask))
        self.wake()

    def _apply_changes(self) -> None:
        with self._lock:
            changes, self._changes = self._changes, []
        for stream, key, mask in changes:
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(stream)  # type: ignore[arg-type]
            if mask:
                with contextlib.suppress(ValueError, OSError):
                    self._selector.register(stream, mask, key)  # type: ignore[arg-type]

    def wait(self, timeout: float | None) -> list[Event]:
        """Sleep until something can move."""
        self._apply_changes()
        events: list[Event] = []
        for entry, mask in self._selector.select(timeout):
            if entry.data is self._waker:
                self._waker.drain()
            else:
                readable, writable = mask & selectors.EVENT_READ, mask & selectors.EVENT_WRITE
                events.append((entry.data, bool(readable), bool(writable)))
        return events

    def wake(self) -> None:
        """End the current or next wait."""
        self._waker.wake()

    def close(self) -> None:
        """Release the selector and its pipe."""
        self._selector.close()
        self._waker.close()


# --------------------------------------------------------------------------------------------------
# Where a process can be found: its machine, its addresses, and ports on which it may listen.

LONGEST = 8192
"""Bytes of the description of one process; whatever is longer is none."""

_Text = Annotated[str, msgspec.Meta(max_length=255)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class EndpointHint(msgspec.Struct, frozen=True):
    """What a process tells others about where it is."""

    machine: _Text
    """The same for processes that reach each other over loopback, and only for those."""
    hosts: Annotated[list[_Text], msgspec.Meta(max_length=16)]
    ports: Annotated[list[_Port], msgspec.Meta(max_length=16)]

    @classmethod
    def here(cls, ports: int = 0) -> EndpointHint:
        """Of this process, with this many ports that are free just now."""
        return cls(_machine(), usable_hosts()[:16], free_ports(ports))

    def to_bytes(self) -> bytes:
        """As others read it."""
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes, sender: str) -> EndpointHint:
        """As another process wrote it; raises ``MalformedFrame`` if it is anything else."""
        try:
            if len(data) <= LONGEST:
                return decode_json(data, cls)
            reason = f"{len(data)} bytes are too many"
        except (msgspec.DecodeError, ValueError) as error:  # the latter where it is no text
            reason = str(error)
        raise MalformedFrame(f"What is said of {sender} does not say where it is", cause=reason)

    def addresses(self, *, is_local: bool, also: str | None = None) -> list[str]:
        """Where it may listen: on this machine, or as seen from others.

        ``also`` is a host at which a user has said that it is; it comes first.
        """
        hosts = ["127.0.0.1"] if is_local else [host for host in self.hosts if is_literal(host)]
        if also is not None and not is_local:
            hosts = [also, *hosts]
        return [str(Address(host, port)) for port in self.ports for host in hosts or ["127.0.0.1"]]


def free_ports(count: int) -> list[int]:
    """Ports on which no program listens just now, all different."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(listen("", 0)) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in listeners]


def _machine() -> str:
    """A tag of the host, its start, and its network: containers have networks of their own."""
    facts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    with contextlib.suppress(OSError):
        facts.append(str(Path("/proc/self/ns/net").readlink()))
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=16).hexdigest()
