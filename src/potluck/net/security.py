"""How connections open: in TLS as one node of one namespace, or in clear when asked for by name."""

from __future__ import annotations

import socket
import ssl
from functools import cached_property

from potluck.net.identity import NodeIdentity
from potluck.net.namespace import NetworkNamespace
from potluck.net.secure_socket import SecureSocket
from potluck.net.tls import TlsChannel, client_context, server_context
from potluck.vocabulary import NodeId

__all__ = ["NOBODY", "Security"]

NOBODY = NodeId("")
"""Who a peer is on a connection in clear: it has proved nothing."""


class Security:
    """What this process shows and accepts on every connection."""

    def __init__(self, namespace: NetworkNamespace, identity: NodeIdentity | None = None) -> None:
        self.namespace = namespace
        self._identity = identity

    @classmethod
    def load(cls, namespace: NetworkNamespace | str | None = None) -> Security:
        """The given namespace, or the one this machine uses."""
        if not isinstance(namespace, NetworkNamespace):
            namespace = NetworkNamespace.load_or_create(namespace)
        return cls(namespace)

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
        """Our own id, or nobody's on connections in clear."""
        return self.identity.id if self.is_encrypted else NOBODY

    @cached_property
    def _server(self) -> ssl.SSLContext:
        return server_context(self.namespace, self.identity)

    @cached_property
    def _client(self) -> ssl.SSLContext:
        return client_context(self.namespace, self.identity)

    def answer_channel(self, host: str) -> TlsChannel | None:
        """For a connection that comes in; None in clear."""
        if not self.is_encrypted:
            return None
        return TlsChannel(self._server, server_side=True, host=host)

    def dial_channel(self, host: str, expected: NodeId | None = None) -> TlsChannel | None:
        """For a connection we make, to a certain node or to any member; None in clear."""
        if not self.is_encrypted:
            return None
        return TlsChannel(self._client, server_side=False, expected=expected or None, host=host)

    def dial(
        self, sock: socket.socket, host: str, deadline: float, expected: NodeId | None = None
    ) -> socket.socket | SecureSocket:
        """Open TLS on a connection we made; in clear, the socket as it is."""
        channel = self.dial_channel(host, expected)
        if channel is None:
            return sock
        secure = SecureSocket(sock, channel)
        secure.handshake(deadline)
        return secure
