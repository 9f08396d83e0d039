"""Two ends of a connection on loopback that have met in TLS."""

from __future__ import annotations

import socket

from potluck.net.secure_socket import SecureSocket
from potluck.net.tls import TlsChannel
from support.tls_pair import open_pair


def bare_sockets() -> tuple[socket.socket, socket.socket]:
    """Two ends in clear."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        left = socket.create_connection(door.getsockname())
        right, _ = door.accept()
    return left, right


def secure_sockets() -> tuple[SecureSocket, SecureSocket]:
    """Two ends in TLS, after the handshake."""
    channels: tuple[TlsChannel, TlsChannel] = open_pair()
    left, right = (
        SecureSocket(sock, channel) for sock, channel in zip(bare_sockets(), channels, strict=True)
    )
    return left, right
