"""A socket that speaks TLS while a connection opens, with the few methods that needs.

Hello and answer travel through it as through an ordinary socket.  A data connection then leaves it
with :meth:`SecureSocket.release` and continues with encrypted frames of its own on the bare socket.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

from potluck._types import NodeId
from potluck.identity.namespace import NetworkNamespace
from potluck.identity.node import NodeIdentity
from potluck.net.tls import (
    ClientHello,
    KeyGroup,
    NamespaceContext,
    TlsChannel,
    client_context,
    server_context,
)

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
        """The parts, for a caller that drives TLS without blocking; and what was read ahead."""
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


# --------------------------------------------------------------------------------------------------
# How connections open: in TLS as one node of one namespace, or in clear when asked for by name.

NOBODY = NodeId("")
"""Who a peer is on a connection in clear: it has proved nothing."""

_Make = Callable[[NetworkNamespace, NodeIdentity, KeyGroup], NamespaceContext]


class Security:
    """What this process shows and accepts on every connection.

    Callers may come under an earlier secret too, and are then known as such (:meth:`is_current`):
    they were away while it changed.  What they are granted is for others to decide.
    """

    def __init__(self, namespace: NetworkNamespace, identity: NodeIdentity | None = None) -> None:
        self.namespace = namespace
        self._identity = identity
        # By side, tag and group; two threads may make the same one, and either will do.
        self._contexts: dict[tuple[_Make, str, KeyGroup], NamespaceContext] = {}

    @classmethod
    def load(cls, namespace: NetworkNamespace | str | None = None) -> Security:
        """The given namespace, or the one this machine uses."""
        if not isinstance(namespace, NetworkNamespace):
            namespace = NetworkNamespace.load_or_create(namespace)
        return cls(namespace)

    def renew(self, namespace: NetworkNamespace) -> None:
        """Continue under the namespace as it is now; what is open stays open."""
        self.namespace = namespace

    @property
    def is_encrypted(self) -> bool:
        """Whether strangers are kept out and cannot read along."""
        return self.namespace.is_encrypted

    @cached_property
    def identity(self) -> NodeIdentity:
        """Who we are."""
        return self._identity or NodeIdentity.load_or_generate()

    @property
    def me(self) -> NodeId:
        """Our own id; empty on unencrypted connections."""
        return self.identity.id if self.is_encrypted else NOBODY

    def is_current(self, tag: str) -> bool:
        """Whether a connection was opened under the secret that holds now."""
        return tag == self.namespace.discovery_tag

    def answer_channel(self, host: str) -> TlsChannel | None:
        """For a connection that comes in; None in clear."""
        if not self.is_encrypted:
            return None
        context = self._context(server_context, self.namespace)
        return TlsChannel(context, server_side=True, host=host, find=self._find)

    def dial_channel(
        self, host: str, expected: NodeId | None = None, *, secret: bytes | None = None
    ) -> TlsChannel | None:
        """For a connection we make, to a certain node or to any member; None in clear.

        ``secret`` is an earlier one, for a node that was away.
        """
        if not self.is_encrypted:
            return None
        namespace = self.namespace if secret is None else _under(self.namespace, secret)
        context = self._context(client_context, namespace)
        return TlsChannel(context, server_side=False, expected=expected or None, host=host)

    def dial(
        self,
        sock: socket.socket,
        host: str,
        deadline: float,
        expected: NodeId | None = None,
        *,
        secret: bytes | None = None,
    ) -> socket.socket | SecureSocket:
        """Open TLS on a connection we made; in clear, the socket as it is."""
        channel = self.dial_channel(host, expected, secret=secret)
        if channel is None:
            return sock
        secure = SecureSocket(sock, channel)
        secure.handshake(deadline)
        return secure

    def _find(self, hello: ClientHello) -> NamespaceContext | None:
        """How to answer this hello; None if the usual way will do, be it only to refuse."""
        group = next((one for one in KeyGroup if one.value in hello.groups), None)
        if group is None:
            return None
        return self._context(server_context, self._named(hello.server), group)

    def _named(self, tag: str) -> NetworkNamespace:
        """The namespace under the secret that a caller names; as it is now if we never had it."""
        namespace = self.namespace
        if tag and not self.is_current(tag):
            for secret in namespace.previous:
                earlier = _under(namespace, secret)
                if earlier.discovery_tag == tag:
                    return earlier
        return namespace

    def _context(
        self, make: _Make, namespace: NetworkNamespace, group: KeyGroup = KeyGroup.X25519
    ) -> NamespaceContext:
        key = make, namespace.discovery_tag, group
        if key not in self._contexts:
            self._contexts[key] = make(namespace, self.identity, group)
        return self._contexts[key]


def _under(namespace: NetworkNamespace, secret: bytes) -> NetworkNamespace:
    return namespace if secret == namespace.secret else replace(namespace, secret=secret)
