"""The server side of an agent: the thread that reads, the functions, and the workers that run them.

The agent's own thread reads the connections to all ranks.  Passing a call to a worker costs more
than many functions take, so a function that has proved to be quick runs on the reading thread.  If
such a function takes long for once, a watchdog starts another thread that reads instead; the
blocked thread ends with its function.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from potluck.backend.base import read_view
from potluck.logs import get_logger
from potluck.net.transport import Spin
from potluck.rpc.calls import IncomingCall, Replier, here
from potluck.rpc.connection import BROKEN, Connection
from potluck.rpc.errors import RpcInternal, RpcInvalidMessage, near_names, shortened
from potluck.rpc.protocol import (
    REQUEST_OVERHEAD,
    RESPONSE_OVERHEAD,
    CallFailure,
    FairQueue,
    FrameFlag,
    HandlerPace,
    StallDetector,
    name_in_bytes,
)
from potluck.rpc.values import ValueCodec, taken_bytes

if TYPE_CHECKING:
    from potluck.metrics.instruments import OperationMetrics
    from potluck.net.transport import Poller


logger = get_logger(__name__)

TICK = 0.05
"""Seconds between two checks of deadlines while calls are in progress."""

WATCH = 0.002
"""Seconds after which a function on the reading thread counts as slow."""


class RpcLoop:
    """The reading thread, its watchdog, and the quick calls that were read."""

    def __init__(
        self,
        poller: Poller,
        handlers: Handlers,
        workers: Workers,
        *,
        connection_of: Callable[[int], Connection | None],
        make_direct: Callable[[Connection], Poller | None],
        lose: Callable[[Connection, Exception], None],
        tick: Callable[[float], bool],
    ) -> None:
        self._poller = poller
        self._handlers = handlers
        self._workers = workers
        self._connection_of = connection_of
        self._make_direct = make_direct
        self._lose = lose
        self._tick = tick
        self._spin = Spin()
        self._new: deque[Connection] = deque()
        self._batch: deque[IncomingCall] = deque()  # quick calls that have not begun
        self._touched: dict[int, Replier] = {}  # connections with answers to flush
        self._again: set[int] = set()  # ranks with buffered data that no poller reports
        self._is_asleep = False
        self._called = False
        self._running = 0  # counts starts and ends of quick functions: odd while one runs
        self._displaced: threading.Thread | None = None
        self._owner = 0  # the ident of the thread that reads
        self._handover = threading.Lock()  # between the reading thread and the watchdog
        self._watchdog = threading.Event()
        self._watching = False
        self._closed = False
        self._reader = _make_thread(self._read_all, "potluck-rpc")
        self._watcher = _make_thread(self._watch, "potluck-rpc-watch")

    def start(self) -> None:
        """Start the threads."""
        self._reader.start()
        self._watcher.start()

    @property
    def is_mine(self) -> bool:
        """Whether the current thread is the reading thread."""
        return threading.get_ident() == self._owner

    @property
    def is_idle(self) -> bool:
        """Whether no quick function runs or waits."""
        return not (self._batch or self._touched or self._running % 2)

    @property
    def takes_quick(self) -> bool:
        """Whether a quick function may run on the current thread."""
        return self._displaced is None and threading.get_ident() == self._owner

    def add(self, connection: Connection) -> None:
        """Read a new connection."""
        self._new.append(connection)
        self._call()

    def run_soon(self, call: IncomingCall) -> None:
        """Answer a quick call after everything available has been read."""
        self._batch.append(call)

    def wake(self) -> None:
        """Check deadlines from time to time, because a call is in progress."""
        if self._is_asleep:
            self._call()

    def _call(self) -> None:
        self._called = True  # before the wake-up, which a spinning thread may consume
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
                self._is_asleep = True  # before the check: later calls wake this thread
                timeout = TICK if self._tick(now) else None
                ticked = now
            if not events:
                hurries = self._called or self._closed or again or self._batch
                events = self._poller.wait(0.0 if hurries else timeout)
            self._is_asleep = False
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
                    while connection.read():  # buffered data, which no poller reports
                        pass
            except BROKEN as error:
                self._lose(connection, error)
            except BaseException as error:  # only this thread reads the other connections
                logger.exception("Opening the connection to rank %d failed", connection.rank)
                self._lose(connection, RpcInternal(repr(error), rank=connection.rank))

    def _move(self, rank: int, readable: bool, writable: bool) -> bool:  # noqa: FBT001
        """Read and write one connection; whether more may be buffered that no poller reports."""
        connection = self._connection_of(rank)
        if connection is None:
            return False
        if writable:
            with connection.lock:
                connection.flush()
        if not readable or not connection.reading.acquire(blocking=False):
            return False  # a thread that waits for an answer reads it
        broken: Exception | None = None
        more = False
        try:
            more = connection.read()
        except BROKEN as error:
            broken = error
        except BaseException as error:  # only this thread reads the other connections
            logger.exception("Reading from rank %d failed", rank)
            broken = RpcInternal(repr(error), rank=rank)
        finally:
            connection.reading.release()
        if broken is not None:
            self._lose(connection, broken)
        return more and broken is None

    # -- quick functions ---------------------------------------------------------------------------

    def _run_batch(self) -> None:
        """Run the quick calls that were read, and send the answers together."""
        while self._batch:
            call = self._batch.popleft()
            if call.origin.is_congested:
                _flush([call.origin])
                if call.origin.is_congested:  # the caller does not read its answers: make no more
                    self._workers.add(call)
                    continue
            is_last = not self._batch
            if not is_last:
                self._touched[call.source] = call.origin
            self._running += 1
            if not self._watching:  # last: the watchdog reads the counter after this
                self._watching = True
                self._watchdog.set()
            self._handlers.run(call, cork=not is_last)
            with self._handover:
                self._running += 1
            if not self.is_mine:
                _flush([call.origin])
                return
        touched, self._touched = self._touched, {}
        _flush(touched.values())

    def _watch(self) -> None:
        """Check that quick functions are quick, while any run."""
        seen = -1
        while not self._closed:
            if seen == self._running and not seen % 2:
                self._watching = False
                if seen == self._running:  # none has just begun
                    self._watchdog.wait()
                self._watchdog.clear()
                self._watching = True
                continue
            seen = self._running
            time.sleep(WATCH)
            if seen == self._running and seen % 2 and self._displaced is None:
                self._displace(seen)

    def _displace(self, seen: int) -> None:
        """Start another reading thread: a function blocks the current one."""
        with self._handover:
            if self._running != seen or self._closed:
                return  # the function has just ended
            self._displaced, self._owner = self._reader, 0
            left, self._batch = self._batch, deque()
            touched, self._touched = self._touched, {}
            self._reader = _make_thread(self._read_all, "potluck-rpc")
        for call in left:
            self._workers.add(call)
        _flush(touched.values())
        self._reader.start()

    # -- the end -----------------------------------------------------------------------------------

    def close(self, deadline: float) -> None:
        """Stop reading."""
        self._closed = True
        self._watchdog.set()
        self._call()
        self._watcher.join(max(0.0, deadline - time.monotonic()))  # first: it may start a reader
        for thread in (self._reader, self._displaced):
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._poller.close()


def _flush(origins: Iterable[Replier]) -> None:
    """Send the answers that were held back."""
    for origin in origins:
        if isinstance(origin, Connection):
            with origin.lock:
                origin.flush()


def _make_thread(target: Callable[[], None], name: str) -> threading.Thread:
    return threading.Thread(target=target, name=name, daemon=True)


_MOST_ERRORS = 20_000
"""Errors that are visited: causes, contexts and members of groups, as often as they occur."""

CANCELLED = CallFailure("cancelled", words="The caller cancelled the call")

RpcHandler: TypeAlias = Callable[..., Any]
"""A function that other ranks may call: of bytes, which returns bytes, or of values."""


class Handler:
    """A registered function."""

    __slots__ = ("function", "is_typed", "pace")

    def __init__(self, function: RpcHandler, *, is_typed: bool) -> None:
        self.function = function
        self.is_typed = is_typed
        self.pace = HandlerPace()


class Handlers:
    """The functions of an agent by name, and how a call becomes an answer."""

    def __init__(self, values: ValueCodec) -> None:
        self._known: dict[str, Handler] = {}
        self._lock = threading.Lock()
        self._values = values
        self.counts: OperationMetrics | None = None
        """Where answered calls are counted."""

    def add(self, name: str, function: RpcHandler, *, is_typed: bool) -> None:
        """Add a function, in place of one of the same name."""
        name_in_bytes(name)
        if not callable(function):
            msg = f"'{name}' must be registered with a callable, got {function!r}"
            raise TypeError(msg)
        if is_typed:
            self._values.learn_from(function)
        with self._lock:
            self._known = {**self._known, name: Handler(function, is_typed=is_typed)}

    def get(self, name: str) -> Handler | None:
        """The function of that name."""
        return self._known.get(name)

    def is_quick(self, call: IncomingCall) -> bool:
        """Whether a call may run on the reading thread."""
        handler = self._known.get(call.name)
        return handler is None or handler.pace.is_quick

    def run(self, call: IncomingCall, *, cork: bool = False) -> None:
        """Answer a call, whatever its function raises or returns.

        This raises nothing, because the thread serves other calls as well.
        """
        payload = call.payload
        before, here.call = here.call, call
        began = time.perf_counter()
        try:
            outcome, handler = self._outcome(call, payload)
        finally:
            here.call = before
            call.payload = b""  # a function that keeps the call must not keep its bytes
        taken = time.perf_counter() - began
        _reply(call, outcome, cork)
        if outcome is CANCELLED:
            return
        if handler is not None:
            handler.pace.observe(taken)
        if self.counts is not None:
            self.counts.note(taken, call.size, "" if type(outcome) is list else _kind_of(outcome))

    def _outcome(
        self, call: IncomingCall, payload: Any
    ) -> tuple[list[Any] | CallFailure, Handler | None]:
        """The answer to a call, and the function that was called."""
        handler = None
        try:
            if call.cancelled:  # checked after reading the payload, which cancelling empties
                return CANCELLED, None
            handler = self._known.get(call.name)
            if handler is None:
                near = near_names(call.name, self._known)
                return CallFailure("missing", name=call.name, near=near), None
            return self._call(handler, call, payload), handler
        except BaseException as error:  # noqa: BLE001 - the caller gets any error
            return _raised(error), handler

    def _call(self, handler: Handler, call: IncomingCall, payload: Any) -> list[Any] | CallFailure:
        if handler.is_typed is not bool(call.marks & FrameFlag.TYPED):
            kind, way = ("values", "call") if handler.is_typed else ("bytes", "rpc_sync")
            return CallFailure("invalid", words=f"'{call.name}' is a function of {kind}. Use {way}")
        if not handler.is_typed:
            call.payload = b""  # or there would be two copies
            result = handler.function(payload if type(payload) is bytes else taken_bytes(payload))
            return [result if type(result) is bytes else _as_bytes(call.name, result)]
        lead = REQUEST_OVERHEAD + len(call.name.encode())
        try:
            arguments, options = self._values.unpack_arguments(payload, lead)
        except RpcInvalidMessage as error:  # of the arguments, not of the function
            return CallFailure("invalid", words=error.reason)
        return self._values.pack(handler.function(*arguments, **options), RESPONSE_OVERHEAD)


def _reply(call: IncomingCall, outcome: list[Any] | CallFailure, cork: bool) -> None:  # noqa: FBT001
    """Send the answer to a call; if that fails, send the reason."""
    try:
        if type(outcome) is list:
            call.origin.answer(call, outcome, cork=cork)
        else:
            assert isinstance(outcome, CallFailure)
            call.origin.refuse(call, outcome, cork=cork)
    except BaseException as error:
        logger.exception("The answer to '%s' could not be sent", shortened(call.name))
        words = f"the answer could not be sent: {_name_of(type(error))}"
        with contextlib.suppress(BaseException):
            call.origin.refuse(call, CallFailure("internal", words=words), cork=cork)


def _kind_of(outcome: list[Any] | CallFailure) -> str:
    """The name of an error for metrics; empty for a value."""
    if type(outcome) is list:
        return ""
    assert isinstance(outcome, CallFailure)
    names = {"missing": "RpcFunctionNotFound", "invalid": "RpcInvalidMessage"}
    return names.get(outcome.reason) or outcome.name.rpartition(".")[2]


def _as_bytes(name: str, result: Any) -> memoryview:
    try:
        return read_view(result)
    except (TypeError, ValueError):
        msg = f"'{name}' must return bytes, not {type(result).__name__}"
        raise TypeError(msg) from None


def _raised(error: BaseException) -> CallFailure:
    """The error that a function raised; reading its name and text may raise in turn."""
    kind = type(error)
    name = _name_of(kind)
    with contextlib.suppress(BaseException):
        if kind.__module__ not in ("builtins", "__main__"):
            name = f"{kind.__module__}.{name}"
    try:
        words = str.__str__(str(error))
    except BaseException as second:  # noqa: BLE001 - str(error) may raise anything
        words = f"(no message: {_name_of(type(second))})"
    trace = ""
    with contextlib.suppress(BaseException):  # formatting may raise as well
        trace = "".join(
            traceback.format_tb(error.__traceback__)
            if _is_vast(error)
            else traceback.format_exception(error)
        )
    return CallFailure("raised", name=name, words=words, traceback=trace)


def _is_vast(error: BaseException) -> bool:
    """Whether an error has more causes and members than can be shown, as nested groups do."""
    waiting: list[BaseException | None] = [error]
    for _ in range(_MOST_ERRORS):
        if not waiting:
            return False
        each = waiting.pop()
        if each is not None:
            waiting += (each.__cause__, each.__context__)
            waiting += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
    return True


def _name_of(kind: type) -> str:
    try:
        return str.__str__(kind.__qualname__)
    except BaseException:  # noqa: BLE001 - a metaclass may raise anything
        return "BaseException"


STALE = 64
"""Cancelled calls that may stay in the queue, unless they are half of it."""

IDLE = 5.0
"""Seconds after which an idle worker ends."""

STALLED_AFTER = 0.5
"""Seconds after which workers that all wait for calls of their own count as stalled."""


class Workers:
    """A bounded number of threads that run functions, and a queue that is fair between ranks."""

    def __init__(self, count: int, run: Callable[[IncomingCall], None]) -> None:
        self.count = count
        self._run = run
        self._queue: FairQueue[IncomingCall] = FairQueue()
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._stale = 0  # cancelled calls that may be in the queue
        self._stall = StallDetector(count, STALLED_AFTER)
        self._closed = False
        self._earliest = math.inf  # no call in the queue has to be answered earlier

    def __len__(self) -> int:
        """The number of calls that wait."""
        return len(self._queue)

    def add(self, call: IncomingCall) -> None:
        """Queue a call for the next free worker."""
        with self._changed:
            if self._closed:
                return
            self._queue.add(call.origin, call)
            self._earliest = min(self._earliest, call.reply_by)
            if self._idle > 0:
                self._idle -= 1  # here, so that two calls do not wake the same worker
                self._changed.notify()
            elif len(self._threads) < self.count:
                thread = threading.Thread(target=self._work, name="potluck-rpc-work", daemon=True)
                self._threads.add(thread)
                thread.start()

    def nudge(self) -> None:
        """Wake the workers: a congested rank may read answers again."""
        with self._changed:
            self._idle = 0
            self._changed.notify_all()

    def forget(self, count: int = 1) -> list[IncomingCall]:
        """Count cancelled calls; return those that were removed from the queue.

        A cancelled call that stays is skipped when its turn comes.  The queue is searched only when
        they are many, so that each costs little; it is at most twice as long as necessary.
        """
        with self._changed:
            self._stale += count
            if self._stale < max(STALE, len(self._queue) / 2):
                return []
            self._stale = 0
            return self._queue.take_out(lambda call: call.cancelled and _takes_answers(call.origin))

    def overdue(self, now: float) -> list[IncomingCall]:
        """Remove and return calls that have not begun and whose time to answer has passed."""
        with self._changed:
            if now < self._earliest:
                return []
            late = self._queue.take_out(
                lambda call: call.reply_by <= now and _takes_answers(call.origin)
            )
            # A lower bound is enough: it only decides when to search the queue again.
            self._earliest = now if self._queue else math.inf
            return late

    def hopeless(self, now: float) -> list[IncomingCall]:
        """Remove and return nested calls while all workers are stalled."""
        with self._changed:
            if not self._queue or not self._stall.is_stalled(now):
                return []
            return self._queue.take_out(
                lambda call: bool(call.marks & FrameFlag.NESTED) and _takes_answers(call.origin)
            )

    def wait_inside(self, wait: Callable[[], object]) -> None:
        """Wait on a worker for a call that its function has made."""
        with self._changed:
            self._stall.begin_waiting(time.monotonic())
        try:
            wait()
        finally:
            with self._changed:
                self._stall.end_waiting()

    def close(self, deadline: float) -> None:
        """Start nothing more; wait for what runs until the deadline."""
        with self._changed:
            self._closed = True
            self._queue.take_out(lambda _: True)
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        try:
            while (call := self._next()) is not None:
                self._run(call)
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _next(self) -> IncomingCall | None:
        with self._changed:
            while (call := self._queue.take(_takes_answers)) is None:
                if self._closed:
                    return None
                self._idle += 1
                if self._changed.wait(IDLE):
                    continue
                self._idle = max(0, self._idle - 1)
                if not self._queue:
                    # Leave the list under the lock, or work could be left to nobody.
                    self._threads.discard(threading.current_thread())
                    return None
            return call


def _takes_answers(origin: Replier) -> bool:
    """Whether functions for a peer may run, and its calls be refused."""
    return not origin.is_congested
