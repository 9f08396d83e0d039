"""Calls: those we make, as futures, and those that others make, while they are here."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from potluck._process import ForkSafeLock, call_in_children
from potluck._types import Seconds, in_seconds, settle_seconds
from potluck.backend.base import check_whole
from potluck.errors import DistributedError, Timeout
from potluck.logs import get_logger
from potluck.rpc.errors import RpcCancelled, RpcTimeout
from potluck.rpc.protocol import MAX_RPC_MSG_SIZE, Hello, reply_by
from potluck.rpc.values import taken_bytes

if TYPE_CHECKING:
    from potluck.metrics.instruments import OperationMetrics
    from potluck.rpc.protocol import Failure
    from potluck.trace.recorder import Log, RemoteCall


# --------------------------------------------------------------------------------------------------
# Callbacks of calls that have ended, on a thread of their own.
#
# The thread that ends a call reads a connection, and nobody else reads it meanwhile: a callback
# that makes a call there, or closes the agent, would wait for itself.

logger = get_logger(__name__)

_lock = ForkSafeLock()
_due: deque[tuple[Callable[[], object], str]] = deque()
_is_running = False


def run_soon(callback: Callable[[], object], whose: str) -> None:
    """Have a callback called, after those that are due already."""
    global _is_running  # noqa: PLW0603 - one thread for all agents, while there is something to do
    with _lock:
        _due.append((callback, whose))
        if _is_running:
            return
        _is_running = True
    threading.Thread(target=_run, name="potluck-rpc-callbacks", daemon=True).start()


def _run() -> None:
    global _is_running  # noqa: PLW0603
    while True:
        with _lock:
            if not _due:
                _is_running = False
                return
            callback, whose = _due.popleft()
        try:
            callback()
        except Exception:  # the others are due all the same
            logger.exception("A callback of %s failed", whose)


def _begin_anew() -> None:
    """In a forked child, where nobody runs what was due."""
    global _is_running  # noqa: PLW0603
    _is_running = False
    _due.clear()


call_in_children(_begin_anew)


# --------------------------------------------------------------------------------------------------

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


# --------------------------------------------------------------------------------------------------
# What an agent is told: its limits and its patience.

SMALLEST = 512
"""Bytes: an answer that says what went wrong has room."""

MOST_CALLS, MOST_OCTETS = (1 << 32) - 1, (1 << 64) - 1
"""What the hello of an agent can say."""

LARGEST = (1 << 32) - (1 << 16)
"""Bytes: lengths are 32 bits long, and something stands in front of a payload."""


@dataclass(frozen=True, kw_only=True)
class RpcConfig:
    """Limits of an agent; each bounds the memory that a peer or a caller can make it use.

    >>> RpcConfig(workers=2).max_message == MAX_RPC_MSG_SIZE
    True
    """

    workers: int = 16
    """Functions that run at a time."""
    timeout: float = 60.0
    """Seconds for a call that is given no time of its own."""
    max_message: int = MAX_RPC_MSG_SIZE
    """Bytes of a request or a response."""
    calls: int = 16384
    """Unanswered calls that each peer may have here."""
    octets: int = 64 << 20
    """Bytes of unanswered requests of each peer, and of what waits to be sent to it; a single
    message may have more."""
    backlog: int = 16384
    """Calls to one peer that wait here; whoever wants to make another waits."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        settle_seconds(self)
        for name in ("workers", "timeout", "max_message", "calls", "octets", "backlog"):
            if name != "timeout":
                check_whole(getattr(self, name), f"value for {name}")
            if not getattr(self, name) > 0:
                msg = f"{name} must be more than 0, not {getattr(self, name)}"
                raise ValueError(msg)
        if self.calls > MOST_CALLS or self.octets > MOST_OCTETS:
            msg = f"calls can be {MOST_CALLS} and octets {MOST_OCTETS} at most"
            raise ValueError(msg)
        if not SMALLEST <= self.max_message <= LARGEST:
            msg = f"max_message can be {SMALLEST} to {LARGEST}, not {self.max_message}"
            raise ValueError(msg)

    def hello(self, generation: int = 1) -> Hello:
        """What the agent of a generation tells its peers."""
        return Hello(self.calls, self.octets, self.max_message, generation)


# --------------------------------------------------------------------------------------------------
# What is kept of calls that we make: the flight recorder's entry, and what metrics count.


class Notes:
    """Where the calls of one office are taken down, and counted if somebody counts."""

    __slots__ = ("_log", "counts")

    def __init__(self, log: Log) -> None:
        self._log = log
        self.counts: OperationMetrics | None = None

    def end(self, call: RemoteCall, error: BaseException | None) -> None:
        """A call is over."""
        now = time.monotonic()
        self._log.note_call(call, now, error)
        if self.counts is not None:
            name = "" if error is None else type(error).__name__
            self.counts.note(now - call.began, call.size, name)


# --------------------------------------------------------------------------------------------------
# A rank's functions as methods of an object.


class Start(Protocol):
    """Makes a call."""

    def __call__(self, name: str, args: Any, kwargs: Any, *, later: bool) -> Any:
        """Return its value, or a future if it is for later."""


class Remote:
    """One function elsewhere."""

    __slots__ = ("_name", "_start")

    def __init__(self, start: Start, name: str) -> None:
        self._start = start
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it and return what it returns."""
        return self._start(self._name, args, kwargs, later=False)

    def later(self, *args: Any, **kwargs: Any) -> RpcFuture[Any]:
        """Start the call."""
        future: RpcFuture[Any] = self._start(self._name, args, kwargs, later=True)
        return future


class Service:
    """Every attribute is a function elsewhere."""

    __slots__ = ("_start",)

    def __init__(self, start: Start) -> None:
        self._start = start

    def __getattr__(self, name: str) -> Remote:
        """The function of that name, whether it exists or not."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(self._start, name)
