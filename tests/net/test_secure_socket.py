"""A socket that speaks TLS while a connection opens: it waits as long as it was told, no longer."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from potluck.net.secure_socket import SecureSocket
from support.tls_pair import open_pair, pair


def test_what_comes_too_late_does_not_prolong_a_handshake() -> None:
    """A side that sends a byte now and then has as much time as one that sends none."""
    client, _ = pair()
    ours, theirs = socket.socketpair()
    with contextlib.closing(SecureSocket(ours, client)) as sock, theirs:
        theirs.sendall(b"\x16")
        with pytest.raises(TimeoutError):
            sock.handshake(time.monotonic())


def test_what_comes_too_late_does_not_prolong_the_end_of_tls() -> None:
    """Somebody that talks on instead of ending TLS is left."""
    client, server = open_pair()
    ours, theirs = socket.socketpair()
    with contextlib.closing(SecureSocket(ours, client)) as sock, theirs:
        server.write(b"and another thing")
        theirs.sendall(server.outgoing())
        with pytest.raises(TimeoutError):
            sock.release(time.monotonic())
