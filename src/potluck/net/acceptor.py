"""The acceptor: answers the door, one thread for all callers that have not said who they are.

A caller has :data:`PATIENCE` seconds to prove that it is a member and to say hello in one frame;
there are :data:`SLOTS` places, and when they are full the one who has waited longest makes room.
A complete hello goes to ``receive``, which owns the connection from then on and must not block.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

from potluck.errors import DistributedError, MalformedFrame
from potluck.net import descriptors
from potluck.net.frames import Kind, VersionMismatch
from potluck.net.opening import Greeting, hang_up, refuse
from potluck.net.secure_socket import CHUNK, OpeningSocket, SecureSocket
from potluck.net.security import Security
from potluck.net.tls import TlsChannel

__all__ = ["Acceptor"]

logger = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds a caller has to say hello."""

SLOTS = 64
"""Callers that may be in the middle of a hello at once."""

SLOTS_PER_HOST = 48
"""Of these, from one address: a flood from one machine leaves room for the others."""

Receiver = Callable[[OpeningSocket, bytes], None]


class _Caller:
    """Somebody at the door."""

    def __init__(self, sock: socket.socket, host: str, port: int) -> None:
        self.sock = sock
        self.host = host
        self.name = f"{host}:{port}"
        self.deadline = time.monotonic() + PATIENCE
        self.greeting = Greeting()
        self.channel: TlsChannel | None = None
        self._rest = b""

    def read(self) -> bool:
        """Take in what is there; False when the caller has hung up."""
        data = self.sock.recv(self.greeting.wanted if self.channel is None else CHUNK)
        if self.channel is None:
            self.greeting.receive(data)
        elif data:
            self.channel.receive(data)
            self.send_pending()
            if self.channel.handshake_done:
                self._read_plain(self.channel.read())
        return bool(data)

    def _read_plain(self, data: bytes) -> None:
        while data and self.greeting.wanted:
            part, data = data[: self.greeting.wanted], data[self.greeting.wanted :]
            self.greeting.receive(part)
        if data:
            raise MalformedFrame("It said more than hello")

    def send_pending(self) -> None:
        """Send what TLS has to say: a few kilobytes, for which an empty buffer has room."""
        if self.channel is not None:
            data = self.channel.outgoing()
            if data and self.sock.send(data) < len(data):
                raise MalformedFrame("It does not read what it is told")

    def as_socket(self) -> OpeningSocket:
        """The connection as whoever answers the hello uses it."""
        return self.sock if self.channel is None else SecureSocket(self.sock, self.channel)


class Acceptor:
    """Listens until closed."""

    def __init__(
        self, listener: socket.socket, receive: Receiver, security: Security | None = None
    ) -> None:
        self.receive = receive
        self._security = security
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
            descriptors.track(end)
        descriptors.track(self._selector)
        self._callers: dict[int, _Caller] = {}  # in order of arrival, so of deadline
        self._stopping = False
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="potluck-accept", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port callers use."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop answering and hang up on everybody who has not said hello."""
        if self._stopping:
            return
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, _ in self._selector.select(self._next_deadline()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif self._callers.get(key.fd) is key.data is not None:
                        self._read(key.data)  # unless it was dropped a moment ago, to make room
                self._expire()
        finally:
            for caller in list(self._callers.values()):
                self._forget(caller)
                caller.sock.close()
            self._selector.close()
            for sock in (self._listener, self._wake_in, self._wake_out):
                sock.close()

    def _next_deadline(self) -> float | None:
        for caller in self._callers.values():
            return max(0.0, caller.deadline - time.monotonic())
        return None

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of descriptors, most likely: without a pause this would spin.
            logger.warning("could not accept a connection: %s", error)
            time.sleep(0.05)
            return
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # some systems refuse when it has hung up already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # hellos go back and forth
        descriptors.track(sock)
        caller = _Caller(sock, str(address[0]), int(address[1]))
        if self._security is not None:
            caller.channel = self._security.answer_channel(caller.name)
        self._make_room(caller.host)
        self._callers[sock.fileno()] = caller
        self._selector.register(sock, selectors.EVENT_READ, caller)

    def _make_room(self, host: str) -> None:
        crowd = [caller for caller in self._callers.values() if caller.host == host]
        if len(crowd) >= SLOTS_PER_HOST:
            self._drop(crowd[0], "too many callers from its address")
        elif len(self._callers) >= SLOTS:
            self._drop(next(iter(self._callers.values())), "too many callers at once")

    def _read(self, caller: _Caller) -> None:
        try:
            if not caller.read():
                self._drop(caller, "it hung up")
            elif caller.greeting.is_complete:
                self._introduce(caller)
        except BlockingIOError:
            pass
        except VersionMismatch as error:
            self._drop(caller, str(error), tell=_mirrored(error))
        except (OSError, DistributedError) as error:
            with contextlib.suppress(OSError, DistributedError):
                caller.send_pending()  # the alert that tells the caller why
            self._drop(caller, str(error))

    def _introduce(self, caller: _Caller) -> None:
        if caller.greeting.kind != Kind.HELLO:
            self._drop(caller, f"its first frame was {caller.greeting.kind.name}")
            return
        self._forget(caller)
        try:
            self.receive(caller.as_socket(), caller.greeting.payload)
        except MalformedFrame as error:
            logger.info("refused %s: %s", caller.name, error)
            refuse(caller.as_socket(), "this hello cannot be understood")
        except OSError as error:
            logger.debug("lost %s before it was answered: %s", caller.name, error)
            caller.sock.close()

    def _expire(self) -> None:
        now = time.monotonic()
        for caller in list(self._callers.values()):
            if caller.deadline > now:
                break
            self._drop(caller, f"it did not say hello within {PATIENCE:g} s")

    def _drop(self, caller: _Caller, reason: str, tell: str = "") -> None:
        logger.info("refused %s: %s", caller.name, reason)
        self._forget(caller)
        if tell:
            refuse(caller.as_socket(), tell)
        else:
            hang_up(caller.sock)

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.sock)
        del self._callers[caller.sock.fileno()]


def _mirrored(error: VersionMismatch) -> str:
    """The mismatch as the other side sees it."""
    return (
        f"this node speaks protocol version {error.expected}, you speak {error.got}; "
        "install the same version of potluck on every machine"
    )
