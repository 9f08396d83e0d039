"""Calls: those we make, as futures, and those that others make, while they are here."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import time
from collections.abc import Callable, Generator, Hashable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from potluck.core.calls import reply_by
from potluck.core.calls_errors import RpcCancelled, RpcTimeout
from potluck.errors import DistributedError, Timeout
from potluck.forking import ForkSafeLock
from potluck.runtime.rpc_callbacks import run_soon
from potluck.runtime.rpc_values import taken_bytes
from potluck.vocabulary import Seconds, in_seconds

if TYPE_CHECKING:
    from potluck.core.calls_failures import Failure
    from potluck.runtime.rpc_notes import Notes

__all__ = ["Incoming", "Replier", "RpcFuture", "current_call", "here"]

Result = TypeVar("Result")

INSTANT = 1.0
"""Seconds in which another thread surely ends what it has begun to end."""

FEW = 64
"""Calls from within a call before those that are done are forgotten."""

_callbacks = ForkSafeLock()
"""Guards callbacks and sleepers of all futures; nothing is called under it."""


class Receiver(Protocol):
    """Who takes a call to its destination."""

    @property
    def rank(self) -> int:
        """Of the destination."""

    @property
    def silence(self) -> str:
        """Why it may give no answer, if that is known, as the end of a sentence."""

    def abandon(self, call: RpcFuture[Any]) -> bool:
        """Nobody waits for the call any more; False if it has ended in this instant."""

    def wait_for(self, call: RpcFuture[Any], deadline: float) -> None:
        """Return when the call has ended or the deadline has passed."""


class RpcFuture(Generic[Result]):
    """A call under way.  Until it is done, what it sends belongs to it.

    Wait for it, ask whether it is done, await it from a coroutine, or cancel it.

    >>> from potluck import RpcAgent, SimulatedBackend
    >>> left, right = SimulatedBackend.create_group(2)
    >>> with RpcAgent(left) as caller, RpcAgent(right) as server:
    ...     _ = server.register("shout", lambda payload: payload.upper())
    ...     future = caller.rpc_async(1, "shout", b"dinner")
    ...     bytes(future.wait()), future.done
    (b'DINNER', True)
    """

    __slots__ = (
        *("__weakref__", "_callbacks", "_convert", "_converting", "_error", "_sleepers", "_value"),
        *("deadline", "done", "idempotent", "marks", "name", "number", "parts", "peer", "size"),
        *("began", "destination", "notes", "seconds"),
    )

    def __init__(self, peer: Receiver, name: str, number: int, seconds: float) -> None:
        self.peer = peer
        self.name = name
        self.number = number
        self.seconds = seconds
        self.began = time.monotonic()
        self.deadline = self.began + seconds
        self.done = False
        """Whether it has ended, well or not."""
        self.idempotent = False
        self.marks = 0
        self.parts: list[bytes | memoryview] = []
        self.size = 0
        self.destination = ""
        """In words, while its rank is not known."""
        self.notes: Notes | None = None
        """Where it is taken down and counted."""
        self._value: Any = None
        self._error: BaseException | None = None
        self._convert: Callable[[Any], Result] | None = None
        self._converting: threading.Lock | None = None
        self._sleepers: tuple[threading.Lock, ...] = ()
        self._callbacks: list[Callable[[], None]] | None = None

    def wait(self, timeout: Seconds | None = None) -> Result:
        """Return the value when there is one, or raise what went wrong.

        At the call's own deadline that is :class:`RpcTimeout`, and the call is over.  When
        ``timeout`` ends before that it is a plain :class:`~potluck.errors.Timeout`, and the call
        goes on.
        """
        if not self.done:
            until = self.deadline
            limit = in_seconds(timeout)
            if limit is not None:
                until = min(until, time.monotonic() + limit)
            self._wait_until(until)
            if not self.done:
                raise Timeout(f"{self.describe()} is not done yet", seconds=limit or 0.0)
        return self.result()

    def _wait_until(self, until: float) -> None:
        self.peer.wait_for(self, until)
        if not self.done and time.monotonic() >= self.deadline:
            self.expire()
            if not self.done:  # its answer comes in this instant
                self.sleep_until(time.monotonic() + INSTANT)

    def result(self, timeout: Seconds = 0.0) -> Result:
        """The value, or what went wrong; :class:`Timeout` if it is not done after ``timeout``."""
        if not self.done:
            self._look(timeout)
        if self._error is not None:
            error = self._error  # each gets its own: tracebacks would pile up on one
            raise copy.copy(error) if isinstance(error, DistributedError) else error
        if self._convert is not None:
            self._convert_once()
        return cast("Result", self._value)

    def _convert_once(self) -> None:
        """For one thread: converting gives back the memory that came in."""
        with _callbacks:
            if self._converting is None:
                self._converting = threading.Lock()
        with self._converting:
            if self._error is not None:  # it failed for another thread
                raise self._error
            if self._convert is not None:
                try:
                    self._value = self._convert(self._value)
                except BaseException as error:
                    self._value, self._error = None, error
                    raise
                self._convert = None

    def exception(self, timeout: Seconds = 0.0) -> BaseException | None:
        """What went wrong, or None; :class:`Timeout` if it is not done after ``timeout``."""
        self._look(timeout)
        return self._error

    def _look(self, timeout: Seconds) -> None:
        limit = in_seconds(timeout)
        if not self.done and limit > 0:
            self._wait_until(min(self.deadline, time.monotonic() + limit))
        if not self.done:
            raise Timeout(f"{self.describe()} is not done yet", seconds=limit)

    def cancel(self) -> bool:
        """Stop waiting and tell the other side; False if the call was done already."""
        if self.done or not self.peer.abandon(self):
            return False
        self.finish(None, RpcCancelled(f"{self.describe()} was cancelled", rank=self.peer.rank))
        return True

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it has ended, on a thread for that; now if it has."""
        if not self._when_done(lambda: run_soon(callback, self.describe())):
            callback()

    def _when_done(self, action: Callable[[], None]) -> bool:
        """Have something done by the thread that ends it; False if it has ended already."""
        with _callbacks:
            if not self.done:
                self._callbacks = [*(self._callbacks or ()), action]
            return not self.done

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait without blocking the event loop."""
        # Whoever awaits runs an event loop, so it is there; this library brings none.
        loop = sys.modules["asyncio"].get_running_loop()
        future = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                loop.call_soon_threadsafe(wake)

        if not self._when_done(tell):
            tell()
        try:
            yield from future.__await__()
        except BaseException:  # the task was cancelled: nobody waits any more
            self.cancel()
            raise
        return self.result()

    # -- for those who bring the answer ----------------------------------------------------------

    @property
    def where(self) -> str:
        """Whom it calls, in words."""
        return self.destination or f"rank {self.peer.rank}"

    def describe(self) -> str:
        """What this is, as the subject of a sentence."""
        return f"The call of '{self.name}' on {self.where}"

    def convert_with(self, convert: Callable[[Any], Result]) -> None:
        """How the bytes of the answer become a value, on the thread that asks for it."""
        self._convert = convert

    def expire(self) -> None:
        """The deadline has passed."""
        if self.peer.abandon(self):
            reason = f"'{self.name}' on {self.where} gave no answer within "
            reason += f"{self.seconds:g} s{self.peer.silence}"
            self.finish(None, RpcTimeout(reason, seconds=self.seconds, rank=self.peer.rank))

    def finish(self, value: Any, error: BaseException | None = None) -> None:
        """End.  Called once, by whoever took the call out of its table."""
        self._value, self._error = value, error
        if type(value) is bytes and self._convert is taken_bytes:
            self._convert = None  # they are what they should be
        self.parts = []
        if self.notes is not None:
            self.notes.end(self, error)
        with _callbacks:
            self.done = True
            callbacks, self._callbacks = self._callbacks, None
            sleepers, self._sleepers = self._sleepers, ()
        for sleeper in sleepers:
            sleeper.release()
        for callback in callbacks or ():
            callback()

    def sleep_until(self, deadline: float) -> None:
        """Sleep until it is done or the deadline has passed; any number of threads may."""
        sleeper = threading.Lock()
        sleeper.acquire()
        with _callbacks:
            if self.done:
                return
            self._sleepers += (sleeper,)  # whoever finishes it from now on sees the sleeper
        try:
            while not self.done and (remaining := deadline - time.monotonic()) > 0:
                sleeper.acquire(timeout=min(remaining, 3600.0))
        finally:
            with _callbacks:
                self._sleepers = tuple(each for each in self._sleepers if each is not sleeper)


class Replier(Hashable, Protocol):
    """Where an incoming call came from."""

    @property
    def rank(self) -> int:
        """Of the caller."""

    @property
    def is_congested(self) -> bool:
        """Whether it does not take its answers, so that there shall be no more of them."""

    def answer(self, call: Incoming, parts: list[Any], *, cork: bool = False) -> None:
        """Send a value."""

    def refuse(self, call: Incoming, failure: Failure, *, cork: bool = False) -> None:
        """Say why there is none."""


class Incoming:
    """A call that another rank has made; what a function can learn about its caller."""

    __slots__ = (
        *("_children", "_many", "cancelled", "deadline", "marks", "name", "number", "origin"),
        *("payload", "reply_by", "seconds", "size"),
    )

    def __init__(
        self, origin: Replier, number: int, name: str, payload: Any, patience: int, marks: int = 0
    ) -> None:
        now = time.monotonic()
        self.origin = origin
        self.number = number
        self.name = name
        self.payload = payload
        self.marks = marks
        self.size = len(payload)
        self.seconds = patience / 1000
        self.deadline = now + self.seconds
        self.reply_by = reply_by(now, patience)
        self.cancelled = False
        """Whether the caller has lost interest: a long function may look, and return."""
        self._children: list[RpcFuture[Any]] = []
        self._many = FEW

    @property
    def source(self) -> int:
        """The rank that calls."""
        return self.origin.rank

    @property
    def remaining(self) -> float:
        """Seconds until the caller gives up."""
        return max(0.0, self.deadline - time.monotonic())

    def cancel(self) -> None:
        """Nobody waits for this; nor, then, for what it waits for itself."""
        self.cancelled = True
        self.payload = b""  # only now: whoever runs it looks at the payload first
        for child in list(self._children):
            child.cancel()

    def adopt(self, child: RpcFuture[Any]) -> None:
        """A call that was made from within this one."""
        self._children.append(child)
        if len(self._children) > self._many:
            self._children = [each for each in self._children if not each.done]
            self._many = 2 * len(self._children) + FEW
        if self.cancelled:
            child.cancel()


class _Here(threading.local):
    call: Incoming | None = None


here = _Here()
"""What the current thread works on."""


def current_call() -> Incoming | None:
    """The call that the current thread answers; None outside of functions that are called."""
    return here.call
