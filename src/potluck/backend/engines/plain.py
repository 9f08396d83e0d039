"""Backends that only send and receive: threads carry the mesh over their blocking calls.

A class with ``send``, ``recv``, ``recv_timeout`` and ``barrier`` of its own is a complete backend.
Tags, subgroups, asynchronous messages and collectives need more, so a mesh stands on it: each peer
has a thread that sends what the mesh writes and one that receives, as for other engines.
"""

from __future__ import annotations

import threading
from functools import partial

from potluck.backend.base import Backend
from potluck.backend.engines.base import CHUNK, EngineBackend, Terminal
from potluck.forking import ForkSafeLock

__all__ = ["PlainMesh", "carry"]

HEAD = 8
"""Bytes of the size before each message; zero says that nothing more follows."""

LOOK_EVERY = 0.25
"""Seconds of one receive, after which a thread looks at whether the mesh has been closed."""

_lock = ForkSafeLock()


def carry(backend: Backend) -> Backend:
    """The backend itself, able to start messages: of one that only sends and receives, by threads.

    Its messages belong to the mesh from then on; the caller uses those of the mesh.
    """
    if backend.is_plain:
        with _lock:
            if "_carrier" not in vars(backend):
                mesh = vars(backend)["_carrier"] = PlainMesh(backend)
                backend.on_close(mesh.close)
    return backend


class PlainMesh(EngineBackend):
    """The mesh of one rank over the blocking calls of a backend."""

    has_engine = False

    def __init__(self, below: Backend) -> None:
        self._below = below
        self.engine = type(below).__name__
        self._is_leaving = threading.Event()
        super().__init__(below.rank, below.world_size)
        for terminal in self._terminals.values():
            self._start(partial(self._send_all, terminal), "plain-out")
            self._start(partial(self._receive_all, terminal), "plain-in")

    def _send_all(self, terminal: Terminal) -> None:
        """Send what the mesh writes, until it ends."""
        try:
            while chunk := terminal.take():
                self._below.send(len(chunk).to_bytes(HEAD, "little"), terminal.peer)
                self._below.send(bytes(chunk), terminal.peer)  # it may keep what it was given
            self._below.send(bytes(HEAD), terminal.peer)
        except Exception:  # noqa: BLE001 - whatever the user's code raises, this peer is lost
            terminal.close()

    def _receive_all(self, terminal: Terminal) -> None:
        """Give the mesh what comes in, until the peer or the mesh ends."""
        try:
            while True:
                size = int.from_bytes(self._receive(terminal, HEAD), "little")
                if not 0 < size <= CHUNK:
                    break
                terminal.put(self._receive(terminal, size))
        except Exception:  # noqa: BLE001 - as above
            terminal.close()
        else:
            (terminal.close if size else terminal.finish)()

    def _receive(self, terminal: Terminal, size: int) -> bytearray:
        inbox = bytearray(size)
        while True:
            try:
                self._below.recv_timeout(inbox, terminal.peer, LOOK_EVERY)
            except TimeoutError:
                if self._is_leaving.is_set():
                    raise
            else:
                return inbox

    def peer_name(self, rank: int) -> str:
        """As the backend below calls it."""
        return self._below.peer_name(rank)

    def close(self) -> None:
        """Leave; the backend below stays open."""
        self._is_leaving.set()
        super().close()
