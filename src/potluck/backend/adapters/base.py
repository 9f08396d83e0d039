"""EngineBackend: the mesh of ranks over an engine that another library has started.

An engine, such as MPI or a process group of PyTorch, sends messages between ranks; a mesh wants
streams.  So each link of the mesh is a pipe in memory whose far end, an :class:`EngineEndpoint`,
belongs to the engine: what the mesh writes is sent as messages, and messages that come in are
written back.

Tags, groups, barriers, remote calls, compression and all collectives then work as over TCP.  What
the engine does better itself, it is asked to do: see ``Backend.all_reduce_by_engine``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from potluck._process import ForkSafeLock
from potluck.backend.base import Backend
from potluck.backend.mesh import MeshBackend
from potluck.backend.messages import MessageLimits
from potluck.errors import DistributedError
from potluck.net.memory import MemoryPoller, pipe

if TYPE_CHECKING:
    import numpy as np


CHUNK = 256 << 10
"""Bytes of one message of the engine at most."""

CAPACITY = 4 * CHUNK
"""Bytes that wait for the engine, or for the mesh, on each link."""


LEAVE_WITHIN = 1.0
"""Seconds for the engine to take our last words."""

LOOK_EVERY = 1.0
"""Seconds after which the thread that moves bytes looks at whether the backend is closed."""

YIELD = 0.002
"""Seconds that it leaves the moving to a caller."""


def is_special(dtype: np.dtype[Any], op: str) -> bool:
    """Whether engines differ from us, and from each other, in what an operation means."""
    if dtype.kind in "iu":
        return op == "mean"
    return op not in {"sum", "mean", "product"}  # of NaN, and of bits that stand for fractions


class EngineEndpoint:
    """The engine's end of one link.  One thread may put, another take."""

    def __init__(self, peer: int, name: str) -> None:
        self.peer = peer
        self.stream, self._far = pipe(("this rank", name), capacity=CAPACITY)
        """The mesh's end, and ours."""
        self._watch = MemoryPoller()
        self._watch.register(self._far, peer)
        self._chunk = memoryview(bytearray(CHUNK))

    def take(self, *, wait: bool = True) -> memoryview | None:
        """What the mesh has written, lent until the next call; empty at its end.

        None if there is nothing and we do not wait.
        """
        with self._watch.changed:
            while self._far.readable_at() is None:
                if not wait:
                    return None
                self._watch.changed.wait()
        try:
            count = self._far.recv_into(self._chunk)
        except OSError:
            return self._chunk[:0]
        return self._chunk[:count]

    @property
    def has_room(self) -> bool:
        """Whether something can be put without waiting for the mesh."""
        return self._far.writable()

    def put(self, data: memoryview | bytes | bytearray) -> bool:
        """Hand bytes to the mesh; False if it takes no more, ever."""
        view = memoryview(data)
        while view:
            with self._watch.changed:
                while not self._far.writable():
                    self._watch.changed.wait()
            try:
                view = view[self._far.sendmsg([view]) :]
            except BlockingIOError:
                continue
            except OSError:
                return False
        return True

    def finish(self) -> None:
        """The peer has left in order."""
        self._far.finish(0.0)

    def close(self) -> None:
        """The peer is lost."""
        self._far.close()


class EngineBackend(MeshBackend):
    """One rank of a group that an engine connects."""

    has_engine = True
    engine = "the engine"
    """Its name, for people."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, MemoryPoller(), MessageLimits())
        self._terminals = {
            peer: EngineEndpoint(peer, f"rank {peer} by {self.engine}")
            for peer in range(world_size)
            if peer != rank
        }
        self._threads: list[threading.Thread] = []
        for peer, terminal in self._terminals.items():
            self.add_link(peer, terminal.stream)
        if self._terminals:
            self._start(self._keep_moving, "engine-pump")

    def _keep_moving(self) -> None:
        """Move bytes while no caller does: no kernel takes what a call that has returned wrote."""
        while self._closed is None:
            try:
                if not self._turns.step(LOOK_EVERY):
                    time.sleep(YIELD)  # a caller does
            except DistributedError:
                return

    def _start(self, target: Callable[[], None], what: str) -> None:
        thread = threading.Thread(target=target, name=f"potluck-{what}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def peer_name(self, rank: int) -> str:
        """Engines keep addresses to themselves."""
        return f"rank {rank} by {self.engine}"

    def close(self) -> None:
        """Leave the group; the engine itself stays as it is."""
        if self._closed is None:
            with contextlib.suppress(DistributedError):
                super().close()
            for thread in self._threads:
                thread.join(LEAVE_WITHIN)


# --------------------------------------------------------------------------------------------------
# Backends that only send and receive: threads carry the mesh over their blocking calls.
#
# A class with ``send``, ``recv``, ``recv_timeout`` and ``barrier`` of its own is a complete
# backend. Tags, subgroups, asynchronous messages and collectives need more, so a mesh stands on it:
# each peer has a thread that sends what the mesh writes and one that receives, as for other
# engines.

HEAD = 8
"""Bytes of the size before each message; zero says that nothing more follows."""

PLAIN_LOOK_EVERY = 0.25
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

    def _send_all(self, terminal: EngineEndpoint) -> None:
        """Send what the mesh writes, until it ends."""
        try:
            while chunk := terminal.take():
                self._below.send(len(chunk).to_bytes(HEAD, "little"), terminal.peer)
                self._below.send(bytes(chunk), terminal.peer)  # it may keep what it was given
            self._below.send(bytes(HEAD), terminal.peer)
        except Exception:  # noqa: BLE001 - whatever the user's code raises, this peer is lost
            terminal.close()

    def _receive_all(self, terminal: EngineEndpoint) -> None:
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

    def _receive(self, terminal: EngineEndpoint, size: int) -> bytearray:
        inbox = bytearray(size)
        while True:
            try:
                self._below.recv_timeout(inbox, terminal.peer, PLAIN_LOOK_EVERY)
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
