"""The agent's own thread: reads what comes in from all ranks, and runs quick functions itself.

Handing a call to a worker costs more than many functions take, so one that has shown to be quick
runs where its request was read.  Should it take long for once, a watchman lets another thread read
in its stead; the one that is held up ends with its function.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from potluck.backend.spin import Spin
from potluck.core.calls_errors import RpcInternal
from potluck.logs import get_logger
from potluck.runtime.rpc_calls import Incoming, Replier
from potluck.runtime.rpc_connection import BROKEN, Connection

if TYPE_CHECKING:
    from potluck.net.transport import Poller
    from potluck.runtime.rpc_duties import Staff

__all__ = ["Loop"]

logger = get_logger(__name__)

TICK = 0.05
"""Seconds between two looks at deadlines while something is under way."""

WATCH = 0.002
"""Seconds after which a function that runs on the reading thread is taken to be slow."""


class Loop:
    """Who reads, and what it has read."""

    def __init__(
        self, poller: Poller, make_direct: Callable[[Connection], Poller | None], staff: Staff
    ) -> None:
        self._poller = poller
        self._make_direct = make_direct
        self._staff = staff
        self._spin = Spin()
        self._new: deque[Connection] = deque()
        self._batch: deque[Incoming] = deque()  # quick calls that were read and have not begun
        self._touched: dict[int, Replier] = {}  # where answers may be held back
        self._again: set[int] = set()  # ranks of which more is here that no poller knows of
        self._dozing = False
        self._called = False
        self._running = 0  # the number of the quick function that runs; even when none does
        self._displaced: threading.Thread | None = None
        self._owner = 0  # the number of the thread that reads
        self._handover = threading.Lock()  # between the reading thread and the watchman
        self._watchman = threading.Event()
        self._watching = False
        self._closed = False
        self._reader = _make_thread(self._read_all, "potluck-rpc")
        self._watcher = _make_thread(self._watch, "potluck-rpc-watch")

    def start(self) -> None:
        """Begin."""
        self._reader.start()
        self._watcher.start()

    @property
    def is_mine(self) -> bool:
        """Whether this thread is the one that reads."""
        return threading.get_ident() == self._owner

    @property
    def is_idle(self) -> bool:
        """Whether no quick function runs, or is about to."""
        return not (self._batch or self._touched or self._running % 2)

    @property
    def takes_quick(self) -> bool:
        """Whether a quick function may run on this thread."""
        return self._displaced is None and threading.get_ident() == self._owner

    def add(self, connection: Connection) -> None:
        """Read this connection too."""
        self._new.append(connection)
        self._call()

    def run_soon(self, call: Incoming) -> None:
        """Answer a quick call once everything is read that is here."""
        self._batch.append(call)

    def rouse(self) -> None:
        """Something with a deadline is under way: look at it from time to time."""
        if self._dozing:
            self._call()

    def _call(self) -> None:
        self._called = True  # before the wake-up, which a spinning thread may spend
        self._poller.wake()

    # -- reading -----------------------------------------------------------------------------------

    def _read_all(self) -> None:
        self._owner = threading.get_ident()
        ticked = 0.0
        while self.is_mine and not self._closed:
            self._called = False
            if self._new:
                self._begin_new()
            again = self._again
            events = [] if again else self._spin.look(self._poller)
            now = time.monotonic()
            timeout = None
            if not (events or again) or now >= ticked + TICK:
                self._dozing = True  # before the look: what begins from now on wakes us
                timeout = TICK if self._staff.tick(now) else None
                ticked = now
            if not events:
                hurries = self._called or self._closed or again or self._batch
                events = self._poller.wait(0.0 if hurries else timeout)
            self._dozing = False
            self._again = set()
            for rank, readable, writable in (*events, *((rank, True, False) for rank in again)):
                if self._move(rank, readable, writable):
                    self._again.add(rank)
            if self._batch:
                self._run_batch()
        if self._displaced is threading.current_thread():
            self._displaced = None

    def _begin_new(self) -> None:
        while self._new:
            connection = self._new.popleft()
            try:
                connection.begin(self._poller, self._make_direct(connection))
                with connection.reading:
                    while connection.read():  # what came with the opening shows in no poller
                        pass
            except BROKEN as error:
                self._staff.lose(connection, error)
            except BaseException as error:  # only this thread reads the others' connections
                logger.exception("Opening the connection to rank %d failed", connection.rank)
                self._staff.lose(connection, RpcInternal(repr(error), rank=connection.rank))

    def _move(self, rank: int, readable: bool, writable: bool) -> bool:  # noqa: FBT001
        """Bytes can move; whether more may be here that no poller knows of."""
        connection = self._staff.connection_of(rank)
        if connection is None:
            return False
        if writable:
            with connection.lock:
                connection.flush()
        if not readable or not connection.reading.acquire(blocking=False):
            return False  # a thread that waits for its answer reads
        broken: Exception | None = None
        more = False
        try:
            more = connection.read()
        except BROKEN as error:
            broken = error
        except BaseException as error:  # only this thread reads the others' connections
            logger.exception("Reading from rank %d failed", rank)
            broken = RpcInternal(repr(error), rank=rank)
        finally:
            connection.reading.release()
        if broken is not None:
            self._staff.lose(connection, broken)
        return more and broken is None

    # -- quick functions ---------------------------------------------------------------------------

    def _run_batch(self) -> None:
        """Run what was read, and send the answers together."""
        while self._batch:
            call = self._batch.popleft()
            if call.origin.is_congested:
                _flush([call.origin])
                if call.origin.is_congested:  # it does not take its answers: make no more of them
                    self._staff.hand_over(call)
                    continue
            is_last = not self._batch
            if not is_last:
                self._touched[call.source] = call.origin
            self._running += 1
            if not self._watching:  # only now: the watchman looks at the number last
                self._watching = True
                self._watchman.set()
            self._staff.answer(call, cork=not is_last)
            with self._handover:
                self._running += 1
            if not self.is_mine:
                _flush([call.origin])
                return
        touched, self._touched = self._touched, {}
        _flush(touched.values())

    def _watch(self) -> None:
        """Look every moment whether a quick function is one, as long as any run."""
        seen = -1
        while not self._closed:
            if seen == self._running and not seen % 2:
                self._watching = False
                if seen == self._running:  # or one has begun in this instant
                    self._watchman.wait()
                self._watchman.clear()
                self._watching = True
                continue
            seen = self._running
            time.sleep(WATCH)
            if seen == self._running and seen % 2 and self._displaced is None:
                self._displace(seen)

    def _displace(self, seen: int) -> None:
        """Let another thread read: the one that did is held up by a function."""
        with self._handover:
            if self._running != seen or self._closed:
                return  # it has just ended
            self._displaced, self._owner = self._reader, 0
            left, self._batch = self._batch, deque()
            touched, self._touched = self._touched, {}
            self._reader = _make_thread(self._read_all, "potluck-rpc")
        for call in left:
            self._staff.hand_over(call)
        _flush(touched.values())
        self._reader.start()

    # -- the end -----------------------------------------------------------------------------------

    def close(self, deadline: float) -> None:
        """Read no more."""
        self._closed = True
        self._watchman.set()
        self._call()
        self._watcher.join(max(0.0, deadline - time.monotonic()))  # first: it may start a reader
        for thread in (self._reader, self._displaced):
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._poller.close()


def _flush(origins: Iterable[Replier]) -> None:
    """Send what was held back."""
    for origin in origins:
        if isinstance(origin, Connection):
            with origin.lock:
                origin.flush()


def _make_thread(target: Callable[[], None], name: str) -> threading.Thread:
    return threading.Thread(target=target, name=name, daemon=True)
