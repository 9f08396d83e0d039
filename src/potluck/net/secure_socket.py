"""A socket that speaks TLS while a connection opens, with the few methods that needs.

Hello and answer travel through it as through an ordinary socket.  A data lane then leaves it with
:meth:`SecureSocket.release` and goes on with sealed frames of its own on the bare socket.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TypeAlias

from potluck.net.tls import TlsChannel
from potluck.vocabulary import NodeId

__all__ = ["OpeningSocket", "SecureSocket"]

CHUNK = 1 << 14
"""Bytes read at once: one TLS record."""


class SecureSocket:
    """A connected socket inside a TLS conversation; blocks up to its timeout, like a socket."""

    def __init__(self, sock: socket.socket, channel: TlsChannel, read: bytes = b"") -> None:
        self._sock = sock
        self._channel = channel
        self._plain = bytearray(read)  # decrypted, not yet taken
        self.settimeout = sock.settimeout
        self.setblocking = sock.setblocking
        self.shutdown = sock.shutdown
        self.getsockname = sock.getsockname
        self.getpeername = sock.getpeername
        self.fileno = sock.fileno
        self.close = sock.close

    @property
    def peer(self) -> NodeId:
        """Who the other side has proved to be."""
        return self._channel.peer

    @property
    def tag(self) -> str:
        """The discovery tag of the secret under which the two have met."""
        return self._channel.tag

    def handshake(self, deadline: float) -> None:
        """Prove who we are and learn who they are; the dialler's first step."""
        try:
            self._flush()
            while not self._channel.handshake_done:
                self._take(deadline)
                self._flush()
        except BaseException:
            with contextlib.suppress(OSError):
                self._flush()  # the alert that tells the other side why
            raise

    def sendall(self, data: bytes, /) -> None:
        """Send ``data`` encrypted."""
        self._channel.write(data)
        self._flush()

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Up to ``bufsize`` decrypted bytes; with flags, those of the bare socket."""
        if flags:
            return self._sock.recv(bufsize, flags)
        while not self._plain:
            data = self._sock.recv(CHUNK)
            if not data:
                self._channel.receive_eof()
                return b""
            self._channel.receive(data)
            self._plain += self._channel.read()
            if self._channel.closed_by_peer and not self._plain:
                return b""
        taken = bytes(self._plain[:bufsize])
        del self._plain[:bufsize]
        return taken

    def release(self, deadline: float) -> tuple[socket.socket, bytes]:
        """End TLS; returns the bare socket and the raw bytes that came behind the end."""
        over = self._channel.unwrap()
        self._sock.settimeout(max(0.001, deadline - time.monotonic()))
        self._flush()
        while not over:
            self._take(deadline)
            over = self._channel.unwrap()
        return self._sock, self._channel.leftover()

    def hand_over(self) -> tuple[socket.socket, TlsChannel, bytes]:
        """The parts, for somebody who drives TLS without blocking: and what was read ahead."""
        return self._sock, self._channel, bytes(self._plain)

    def _take(self, deadline: float) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError  # also for a side that sends a byte now and then
        self._sock.settimeout(remaining)
        data = self._sock.recv(CHUNK)
        if not data:
            # Nobody has said no: it may have stopped this instant, and be back in the next.
            raise ConnectionResetError(104, "the connection ended")
        self._channel.receive(data)

    def _flush(self) -> None:
        data = self._channel.outgoing()
        if data:
            self._sock.sendall(data)


OpeningSocket: TypeAlias = socket.socket | SecureSocket
"""What a connection opens with: a socket in clear, or one in TLS."""
