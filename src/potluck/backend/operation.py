"""Operations: something that was started and will be done, and the threads that wait for it.

The data plane has no thread of its own.  Of the threads that wait, one runs the pump (moves bytes
for everybody) and the others sleep; when its own operation is done it hands the pump to a sleeper.
:class:`Turns` is that rule.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from potluck._types import Seconds, in_seconds
from potluck.errors import BackendUnavailable, DistributedError, Timeout

LONGEST = 3600.0
"""Seconds of one sleep, after which the deadline is looked at again: epoll ends at 24 days."""


def deadline_after(timeout: float | None) -> float | None:
    """The moment ``timeout`` seconds from now; None is never."""
    if timeout is None or timeout == math.inf:
        return None
    if timeout < 0 or timeout != timeout:  # noqa: PLR0124 - the second is how NaN shows
        msg = f"A timeout must be zero or more seconds, not {timeout}"
        raise ValueError(msg)
    return time.monotonic() + timeout


class Driver(Protocol):
    """Who makes an operation progress."""

    def drive(self, operation: Operation, deadline: float | None) -> bool:
        """Work until the operation is done (True) or the deadline has passed (False)."""

    def give_up(self, operation: Operation) -> None:
        """Make sure that the operation touches the caller's buffer no more; it may end done."""


class Operation:
    """A send, a receive or a barrier under way.

    ``done`` turns true once and stays; ``error`` is then None or what went wrong.  Until it is
    done the buffer belongs to the operation.

    >>> from potluck import SimulatedBackend
    >>> left, right = SimulatedBackend.create_group(2)
    >>> inbox = bytearray(2)
    >>> receive = right.post_recv_into(inbox, src=0)
    >>> left.post_send(b"hi", dst=1).wait()
    >>> receive.wait()
    >>> bytes(inbox)
    b'hi'
    """

    __slots__ = ("_driver", "_sleepers", "done", "error")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._sleepers: tuple[threading.Lock, ...] = ()
        self.done = False
        self.error: DistributedError | None = None

    def describe(self) -> str:
        """What this is, as the subject of a sentence."""
        return "The operation"

    def wait(self, timeout: Seconds | None = None) -> None:
        """Return when done, raise what went wrong, or raise :class:`Timeout`.

        After a time-out the operation goes on and still owns its buffer: wait again or
        :meth:`cancel` it.
        """
        timeout = in_seconds(timeout)
        if not self.done and not self._driver.drive(self, deadline_after(timeout)):
            raise self.timeout_error(timeout or 0.0)
        if self.error is not None:
            raise copy.copy(self.error)  # each gets its own: tracebacks would pile up on one

    def cancel(self) -> bool:
        """Give the buffer back without waiting; False if the operation was done after all."""
        if not self.done:
            self._driver.give_up(self)
        return isinstance(self.error, Cancelled)

    def finish_within(self, timeout: float | None) -> None:
        """Like :meth:`wait`, but a time-out gives the buffer back: for blocking calls."""
        try:
            in_time = self.done or self._driver.drive(self, deadline_after(timeout))
        except BaseException:  # Ctrl-C, or a timeout that is no number: nobody waits any more
            self.cancel()
            raise
        if not in_time and self.cancel():
            raise self.timeout_error(timeout or 0.0)
        if self.error is not None:
            raise copy.copy(self.error)  # each gets its own: tracebacks would pile up on one

    def timeout_error(self, seconds: float) -> Timeout:
        """The error for a deadline that passed."""
        return Timeout(f"{self.describe()} was not done within {seconds:g} s", seconds=seconds)

    def finish(self, error: DistributedError | None = None) -> None:
        """Become done and wake the threads that wait; the first call counts."""
        if self.done:
            return
        self.error = error
        self.done = True
        for sleeper in self._sleepers:
            _wake(sleeper)

    def sleep(self, sleeper: threading.Lock) -> None:
        """Name a lock that :meth:`finish` shall release."""
        self._sleepers += (sleeper,)

    def rise(self, sleeper: threading.Lock) -> None:
        """Forget that lock again."""
        self._sleepers = tuple(lock for lock in self._sleepers if lock is not sleeper)


class Ended(Operation):
    """An operation that is over, without its buffer."""

    def __init__(self, error: DistributedError | None = None) -> None:
        self.done = True
        self.error = error


DONE = Ended()


def finish_all(operations: Iterable[Operation], error: DistributedError) -> None:
    """End several operations alike."""
    for operation in operations:
        operation.finish(error)


class Cancelled(DistributedError):
    """The operation was cancelled by the one who started it."""

    recoverable = True


def _wake(sleeper: threading.Lock) -> None:
    with contextlib.suppress(RuntimeError):  # already awake
        sleeper.release()


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


class Turns:
    """Who of the waiting threads runs the pump."""

    def __init__(self, pump: Callable[[float | None], None], wake: Callable[[], None]) -> None:
        self._pump = pump
        self._wake_pump = wake
        self._turn = threading.Lock()
        self._holder = 0  # the thread whose turn it is
        self._sleepers: deque[threading.Lock] = deque()
        self._wanted = 0  # threads that want the pump to stand still
        self._stirred = False  # something was done outside the pump
        self._counting = threading.Lock()  # guards _wanted and who sleeps for an operation

    def wait(self, operation: Operation, deadline: float | None) -> bool:
        """Pump or sleep until ``operation`` is done; False when the deadline comes first."""
        try:
            while not operation.done and not _is_past(deadline):
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
            if not operation.done:
                self.step(0)  # even without time to wait: what has arrived counts
        finally:
            # The pump may have been handed to us after our last look at it: pass it on.
            if not self._turn.locked():
                self._hand_over()
        return operation.done

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
        while not operation.done and not self._wanted:
            timeout = None if deadline is None else deadline - time.monotonic()
            if timeout is not None and timeout <= 0:
                return
            self._pump(None if timeout is None else min(timeout, LONGEST))
            self._stirred = False

    def _sleep(self, operation: Operation, deadline: float | None) -> None:
        sleeper = threading.Lock()
        sleeper.acquire()
        try:
            with self._counting:
                operation.sleep(sleeper)
            self._sleepers.append(sleeper)
            # Only now look again: whoever finishes or leaves from here on sees the sleeper.
            if not operation.done and self._turn.locked():
                remaining = LONGEST if deadline is None else deadline - time.monotonic()
                sleeper.acquire(timeout=min(max(0.0, remaining), LONGEST))
        finally:
            with contextlib.suppress(ValueError):  # already taken off by who handed us the pump
                self._sleepers.remove(sleeper)
            with self._counting:
                operation.rise(sleeper)

    def _hand_over(self) -> None:
        if self._sleepers:
            with contextlib.suppress(IndexError):  # it woke by itself in this instant
                _wake(self._sleepers.popleft())
