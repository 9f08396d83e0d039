"""Work: a collective that was started and will be done."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar, cast

from potluck.errors import DistributedError, Timeout
from potluck.logs import get_logger
from potluck.runtime.limits import read_timeout
from potluck.vocabulary import Seconds

__all__ = ["Work"]

logger = get_logger(__name__)

Result = TypeVar("Result")


class Work(Generic[Result]):
    """Something under way.  Until it is done, its arrays belong to it.

    Wait for it, ask whether it is done, or await it from a coroutine; any number of threads may.

    >>> from potluck import DistributedContext, SimulatedBackend
    >>> with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
    ...     work = context.all_reduce(2.5, async_op=True)
    ...     work.wait(), work.done
    (2.5, True)
    """

    def __init__(
        self,
        describe: Callable[[], str] = lambda: "The operation",
        help_with: Callable[[Work[Any]], None] | None = None,
    ) -> None:
        self._ended = threading.Event()
        self._describe = describe
        self._help = help_with
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.make_late: Callable[[float], Timeout | None] | None = None
        """May say more than that it was not done in time."""

    def __str__(self) -> str:
        """What it is, as the subject of a sentence."""
        return self._describe()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: Seconds | None = None) -> Result:
        """Return the result when there is one, or raise what went wrong.

        After a :class:`~potluck.errors.Timeout` the work goes on and still owns its arrays: wait
        again.
        """
        limit = read_timeout(timeout)
        if self._help is not None:
            self._help(self)  # this may be the very thread that has to do it
        if not self._ended.wait(limit):
            raise self._late(limit or 0.0)
        return self.result()

    def _late(self, seconds: float) -> Timeout:
        error = None if self.make_late is None else self.make_late(seconds)
        text = f"{self._describe()} was not done within {seconds:g} s"
        return error or Timeout(text, seconds=seconds)

    def ends_within(self, deadline: float | None) -> bool:
        """Wait until it ends (True), well or not, or a moment has come (False)."""
        return self._ended.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def result(self) -> Result:
        """The result, or what went wrong; raises :class:`Timeout` when it is not done yet."""
        if not self.done:
            raise Timeout(f"{self._describe()} is not done yet", seconds=0.0)
        if self._error is not None:
            raise _fresh(self._error)
        return cast("Result", self._result)

    def exception(self) -> BaseException | None:
        """What went wrong, or None; raises :class:`Timeout` when it is not done yet."""
        if not self.done:
            raise Timeout(f"{self._describe()} is not done yet", seconds=0.0)
        return self._error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it has ended, on the thread that ended it; now if it has."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def succeed(self, result: Result) -> None:
        """End well, unless it has ended."""
        self._end(result, None)

    def fail(self, error: BaseException) -> None:
        """End with what went wrong, unless it has ended."""
        self._end(None, error)

    def become_forked(self, error: BaseException) -> None:
        """In a forked child: nobody does it here; locks that others held are nobody's."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error, self._callbacks = error, []
        self._ended.set()

    def _end(self, result: Result | None, error: BaseException | None) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._result, self._error = result, error
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                # It belongs to somebody else: whoever does the works goes on with the next one.
                logger.exception("A callback of %s failed", self._describe())

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait without blocking the event loop."""
        # Whoever awaits runs an event loop, so it is there; this library brings none.
        loop = sys.modules["asyncio"].get_running_loop()
        future = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # nobody waits in a loop that is closed
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(tell)
        yield from future.__await__()
        return self.result()


def _fresh(error: BaseException) -> BaseException:
    """A copy for each who asks: tracebacks would pile up on one."""
    return copy.copy(error) if isinstance(error, DistributedError) else error
