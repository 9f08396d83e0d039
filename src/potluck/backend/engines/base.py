"""EngineBackend: the mesh of ranks over an engine that somebody else has started.

An engine, such as MPI or a process group of PyTorch, sends messages between ranks; a mesh wants
streams.  So each link of the mesh is a pipe in memory whose far end, a :class:`Terminal`, belongs
to the engine: what the mesh writes is sent as messages, and messages that come in are written back.

Tags, groups, barriers, remote calls, compression and all collectives then work as over TCP.  What
the engine does better itself, it is asked to do: see ``Backend.all_reduce_by_engine``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from potluck.backend.limits import Limits
from potluck.backend.mesh import MeshBackend
from potluck.errors import DistributedError
from potluck.net.memory import MemoryPoller, pipe

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CHUNK", "EngineBackend", "Terminal", "is_special"]

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


class Terminal:
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
        super().__init__(rank, world_size, MemoryPoller(), Limits())
        self._terminals = {
            peer: Terminal(peer, f"rank {peer} by {self.engine}")
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
