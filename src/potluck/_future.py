"""Future: something that was started and will be done, and who waits for it.

Messages, collectives and remote calls that are in progress are futures.  This class keeps how one
has ended, wakes the threads that sleep until then, and runs callbacks.  A subclass only says how
it makes progress while a thread waits (:meth:`Future.drive`).

Ending a future takes no lock.  The thread that ends it sets ``ended`` and then looks for sleepers
and callbacks; a thread that waits adds itself and then looks at ``ended``.  So one of the two
always sees the other.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar, cast

from potluck._process import ForkSafeLock
from potluck._time import read_timeout
from potluck._types import Seconds
from potluck.errors import DistributedError, Timeout
from potluck.logs import get_logger

logger = get_logger(__name__)

Result = TypeVar("Result")

LONGEST = 3600.0
"""Seconds of one sleep, after which the deadline is checked again: epoll ends at 24 days."""

_guard = ForkSafeLock()
"""Guards the sleepers and callbacks of all futures; nothing is called while it is held."""


def deadline_after(timeout: float | None) -> float | None:
    """The moment ``timeout`` seconds from now; None is never."""
    if timeout is None or timeout == math.inf:
        return None
    if timeout < 0 or timeout != timeout:  # noqa: PLR0124 - the second is how NaN shows
        msg = f"A timeout must be zero or more seconds, not {timeout}"
        raise ValueError(msg)
    return time.monotonic() + timeout


class Future(Generic[Result]):
    """Something in progress.  Any number of threads may wait for it, and coroutines await it."""

    __slots__ = ("__weakref__", "_callbacks", "_sleepers", "_value", "ended", "error")

    is_passive = False
    """Whether it makes progress only while a thread waits for it."""

    def __init__(self) -> None:
        self.ended = False
        """Whether it is known to have ended: turns true once, and stays.  See also ``done``."""
        self.error: BaseException | None = None
        """The error with which it has ended."""
        self._value: Any = None
        self._sleepers: tuple[threading.Lock, ...] = ()
        self._callbacks: tuple[Callable[[], None], ...] = ()

    def describe(self) -> str:
        """What this is, as the subject of a sentence."""
        return "The operation"

    def __str__(self) -> str:
        """What this is, as the subject of a sentence."""
        return self.describe()

    # -- for those who wait ------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether it has ended, with a result or an error."""
        return self.ended

    def wait(self, timeout: Seconds | None = None) -> Result:
        """Return the result when there is one, or raise the error.

        After a :class:`~potluck.errors.Timeout` it continues: wait again.
        """
        limit = None if timeout is None else read_timeout(timeout)
        if not self.ended and not self.drive(limit):
            raise self.timeout_error(limit or 0.0)
        return self.result()

    def result(self, timeout: Seconds = 0.0) -> Result:
        """The result, or raises the error; :class:`Timeout` if it is not done in time."""
        if not self.done:
            self._look(timeout)
        if self.error is not None:
            raise _fresh(self.error)
        return cast("Result", self._value)

    def exception(self, timeout: Seconds = 0.0) -> BaseException | None:
        """The error, or None; raises :class:`Timeout` if it is not done in time."""
        if not self.done:
            self._look(timeout)
        return self.error

    def _look(self, timeout: Seconds) -> None:
        limit = read_timeout(timeout)
        if limit == 0 or not self.drive(limit):
            raise Timeout(f"{self.describe()} is not done yet", seconds=limit or 0.0)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it has ended, on the thread that ended it; now if it has."""
        if self.ended:
            callback()
            return
        with _guard:
            self._callbacks += (callback,)
        if self.ended:
            self._tell()

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait without blocking the event loop."""
        # A caller that awaits has imported asyncio; this library does not import it.
        loop = sys.modules["asyncio"].get_running_loop()
        future = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
                loop.call_soon_threadsafe(wake)

        if self.is_passive and not self.done:
            threading.Thread(
                target=self.drive, args=(None,), name="potluck-awaited", daemon=True
            ).start()
        self.add_done_callback(tell)
        yield from future.__await__()
        return self.result()

    def timeout_error(self, seconds: float) -> Timeout:
        """The error of a wait that took too long."""
        return Timeout(f"{self.describe()} timed out after {seconds:g} s", seconds=seconds)

    # -- for subclasses, and for those who end it --------------------------------------------------

    def drive(self, limit: float | None) -> bool:
        """Make progress, or sleep, until it has ended (True) or the time is up (False)."""
        return self.sleep_until(deadline_after(limit))

    def sleep_until(self, deadline: float | None) -> bool:
        """Sleep until it has ended (True) or a moment has come (False)."""
        if self.ended:
            return True
        sleeper = threading.Lock()
        sleeper.acquire()
        self.add_sleeper(sleeper)
        try:
            while not self.ended:
                remaining = LONGEST if deadline is None else deadline - time.monotonic()
                if remaining <= 0:
                    break
                sleeper.acquire(timeout=min(remaining, LONGEST))
        finally:
            self.remove_sleeper(sleeper)
        return self.ended

    def add_sleeper(self, sleeper: threading.Lock) -> None:
        """Release this lock at the end; check ``ended`` afterwards, before sleeping on it."""
        with _guard:
            self._sleepers += (sleeper,)

    def remove_sleeper(self, sleeper: threading.Lock) -> None:
        """Forget a lock."""
        with _guard:
            self._sleepers = tuple(each for each in self._sleepers if each is not sleeper)

    def finish(self, error: BaseException | None = None, value: Any = None) -> None:
        """End it, and wake those who wait; the first call counts.  One thread at a time."""
        if self.ended:
            return
        self.error, self._value = error, value
        self.ended = True
        if self._sleepers or self._callbacks:
            self._tell()

    def finish_first(self, error: BaseException | None, value: Any) -> None:
        """The same, where several threads may try at once."""
        with _guard:
            if self.ended:
                return
            self.error, self._value = error, value
            self.ended = True
        self._tell()

    def become_forked(self, error: BaseException) -> None:
        """In a forked child: no thread works on it here."""
        self._sleepers, self._callbacks = (), ()
        self.error, self.ended = error, True

    def _tell(self) -> None:
        with _guard:
            sleepers, self._sleepers = self._sleepers, ()
            callbacks, self._callbacks = self._callbacks, ()
        for sleeper in sleepers:
            wake_sleeper(sleeper)
        for callback in callbacks:
            try:
                callback()
            except Exception:  # it is the owner's: the thread that ends futures has more to do
                logger.exception("A callback of %s failed", self.describe())


def wake_sleeper(sleeper: threading.Lock) -> None:
    """Release a lock on which one thread may sleep."""
    with contextlib.suppress(RuntimeError):  # awake already
        sleeper.release()


def _fresh(error: BaseException) -> BaseException:
    """A copy for each thread that gets the error: tracebacks would pile up on one."""
    return copy.copy(error) if isinstance(error, DistributedError) else error
