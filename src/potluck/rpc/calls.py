"""Calls: outgoing ones as futures, incoming ones, and the limits of an agent.

An outgoing call is an :class:`RpcFuture`; its :class:`CallTarget` brings it to its destination.  An
:class:`IncomingCall` is answered through its :class:`Replier`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from potluck._future import Future, Result
from potluck._platform import call_in_children
from potluck._process import ForkSafeLock
from potluck._types import Seconds, settle_seconds
from potluck.backend.base import check_whole
from potluck.logs import get_logger
from potluck.rpc.errors import RpcCancelled, RpcTimeout
from potluck.rpc.protocol import MAX_RPC_MSG_SIZE, RpcHello, reply_by
from potluck.rpc.values import taken_bytes
from potluck.trace.recorder import OperationFailure

if TYPE_CHECKING:
    from potluck.metrics.instruments import OperationMetrics
    from potluck.rpc.protocol import CallFailure
    from potluck.trace.recorder import GroupLog


logger = get_logger(__name__)

# Callbacks run on their own thread.  The thread that ends a call is the only one that reads its
# connection: a callback that made a call there, or closed the agent, would wait for itself.
_lock = ForkSafeLock()
_due: deque[tuple[Callable[[], object], str]] = deque()
_is_running = False


def run_soon(callback: Callable[[], object], whose: str) -> None:
    """Call a callback on the callback thread, after those that wait already."""
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
        except Exception:  # the others must run all the same
            logger.exception("A callback of %s failed", whose)


def _begin_anew() -> None:
    """Forget waiting callbacks in a forked child, which has no thread for them."""
    global _is_running  # noqa: PLW0603
    _is_running = False
    _due.clear()


call_in_children(_begin_anew)


# --------------------------------------------------------------------------------------------------

INSTANT = 1.0
"""Seconds that another thread has to finish a call that it has begun to finish."""

FEW = 64
"""Nested calls that are kept before those that are done are dropped."""

_first = ForkSafeLock()
"""Decides which thread converts the answer of a call."""


class CallTarget(ABC):
    """The destination of a call, as the caller sees it."""

    rank: int

    @property
    @abstractmethod
    def silence(self) -> str:
        """Why there may be no answer, if that is known, as the end of a sentence."""

    @abstractmethod
    def abandon(self, call: RpcFuture[Any]) -> bool:
        """Stop waiting for a call; False if it has just ended."""

    @abstractmethod
    def wait_for(self, call: RpcFuture[Any], deadline: float) -> None:
        """Return when the call has ended or the deadline has passed."""


class RpcFuture(Future[Result]):
    """A call in progress.  Its arguments must not change until it is done.

    Wait for it, check whether it is done, await it in a coroutine, or cancel it.  After the timeout
    of the call itself, waiting raises :class:`RpcTimeout` and the call has ended.  If the timeout
    of a wait ends earlier, it raises :class:`~potluck.errors.Timeout` and the call continues.

    >>> from potluck import RpcAgent, SimulatedBackend
    >>> left, right = SimulatedBackend.create_group(2)
    >>> with RpcAgent(left) as caller, RpcAgent(right) as server:
    ...     _ = server.register("shout", lambda payload: payload.upper())
    ...     future = caller.rpc_async(1, "shout", b"dinner")
    ...     bytes(future.wait()), future.done
    (b'DINNER', True)
    """

    __slots__ = (
        *("_convert", "_converting", "accounting", "began", "deadline", "destination"),
        *("idempotent", "marks", "name", "number", "parts", "peer", "seconds", "size"),
    )

    def __init__(self, peer: CallTarget, name: str, number: int, seconds: float) -> None:
        super().__init__()
        self.peer = peer
        self.name = name
        self.number = number
        self.seconds = seconds
        self.began = time.monotonic()
        self.deadline = self.began + seconds
        self.idempotent = False
        self.marks = 0
        self.parts: list[bytes | memoryview] = []
        self.size = 0
        self.destination = ""
        """The destination in words, while its rank is not known."""
        self.accounting: CallAccounting | None = None
        """Where it is recorded and counted."""
        self._convert: Callable[[Any], Result] | None = None
        self._converting: threading.Lock | None = None

    def drive(self, limit: float | None) -> bool:
        """Read the answer, or sleep until it is here; at the deadline the call fails."""
        until = self.deadline
        if limit is not None:
            until = min(until, time.monotonic() + limit)
        self.peer.wait_for(self, until)
        if not self.ended and time.monotonic() >= self.deadline:
            self.expire()
            return self.ended or self.sleep_until(time.monotonic() + INSTANT)  # it has just come
        return self.ended

    def result(self, timeout: Seconds = 0.0) -> Result:
        """Return the value or raise the error; :class:`Timeout` if it is not done in time."""
        value = super().result(timeout)
        return value if self._convert is None else self._convert_once()

    def _convert_once(self) -> Result:
        """Convert the answer once: converting releases the memory that it arrived in."""
        with _first:
            if self._converting is None:
                self._converting = threading.Lock()
        with self._converting:
            if self.error is not None:  # it failed for another thread
                raise self.error
            if self._convert is not None:
                try:
                    self._value = self._convert(self._value)
                except BaseException as error:
                    self._value, self.error = None, error
                    raise
                self._convert = None
        return cast("Result", self._value)

    def cancel(self) -> bool:
        """Cancel the call and tell the other side; False if it was already done."""
        if self.ended or not self.peer.abandon(self):
            return False
        self.finish(RpcCancelled(f"{self.describe()} was cancelled", rank=self.peer.rank))
        return True

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the callback thread when the call has ended; now if it has."""
        if self.ended:
            callback()
        else:
            super().add_done_callback(lambda: run_soon(callback, self.describe()))

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait without blocking the event loop; cancelling the task cancels the call."""
        try:
            return (yield from super().__await__())
        finally:
            self.cancel()  # nothing, unless the task was cancelled

    # -- for the thread that brings the answer ---------------------------------------------------

    @property
    def where(self) -> str:
        """The destination, in words."""
        return self.destination or f"rank {self.peer.rank}"

    def describe(self) -> str:
        """The call, as the subject of a sentence."""
        return f"The call of '{self.name}' on {self.where}"

    def convert_with(self, convert: Callable[[Any], Result]) -> None:
        """Set how the answer becomes a value, on the thread that asks for it."""
        self._convert = convert

    def expire(self) -> None:
        """Fail the call because its deadline has passed."""
        if self.peer.abandon(self):
            reason = f"'{self.name}' on {self.where} did not answer within "
            reason += f"{self.seconds:g} s{self.peer.silence}"
            self.finish(RpcTimeout(reason, seconds=self.seconds, rank=self.peer.rank))

    def finish(self, error: BaseException | None = None, value: Any = None) -> None:
        """End the call.  Called once, by the thread that removed the call from its table."""
        if type(value) is bytes and self._convert is taken_bytes:
            self._convert = None  # bytes need no conversion
        self.parts = []
        if self.accounting is not None:
            self.accounting.end(self, error)
        super().finish(error, value)


class Replier(ABC):
    """Takes the answer to an incoming call back to its caller."""

    rank: int
    """The rank of the caller."""

    @property
    @abstractmethod
    def is_congested(self) -> bool:
        """Whether the caller does not read its answers, so that no more should be made."""

    @abstractmethod
    def answer(self, call: IncomingCall, parts: list[Any], *, cork: bool = False) -> None:
        """Send a value; with ``cork`` it may wait until the connection is flushed."""

    @abstractmethod
    def refuse(self, call: IncomingCall, failure: CallFailure, *, cork: bool = False) -> None:
        """Send the reason why there is no value."""


class IncomingCall:
    """A call that another rank has made, and what its function can learn about the caller."""

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
        """Whether the caller no longer waits: a long function may check this, and return."""
        self._children: list[RpcFuture[Any]] = []
        self._many = FEW

    @property
    def source(self) -> int:
        """The rank of the caller."""
        return self.origin.rank

    @property
    def remaining(self) -> float:
        """Seconds until the timeout of the caller."""
        return max(0.0, self.deadline - time.monotonic())

    def cancel(self) -> None:
        """Cancel this call, and the calls that it has made itself."""
        self.cancelled = True
        self.payload = b""  # last: a worker reads the payload before it checks the flag
        for child in list(self._children):
            child.cancel()

    def adopt(self, child: RpcFuture[Any]) -> None:
        """Keep a call that this one has made, to cancel both together."""
        self._children.append(child)
        if len(self._children) > self._many:
            self._children = [each for each in self._children if not each.ended]
            self._many = 2 * len(self._children) + FEW
        if self.cancelled:
            child.cancel()


class _Here(threading.local):
    call: IncomingCall | None = None


here = _Here()
"""The call that the current thread answers."""


def current_call() -> IncomingCall | None:
    """The call that the current thread answers; None outside of a called function."""
    return here.call


SMALLEST = 512
"""Bytes: enough for an answer with an error."""

MOST_CALLS, MOST_BYTES = (1 << 32) - 1, (1 << 64) - 1
"""The largest numbers that the hello of an agent can hold."""

LARGEST = (1 << 32) - (1 << 16)
"""Bytes: lengths have 32 bits, and include the head of a message."""


@dataclass(frozen=True, kw_only=True)
class RpcConfig:
    """The limits of an agent, which bound the memory that peers and callers can make it use.

    >>> RpcConfig(workers=2).max_message == MAX_RPC_MSG_SIZE
    True
    """

    workers: int = 16
    """The number of functions that run at a time."""
    timeout: float = 60.0
    """Seconds: the timeout of a call without its own."""
    max_message: int = MAX_RPC_MSG_SIZE
    """The most bytes of a request or a response."""
    calls: int = 16384
    """The most unanswered calls of each peer."""
    octets: int = 64 << 20
    """The most bytes of unanswered requests of each peer, and of answers that wait for it; a single
    message may be larger."""
    backlog: int = 16384
    """The most calls that wait to be sent to one peer; further calls block."""

    def __post_init__(self) -> None:
        """Check the values."""
        settle_seconds(self)
        for name in ("workers", "timeout", "max_message", "calls", "octets", "backlog"):
            if name != "timeout":
                check_whole(getattr(self, name), name)
            if not getattr(self, name) > 0:
                msg = f"{name} must be more than 0, got {getattr(self, name)}"
                raise ValueError(msg)
        if self.calls > MOST_CALLS or self.octets > MOST_BYTES:
            msg = f"calls must be at most {MOST_CALLS}, and octets at most {MOST_BYTES}"
            raise ValueError(msg)
        if not SMALLEST <= self.max_message <= LARGEST:
            msg = f"max_message must be {SMALLEST} to {LARGEST} bytes, got {self.max_message}"
            raise ValueError(msg)

    def hello(self, generation: int = 1) -> RpcHello:
        """The first frame that the agent of a generation sends its peers."""
        return RpcHello(self.calls, self.octets, self.max_message, generation)


class CallAccounting:
    """Records the calls of one endpoint, and counts them if there are metrics."""

    __slots__ = ("_log", "counts")

    def __init__(self, log: GroupLog) -> None:
        self._log = log
        self.counts: OperationMetrics | None = None

    def end(self, call: RpcFuture[Any], error: BaseException | None) -> None:
        """Record and count a call that has ended."""
        now, log = time.monotonic(), self._log
        failure = None if error is None else OperationFailure.of(error)
        peer = (call.peer.rank, 0)
        entry = (call.name, call.began, now, call.number, call.size, 0)
        log.append((*entry, log.calls, failure, peer))
        if self.counts is not None:
            name = "" if error is None else type(error).__name__
            self.counts.note(now - call.began, call.size, name)


class Start(Protocol):
    """Starts a call."""

    def __call__(self, name: str, args: Any, kwargs: Any, *, later: bool) -> Any:
        """Return the value, or a future with ``later``."""


class Remote:
    """One function of another rank."""

    __slots__ = ("_name", "_start")

    def __init__(self, start: Start, name: str) -> None:
        self._start = start
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function and return what it returns."""
        return self._start(self._name, args, kwargs, later=False)

    def later(self, *args: Any, **kwargs: Any) -> RpcFuture[Any]:
        """Start the call."""
        future: RpcFuture[Any] = self._start(self._name, args, kwargs, later=True)
        return future


class Service:
    """The functions of another rank as attributes."""

    __slots__ = ("_start",)

    def __init__(self, start: Start) -> None:
        self._start = start

    def __getattr__(self, name: str) -> Remote:
        """The function of that name, which may not exist there."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(self._start, name)
