"""MpiBackend: the ranks of an MPI communicator, through mpi4py.

MPI offers nothing to sleep on: a call that waits spins.  One thread therefore asks it what has come
and what has gone, at once while there is traffic and more and more rarely when there is none.  All
calls of MPI are made on that thread, so any level of thread support but the lowest will do.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from potluck.backend.adapters.base import CHUNK, EngineBackend, EngineEndpoint, is_special
from potluck.errors import BackendUnavailable, PeerLost, Timeout
from potluck.schedule.reduce import ReduceOp

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


TAG = 77  # in a communicator of our own, so nobody else uses any
IN_FLIGHT = 4
"""Messages to one peer that MPI may be busy with."""

LIVELY = 0.002
"""Seconds after traffic in which MPI is asked without a pause, except for other threads."""

LONGEST_NAP = 0.001
"""Seconds between two questions when nothing has happened for long."""

END_WITHIN = 1.0
"""Seconds for what was sent to be taken, when the group ends."""

SENT_WITHIN = 4.0
"""Seconds more for our last words to be taken, without which others would think that we crashed."""

_NUMBERS = frozenset("bBhHiIlLqQfd")
"""Types of numpy, by their letters, that MPI adds up as C does."""

_Task = tuple[Callable[[], Any], "Future[None]"]
"""How a collective is started, and where its end is told."""


class MpiBackend(EngineBackend):
    """The ranks of ``comm``, MPI's world unless given; every rank of it makes one.

    The communicator is duplicated, so other traffic in it is not disturbed; closing frees the
    duplicate and nothing else.  MPI itself ends all ranks when one of them dies.

    Under ``mpirun -n 4 python train.py``, ``MpiBackend()`` is all there is to say; whether a
    backend is such a one can be asked without MPI:

    >>> issubclass(MpiBackend, EngineBackend), MpiBackend.engine
    (True, 'MPI')
    """

    engine = "MPI"

    def __init__(self, comm: Any = None) -> None:
        mpi = _load()
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            raise BackendUnavailable(
                "MPI was started for a single thread",
                hint="Set mpi4py.rc.thread_level = 'serialized' before importing mpi4py.MPI.",
            )
        self._mpi = mpi
        self._comm = (mpi.COMM_WORLD if comm is None else comm).Dup()
        super().__init__(self._comm.Get_rank(), self._comm.Get_size())
        self._leaving: dict[int, deque[tuple[Any, bytes]]] = {
            peer: deque() for peer in self._terminals
        }
        self._open = set(self._terminals)
        self._listening = set(self._terminals)
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._running: list[tuple[Any, Future[None]]] = []
        self._stop = threading.Event()
        self._start(self._run, "mpi")

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        nap, busy_until = 0.0, time.monotonic()
        give_up: float | None = None
        while not self._is_over(give_up):
            moved = self._move()
            now = time.monotonic()
            if self._stop.is_set() and give_up is None:
                give_up = now + END_WITHIN
            if moved:
                nap, busy_until = 0.0, now + LIVELY
            elif now >= busy_until:
                nap = min(LONGEST_NAP, nap * 1.5 + 20e-6)
            time.sleep(nap)  # also without a nap: the others of this process want to work
        self._comm.Free()

    def _is_over(self, give_up: float | None) -> bool:
        if not self._stop.is_set():
            return False
        has_sent = not any(self._leaving.values()) and not self._open
        if has_sent and not self._listening:
            return True
        patience = 0.0 if has_sent else SENT_WITHIN
        return give_up is not None and time.monotonic() > give_up + patience

    def _move(self) -> bool:
        moved = False
        for peer, terminal in self._terminals.items():
            moved |= self._send(peer, terminal)
        moved |= self._receive()
        return self._serve() or moved

    def _send(self, peer: int, terminal: EngineEndpoint) -> bool:
        flights = self._leaving[peer]
        moved = False
        while flights and flights[0][0].Test():
            flights.popleft()
            moved = True
        while peer in self._open and len(flights) < IN_FLIGHT:
            chunk = terminal.take(wait=False)
            if chunk is None:
                break
            data = bytes(chunk)
            flights.append((self._comm.Isend([data, self._mpi.BYTE], peer, TAG), data))
            moved = True
            if not data:  # an empty message is the end
                self._open.discard(peer)
        return moved

    def _receive(self) -> bool:
        status = self._mpi.Status()
        for peer in list(self._listening):
            terminal = self._terminals[peer]
            if not terminal.has_room:
                continue
            message = self._comm.Improbe(peer, TAG, status)
            if message is None:
                continue
            size = status.Get_count(self._mpi.BYTE)
            if size > CHUNK:
                terminal.close()
                self._listening.discard(peer)
                continue
            data = bytearray(size)
            message.Recv([data, self._mpi.BYTE])
            if not size or not terminal.put(data):
                terminal.finish()
                self._listening.discard(peer)
            return True
        return False

    def _serve(self) -> bool:
        """Start collectives that were asked for, and see which are done."""
        moved = False
        while not self._tasks.empty():
            start, outcome = self._tasks.get()
            try:
                self._running.append((start(), outcome))
            except self._mpi.Exception as error:
                outcome.set_exception(error)
            moved = True
        for entry in list(self._running):
            request, outcome = entry
            if request.Test():
                self._running.remove(entry)
                outcome.set_result(None)
                moved = True
        return moved

    # -- what MPI does itself ------------------------------------------------------------------

    def all_reduce_by_engine(
        self, array: npt.NDArray[np.generic], op: ReduceOp | str, timeout: float | None
    ) -> bool:
        """Add up in place, if MPI knows the type and the operation."""
        name = ReduceOp.named(op).value
        operation = getattr(self._mpi, _OPERATIONS.get(name, ""), None)
        if array.dtype.char not in _NUMBERS or not array.dtype.isnative or operation is None:
            return False
        if is_special(array.dtype, name):
            return False
        self._ask(
            lambda: self._comm.Iallreduce(self._mpi.IN_PLACE, array, op=operation),
            timeout,
            "all-reduce",
        )
        if name == "mean":
            array /= self.world_size  # type: ignore[misc]
        return True

    def broadcast_by_engine(
        self, array: npt.NDArray[np.generic], root: int, timeout: float | None
    ) -> bool:
        """Bring the root's values to all ranks, in place."""
        raw = memoryview(array.view("u1"))  # type: ignore[arg-type]
        self._ask(lambda: self._comm.Ibcast([raw, self._mpi.BYTE], root=root), timeout, "broadcast")
        return True

    def _ask(self, start: Callable[[], Any], timeout: float | None, what: str) -> None:
        self._check_open()
        outcome: Future[None] = Future()
        self._tasks.put((start, outcome))
        try:
            outcome.result(timeout)
        except TimeoutError:
            raise Timeout(
                f"The MPI {what} timed out after {timeout:g} s on rank {self.rank}",
                seconds=timeout or 0.0,
            ) from None
        except self._mpi.Exception as error:
            raise PeerLost(f"The MPI {what} failed on rank {self.rank}", cause=str(error)) from None

    def close(self) -> None:
        """Leave the group; MPI itself stays as it is."""
        if self._closed is None:
            self._stop.set()
        super().close()
        for thread in self._threads:  # while it lives nobody else may call MPI, nor end it
            thread.join(END_WITHIN + SENT_WITHIN)


_OPERATIONS = {
    "sum": "SUM",
    "mean": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "bit_and": "BAND",
    "bit_or": "BOR",
    "bit_xor": "BXOR",
}


def _load() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BackendUnavailable(
            "mpi4py is not installed, or it cannot find an MPI library",
            cause=str(error),
            hint="Run pip install 'potluck[mpi]' and install an MPI library such as Open MPI.",
        ) from None
    return MPI
