"""A leash on connections: another thread can cut them, and whoever waits for them wakes up."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref

from potluck.net.secure_socket import OpeningSocket, SecureSocket

__all__ = ["Leash"]


class Leash:
    """Holds the connections of one group: those that are being opened, and those in use.

    To cut one is to shut it down.  It is closed by its owner, so no number of a descriptor is ever
    used again while somebody still waits for it.
    """

    def __init__(self) -> None:
        self._held: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._is_cut = False
        self._lock = threading.Lock()

    def hold(self, sock: OpeningSocket) -> None:
        """One more; it is of no use if all have been cut already."""
        bare = _bare(sock)
        with self._lock:
            self._held.add(bare)
            is_cut = self._is_cut
        if is_cut:
            _shut_down(bare)

    def let_go(self, sock: OpeningSocket) -> None:
        """One less: it has another way to end."""
        with self._lock:
            self._held.discard(_bare(sock))

    def cut(self) -> None:
        """End them all, and those that are yet to come."""
        with self._lock:
            self._is_cut = True
            held = list(self._held)
        for sock in held:
            _shut_down(sock)


def _bare(sock: OpeningSocket) -> socket.socket:
    return sock.hand_over()[0] if isinstance(sock, SecureSocket) else sock


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed by its owner, or by the other side
        sock.shutdown(socket.SHUT_RDWR)
