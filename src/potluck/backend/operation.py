"""Operations: something that was started and will be done, and the threads that wait for it.

The data plane has no thread of its own.  Of the threads that wait, one runs the pump (moves bytes
for everybody) and the others sleep; when its own operation is done it hands the pump to a sleeper.
:class:`PumpLock` is that rule.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from potluck._future import LONGEST, Future, deadline_after, wake_sleeper
from potluck.errors import BackendUnavailable, DistributedError


class Operation(Future[None]):
    """A send, a receive or a barrier in progress.  Until it is done the buffer belongs to it.

    It moves while some thread uses the backend: of those that wait, one runs the pump.

    >>> from potluck import SimulatedBackend
    >>> left, right = SimulatedBackend.create_group(2)
    >>> inbox = bytearray(2)
    >>> receive = right.post_recv_into(inbox, src=0)
    >>> left.post_send(b"hi", dst=1).wait()
    >>> receive.wait()
    >>> bytes(inbox)
    b'hi'
    """

    __slots__ = ("pump",)

    is_passive = True
    error: DistributedError | None

    def __init__(self, pump: PumpLock) -> None:
        super().__init__()
        self.pump = pump

    def cancel(self) -> bool:
        """Give the buffer back without waiting; False if the operation was done after all."""
        if not self.ended:
            self._give_up()
        return isinstance(self.error, Cancelled)

    def finish_within(self, timeout: float | None) -> None:
        """Like :meth:`wait`, but a time-out gives the buffer back: for blocking calls."""
        try:
            in_time = self.ended or self.drive(timeout)
        except BaseException:  # Ctrl-C, or a timeout that is not a number: no thread waits any more
            self.cancel()
            raise
        if not in_time and self.cancel():
            raise self.timeout_error(timeout or 0.0)
        if self.error is not None or not self.ended:
            self.result()

    def drive(self, limit: float | None) -> bool:
        """Run the pump, or sleep while another thread does."""
        return self.pump.wait(self, deadline_after(limit))

    def _give_up(self) -> None:
        """Make sure that it no longer touches the caller's buffer; it may end done."""
        with self.pump.standstill():
            self.finish(Cancelled(f"{self.describe()} was cancelled"))


def finish_all(operations: Iterable[Operation], error: DistributedError) -> None:
    """End several operations alike."""
    for operation in operations:
        operation.finish(error)


class Cancelled(DistributedError):
    """The operation was cancelled by the one who started it."""

    recoverable = True


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


class PumpLock:
    """Who of the waiting threads runs the pump."""

    def __init__(self, pump: Callable[[float | None], None], wake: Callable[[], None]) -> None:
        self._pump = pump
        self._wake_pump = wake
        self._turn = threading.Lock()
        self._holder = 0  # the thread whose turn it is
        self._sleepers: deque[threading.Lock] = deque()
        self._wanted = 0  # threads that want the pump to stand still
        self._stirred = False  # something was done outside the pump
        self._counting = threading.Lock()  # guards _wanted

    def wait(self, operation: Operation, deadline: float | None) -> bool:
        """Pump or sleep until ``operation`` is done; False when the deadline comes first."""
        try:
            while not operation.ended and not _is_past(deadline):
                if not self._wanted and self._turn.acquire(blocking=False):
                    try:
                        self._holder = threading.get_ident()
                        self._run(operation, deadline)
                    finally:
                        self._holder = 0
                        self._turn.release()  # itself: Ctrl-C could come before a method of ours
                        self._hand_over()
                elif self._turn.locked():
                    self.refuse_nesting()
                    self._sleep(operation, deadline)
                else:
                    time.sleep(0)  # a standstill is about to begin: let that thread run
            if not operation.ended:
                self.step(0)  # even without time to wait: what has arrived counts
        finally:
            # The pump may have been handed to us after our last look at it: pass it on.
            if not self._turn.locked():
                self._hand_over()
        return operation.ended

    def wait_briefly(self, operation: Operation, deadline: float | None, pause: float) -> bool:
        """Wait at most ``pause``; True when there is nothing more to wait for."""
        now = time.monotonic()
        if deadline is not None:
            pause = min(pause, (deadline - now) / 4)  # leave time for what comes after
        return self.wait(operation, now + pause) or pause <= 0

    def step(self, timeout: float | None) -> bool:
        """Pump once; False if another thread does."""
        if timeout is not None and not 0 <= timeout <= LONGEST:
            timeout = None if deadline_after(timeout) is None else LONGEST
        if not self._turn.acquire(blocking=False):
            return False
        try:
            self._holder = threading.get_ident()
            if not self._wanted:
                self._pump(timeout)
                self._stirred = False
        finally:
            self._holder = 0
            self._turn.release()
            self._hand_over()
        return True

    @property
    def is_called(self) -> bool:
        """Whether the pump shall not fall asleep: a wake-up comes once and may be spent."""
        return self._stirred or self._wanted > 0

    def stir(self) -> None:
        """An operation was finished by a thread that does not pump: the one that does shall look.

        It is cleared only after the pump has run and before who pumps looks at its operation.
        """
        self._stirred = True
        self._wake_pump()

    @contextmanager
    def standstill(self) -> Iterator[None]:
        """Hold the pump still: inside, no other thread reads from any stream."""
        self.refuse_nesting()
        self._count(1)
        try:
            self._wake_pump()
            self._turn.acquire()
        finally:  # also after Ctrl-C: a standstill that nobody holds would be for ever
            self._count(-1)
        try:
            self._holder = threading.get_ident()
            yield
        finally:
            self._holder = 0
            self._turn.release()
            self._hand_over()

    def refuse_nesting(self) -> None:
        """Raise if this thread is pumping further down its own stack: it would wait for itself."""
        if self._holder == threading.get_ident():
            raise BackendUnavailable(
                "This thread is in the middle of moving bytes for this group",
                cause="a signal handler or finalizer that interrupted it uses the group as well",
                hint="Raise an exception there, such as SystemExit, and use the group afterwards.",
            )

    def _count(self, change: int) -> None:
        with self._counting:
            self._wanted += change

    def _run(self, operation: Operation, deadline: float | None) -> None:
        while not operation.ended and not self._wanted:
            timeout = None if deadline is None else deadline - time.monotonic()
            if timeout is not None and timeout <= 0:
                return
            self._pump(None if timeout is None else min(timeout, LONGEST))
            self._stirred = False

    def _sleep(self, operation: Operation, deadline: float | None) -> None:
        sleeper = threading.Lock()
        sleeper.acquire()
        try:
            operation.add_sleeper(sleeper)
            self._sleepers.append(sleeper)
            # Only now look again: whoever finishes or leaves from here on sees the sleeper.
            if not operation.ended and self._turn.locked():
                remaining = LONGEST if deadline is None else deadline - time.monotonic()
                sleeper.acquire(timeout=min(max(0.0, remaining), LONGEST))
        finally:
            with contextlib.suppress(ValueError):  # already taken off by who handed us the pump
                self._sleepers.remove(sleeper)
            operation.remove_sleeper(sleeper)

    def _hand_over(self) -> None:
        if self._sleepers:
            with contextlib.suppress(IndexError):  # it woke by itself in this instant
                wake_sleeper(self._sleepers.popleft())


DONE = Operation(PumpLock(lambda _: None, lambda: None))
"""An operation that is over, without a buffer."""
DONE.finish()
