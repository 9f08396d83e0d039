"""How connections open: in TLS as one node of one namespace, or in clear when asked for by name."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from potluck.net.client_hello import ClientHello
from potluck.net.identity import NodeIdentity
from potluck.net.namespace import NetworkNamespace
from potluck.net.secure_socket import SecureSocket
from potluck.net.tls import TlsChannel, client_context, server_context
from potluck.net.tls_context import Group, NamespaceContext
from potluck.vocabulary import NodeId

__all__ = ["NOBODY", "Security"]

NOBODY = NodeId("")
"""Who a peer is on a connection in clear: it has proved nothing."""

_Make = Callable[[NetworkNamespace, NodeIdentity, Group], NamespaceContext]


class Security:
    """What this process shows and accepts on every connection.

    Callers may come under an earlier secret too, and are then known as such (:meth:`is_current`):
    they were away while it changed.  What they are granted is for others to decide.
    """

    def __init__(self, namespace: NetworkNamespace, identity: NodeIdentity | None = None) -> None:
        self.namespace = namespace
        self._identity = identity
        # By side, tag and group; two threads may make the same one, and either will do.
        self._contexts: dict[tuple[_Make, str, Group], NamespaceContext] = {}

    @classmethod
    def load(cls, namespace: NetworkNamespace | str | None = None) -> Security:
        """The given namespace, or the one this machine uses."""
        if not isinstance(namespace, NetworkNamespace):
            namespace = NetworkNamespace.load_or_create(namespace)
        return cls(namespace)

    def renew(self, namespace: NetworkNamespace) -> None:
        """Go on under the namespace as it is now; what is open stays open."""
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
        """Our own id, or nobody's on connections in clear."""
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

        ``secret`` is an earlier one, for somebody who was away.
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
        group = next((one for one in Group if one.value in hello.groups), None)
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
        self, make: _Make, namespace: NetworkNamespace, group: Group = Group.X25519
    ) -> NamespaceContext:
        key = make, namespace.discovery_tag, group
        if key not in self._contexts:
            self._contexts[key] = make(namespace, self.identity, group)
        return self._contexts[key]


def _under(namespace: NetworkNamespace, secret: bytes) -> NetworkNamespace:
    return namespace if secret == namespace.secret else replace(namespace, secret=secret)
