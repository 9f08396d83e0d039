"""Reaching a node that has several addresses: best first, and none holds up the next.

An address may be a black hole (a firewall, a cable that is out, a network the two do not share), so
the next one is tried after a moment while the first continues; the first that finishes the
handshake wins.  One thread does it all, and asks in between whether to continue.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from potluck import _process
from potluck._types import NodeId
from potluck.errors import DistributedError, NoConnection, describe
from potluck.net.addresses import Address
from potluck.net.secure_socket import CHUNK, OpeningSocket, SecureSocket, Security
from potluck.net.tls import AnotherNamespace, TlsChannel

NEXT_AFTER = 0.25
"""Seconds after which the next address is tried beside those under way, as RFC 8305 advises."""

SHAKING = 2.0
"""The same while one of them is connected and in the middle of TLS: its machine answers, and may
only be busy.  A second handshake would make it busier."""

ATTEMPT = 3.0
"""Seconds for a connection: one lost SYN is sent again after one."""

HANDSHAKE = 5.0
"""Seconds for TLS once it is there: as many as the other side gives us."""

LOOK_EVERY = 0.02
"""Seconds between two checks whether to continue."""


class _Attempt:
    """One address: connecting, then in the middle of TLS."""

    def __init__(self, address: Address, info: tuple[Any, ...], channel: TlsChannel | None) -> None:
        family, kind, proto, _, target = info
        self.address = address
        self.channel = channel
        self.is_connected = False
        self.deadline = time.monotonic() + ATTEMPT
        self.sock = socket.socket(family, kind, proto)
        _process.track(self.sock)
        try:
            self.sock.setblocking(False)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # back and forth
            with contextlib.suppress(BlockingIOError):
                self.sock.connect(target)
        except BaseException:
            self.sock.close()
            raise

    def proceed(self) -> bool:
        """The connection is there, or TLS has advanced; True when it is done."""
        if not self.is_connected:
            self._connected()
        elif self.channel is not None:
            self._receive(self.channel)
        if self.channel is not None and (data := self.channel.outgoing()):
            self.sock.sendall(data)  # which fits into the buffer of a connection that is new
        return self.channel is None or self.channel.handshake_done

    def _connected(self) -> None:
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        if self.sock.getsockname() == self.sock.getpeername():
            # Dialling a free local port can, by chance, connect the socket to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        self.is_connected = True
        self.deadline = time.monotonic() + HANDSHAKE

    def _receive(self, channel: TlsChannel) -> None:
        data = self.sock.recv(CHUNK)
        if not data:
            # Nobody has said no: it may have stopped this instant, and be back in the next.
            raise ConnectionResetError(errno.ECONNRESET, "the connection ended")
        try:
            channel.receive(data)
        except DistributedError:
            with contextlib.suppress(OSError):
                self.sock.sendall(channel.outgoing())  # the alert that tells the other side why
            raise


class _Race:
    """All attempts to reach one node."""

    def __init__(
        self, security: Security, addresses: Sequence[Address], node: NodeId | None
    ) -> None:
        self._security = security
        self._untried: list[tuple[Address, tuple[Any, ...] | None]] = [
            (address, None) for address in addresses
        ]
        self._node = node
        self._selector = selectors.DefaultSelector()
        _process.track(self._selector)
        self._running: list[_Attempt] = []
        self._next_at = 0.0
        self.failures: list[tuple[Address, Exception]] = []

    @property
    def is_lost(self) -> bool:
        """Whether no address is left."""
        return not self._running and not self._untried

    def turn(self) -> tuple[Address, OpeningSocket] | None:
        """Wait a moment for something to happen; the connection, if one is there."""
        now = time.monotonic()
        if self._untried and (now >= self._due() or not self._running):
            self._next_at = now + NEXT_AFTER
            self._start(*self._untried.pop(0))
        for key, _ in self._selector.select(LOOK_EVERY if self._running else 0):
            attempt: _Attempt = key.data
            try:
                if attempt.proceed():
                    return attempt.address, self._won(attempt)
                self._selector.modify(attempt.sock, selectors.EVENT_READ, attempt)
            except BlockingIOError:
                pass
            except (OSError, DistributedError) as error:
                self._drop(attempt, error)
        for attempt in [one for one in self._running if one.deadline <= time.monotonic()]:
            self._drop(attempt, TimeoutError(errno.ETIMEDOUT, "it did not answer"))
        return None

    def _due(self) -> float:
        """When the next address is tried beside those under way."""
        shaking = [each.deadline - HANDSHAKE for each in self._running if each.is_connected]
        return max([self._next_at, *(since + SHAKING for since in shaking)])

    def _start(self, address: Address, info: tuple[Any, ...] | None) -> None:
        """Begin one attempt; a name that stands for several addresses is that many attempts."""
        try:
            if info is None:
                info, *others = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
                self._untried[:0] = [(address, other) for other in others]
            channel = self._security.dial_channel(str(address), self._node)
            attempt = _Attempt(address, info, channel)
        except OSError as error:  # an unknown name, or no way there from here
            self.failures.append((address, error))
            self._next_at = 0.0
        else:
            self._running.append(attempt)
            self._selector.register(attempt.sock, selectors.EVENT_WRITE, attempt)

    def _won(self, attempt: _Attempt) -> OpeningSocket:
        self._forget(attempt)
        attempt.sock.setblocking(True)
        if attempt.channel is None:
            return attempt.sock
        return SecureSocket(attempt.sock, attempt.channel)

    def _drop(self, attempt: _Attempt, error: Exception) -> None:
        self._forget(attempt)
        attempt.sock.close()
        self.failures.append((attempt.address, error))
        self._next_at = 0.0

    def _forget(self, attempt: _Attempt) -> None:
        self._running.remove(attempt)
        self._selector.unregister(attempt.sock)

    def close(self) -> None:
        """End the attempts that have not won."""
        for attempt in self._running:
            attempt.sock.close()
        self._selector.close()


def reach(
    security: Security,
    addresses: Sequence[Address],
    deadline: float,
    expected: NodeId | None = None,
    look: Callable[[], None] = lambda: None,
) -> tuple[Address, OpeningSocket]:
    """Connect to a node, or to any member, in TLS; without TLS, to any program that answers.

    ``look`` is called while waiting and raises when there is no point in continuing.
    Raises what went wrong, with each address if there are several.
    """
    race = _Race(security, addresses, expected)
    looked = time.monotonic()
    with contextlib.closing(race):
        while not race.is_lost and time.monotonic() < deadline:
            found = race.turn()
            if found is not None:
                return found
            if time.monotonic() >= looked + LOOK_EVERY:
                look()
                looked = time.monotonic()
    raise _failure(race.failures, addresses)


REFUSED = os.strerror(errno.ECONNREFUSED)
"""What is said of each address where the machine is on and nothing listens."""


def _failure(failures: Sequence[tuple[Address, Exception]], tried: Sequence[Address]) -> Exception:
    if not failures:
        where = ", ".join(map(str, tried))
        return TimeoutError(errno.ETIMEDOUT, f"no answer from {where}" if where else "no address")
    for _, error in failures:
        if len(failures) == 1 or isinstance(error, AnotherNamespace):
            return error
    reasons = dict.fromkeys(f"{address}: {describe(error)}" for address, error in failures)
    return NoConnection("None of its addresses answered", cause="; ".join(reasons))
