"""Behind an agent: its peers, the thread that reads, the workers, and the deadlines of all."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from potluck._types import ProcessId
from potluck.backend.base import read_view
from potluck.logs import get_logger
from potluck.net.transport import Spin
from potluck.rpc.calls import Incoming, Notes, Replier, here
from potluck.rpc.connection import BROKEN, Connection, Generations, Outlook
from potluck.rpc.errors import RpcInternal, RpcInvalidMessage, near_names, shortened
from potluck.rpc.peer import Opener, Peer, name_of, places_of
from potluck.rpc.protocol import (
    REQUEST_OVERHEAD,
    RESPONSE_OVERHEAD,
    Failure,
    FairQueue,
    Mark,
    Pace,
    Stall,
    Whereabouts,
    find_rank,
    name_in_bytes,
)
from potluck.rpc.values import Values, taken_bytes
from potluck.trace.recorder import log_of

if TYPE_CHECKING:
    from potluck._types import View
    from potluck.backend.base import Backend
    from potluck.metrics.instruments import OperationMetrics
    from potluck.net.transport import Poller
    from potluck.rpc.calls import RpcConfig
    from potluck.rpc.connection import Staff
    from potluck.rpc.peer import Local


# --------------------------------------------------------------------------------------------------
# The agent's own thread: reads what comes in from all ranks, and runs quick functions itself.
#
# Handing a call to a worker costs more than many functions take, so one that has shown to be quick
# runs where its request was read.  Should it take long for once, a watchman lets another thread
# read in its stead; the one that is held up ends with its function.

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


# --------------------------------------------------------------------------------------------------
# Functions that other ranks may call, and how a call of one becomes an answer.

_MOST_ERRORS = 20_000
"""Errors that are looked at: causes, contexts and members of groups, as often as they occur."""

CANCELLED = Failure("cancelled", words="The caller cancelled the call")

RpcHandler: TypeAlias = Callable[..., Any]
"""A function that can be called from elsewhere: of bytes, which returns bytes; or of values."""


class Handler:
    """One of them."""

    __slots__ = ("function", "is_typed", "pace")

    def __init__(self, function: RpcHandler, *, is_typed: bool) -> None:
        self.function = function
        self.is_typed = is_typed
        self.pace = Pace()


class Handlers:
    """All functions of an agent, by name."""

    def __init__(self, values: Values) -> None:
        self._known: dict[str, Handler] = {}
        self._lock = threading.Lock()
        self._values = values
        self.counts: OperationMetrics | None = None
        """Where the calls that were answered are counted."""

    def add(self, name: str, function: RpcHandler, *, is_typed: bool) -> None:
        """Add a function; one of the same name gives way."""
        name_in_bytes(name)
        if not callable(function):
            msg = f"'{name}' is to be registered with something to call, not {function!r}"
            raise TypeError(msg)
        if is_typed:
            self._values.learn_from(function)
        with self._lock:
            self._known = {**self._known, name: Handler(function, is_typed=is_typed)}

    def get(self, name: str) -> Handler | None:
        """The function of that name."""
        return self._known.get(name)

    def is_quick(self, call: Incoming) -> bool:
        """Whether a call may run where it was read."""
        handler = self._known.get(call.name)
        return handler is None or handler.pace.is_quick

    def run(self, call: Incoming, *, cork: bool = False) -> None:
        """Answer a call, whatever its function raises or returns.

        Nothing is raised here: the thread that runs it serves other calls as well.
        """
        payload = call.payload
        before, here.call = here.call, call
        began = time.perf_counter()
        try:
            outcome, handler = self._outcome(call, payload)
        finally:
            here.call = before
            call.payload = b""  # whoever keeps the call shall not keep its bytes
        taken = time.perf_counter() - began
        _reply(call, outcome, cork)
        if outcome is CANCELLED:
            return
        if handler is not None:
            handler.pace.observe(taken)
        if self.counts is not None:
            self.counts.note(taken, call.size, "" if type(outcome) is list else _kind_of(outcome))

    def _outcome(self, call: Incoming, payload: Any) -> tuple[list[Any] | Failure, Handler | None]:
        """What a call is answered with, and which function was called for that."""
        handler = None
        try:
            if call.cancelled:  # after that look at the payload, which is empty by then
                return CANCELLED, None
            handler = self._known.get(call.name)
            if handler is None:
                near = near_names(call.name, self._known)
                return Failure("missing", name=call.name, near=near), None
            return self._call(handler, call, payload), handler
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets to know
            return _raised(error), handler

    def _call(self, handler: Handler, call: Incoming, payload: Any) -> list[Any] | Failure:
        if handler.is_typed is not bool(call.marks & Mark.TYPED):
            kind, way = ("values", "call") if handler.is_typed else ("bytes", "rpc_sync")
            return Failure("invalid", words=f"'{call.name}' is a function of {kind}: use {way}")
        if not handler.is_typed:
            call.payload = b""  # or it would be here twice
            result = handler.function(payload if type(payload) is bytes else taken_bytes(payload))
            return [result if type(result) is bytes else _octets(call.name, result)]
        lead = REQUEST_OVERHEAD + len(call.name.encode())
        try:
            arguments, options = self._values.unpack_arguments(payload, lead)
        except RpcInvalidMessage as error:  # of the arguments; the function may raise its own
            return Failure("invalid", words=error.reason)
        return self._values.pack(handler.function(*arguments, **options), RESPONSE_OVERHEAD)


def _reply(call: Incoming, outcome: list[Any] | Failure, cork: bool) -> None:  # noqa: FBT001
    """Send what a call is answered with; if that fails, say so."""
    try:
        if type(outcome) is list:
            call.origin.answer(call, outcome, cork=cork)
        else:
            assert isinstance(outcome, Failure)
            call.origin.refuse(call, outcome, cork=cork)
    except BaseException as error:
        logger.exception("The answer to '%s' could not be sent", shortened(call.name))
        words = f"the answer could not be sent: {_name_of(type(error))}"
        with contextlib.suppress(BaseException):
            call.origin.refuse(call, Failure("internal", words=words), cork=cork)


def _kind_of(outcome: list[Any] | Failure) -> str:
    """The name of an error, as metrics count it; empty if all went well."""
    if type(outcome) is list:
        return ""
    assert isinstance(outcome, Failure)
    names = {"missing": "RpcFunctionNotFound", "invalid": "RpcInvalidMessage"}
    return names.get(outcome.reason) or outcome.name.rpartition(".")[2]


def _octets(name: str, result: Any) -> memoryview:
    try:
        return read_view(result)
    except (TypeError, ValueError):
        msg = f"'{name}' must return bytes, not {type(result).__name__}"
        raise TypeError(msg) from None


def _raised(error: BaseException) -> Failure:
    """What a function raised, as far as that can be told: each of its texts may raise in turn."""
    kind = type(error)
    name = _name_of(kind)
    with contextlib.suppress(BaseException):
        if kind.__module__ not in ("builtins", "__main__"):
            name = f"{kind.__module__}.{name}"
    try:
        words = str.__str__(str(error))
    except BaseException as second:  # noqa: BLE001 - an error that cannot even say what it is
        words = f"(no words: {_name_of(type(second))})"
    trace = ""
    with contextlib.suppress(BaseException):  # nor show where it was raised
        trace = "".join(
            traceback.format_tb(error.__traceback__)
            if _is_vast(error)
            else traceback.format_exception(error)
        )
    return Failure("raised", name=name, words=words, traceback=trace)


def _is_vast(error: BaseException) -> bool:
    """Whether an error stands for more errors than can be told, as groups of groups do."""
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
    except BaseException:  # noqa: BLE001 - a class may make anything of its name
        return "BaseException"


# --------------------------------------------------------------------------------------------------

LINGER = 1.0
"""Seconds that closing waits for answers that leave."""

CALL_AGAIN = "Whether the function ran is not known; a new call goes to those who are here now."


class AgentOffice:
    """Where calls of one agent come and go."""

    def __init__(
        self,
        backend: Backend,
        config: RpcConfig,
        handlers: Handlers,
        workers: Workers,
        *,
        is_view: bool = False,
    ) -> None:
        self.rank = backend.rank
        self.config = config
        self.generations = Generations.of(backend)
        self.generations.latest += 1
        self.hello = config.hello(self.generations.latest)
        self.notes = Notes(log_of(backend))
        self._backend = backend
        self._handlers = handlers
        self._workers = workers
        self._is_view = is_view  # another office follows this one
        others = (rank for rank in range(backend.world_size) if rank != backend.rank)
        self.peers = {rank: Peer(rank, self) for rank in others}
        self._local: Local | None = None
        self._places: dict[int, Whereabouts] | None = None
        self._opener = Opener(backend, lambda rank: self.peers[rank].give_up())
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Calls of this rank that have not ended."""
        mine = 0 if self._local is None else self._local.in_flight
        return mine + sum(peer.in_flight for peer in self.peers.values())

    def is_of(self, backend: Backend) -> bool:
        """Whether it is this backend's office."""
        return self._backend is backend

    def rank_of(self, node: str | ProcessId) -> int:
        """The rank that runs on a machine, by its name or id, or by the id of its process."""
        if self._places is None:
            self._places = places_of(self._backend)
        wanted = f"{node.node}/{node.incarnation}" if isinstance(node, ProcessId) else node
        return find_rank(wanted, self._places)

    def process_of(self, rank: int) -> ProcessId | None:
        """Which process a rank of a view is."""
        view: View | None = getattr(self._backend, "view", None)
        return None if view is None else view.members[rank]

    def peer_of(self, process: ProcessId | None) -> Peer | None:
        """The same process in this view, if it is here."""
        return next((p for p in self.peers.values() if self.process_of(p.rank) == process), None)

    def move_to(self, other: AgentOffice) -> None:
        """Another view has begun: what waits goes on there."""
        for peer in self.peers.values():
            if peer.connection is not None:  # it is about to end anyway
                peer.lose(peer.connection, "the members of the cluster have changed meanwhile")
            peer.move_to(other.peer_of(self.process_of(peer.rank)))

    def become_forked(self) -> None:
        """In a forked child: nobody waits here in vain."""
        for peer in self.peers.values():
            peer.is_forked = True

    def name_of(self, rank: int) -> str | None:
        """Where a rank is, for people; None if that says nothing new."""
        name = name_of(self._backend, rank)
        return None if name is None or name.endswith(f"rank {rank}") else name

    def begin(self, local: Local) -> None:
        """Connect, and serve."""
        self._local = local
        self._loop = Loop(self._backend.make_poller(), self._direct_poller, self)
        self._loop.start()
        for peer in self.peers.values():
            self._opener.want(peer)

    def _direct_poller(self, connection: Connection) -> Poller | None:
        """For those who wait for answers: a stream with a descriptor may have two pollers."""
        is_socket = hasattr(connection.wire.stream, "fileno")
        return self._backend.make_poller() if is_socket else None

    def rouse(self) -> None:
        """A call is under way for which perhaps nobody waits."""
        self._loop.rouse()

    # -- for peers ---------------------------------------------------------------------------------

    def serve(self, call: Incoming) -> None:
        """Have a call answered."""
        if (
            self._handlers.is_quick(call)
            and self._loop.takes_quick
            and here.call is None
            and not call.origin.is_congested
        ):
            self._loop.run_soon(call)
        else:
            self._workers.add(call)
            self._loop.rouse()

    def forget(self, call: Incoming) -> None:
        """Nobody waits for a call any more."""
        call.cancel()
        if not call.origin.is_congested:  # or it is answered when it leaves the queue
            call.origin.refuse(call, CANCELLED)
            self.sweep(1)

    def sweep(self, count: int) -> None:
        """So many calls have lost their callers."""
        for call in self._workers.forget(count):
            call.origin.refuse(call, CANCELLED)

    def orphaned(self, calls: list[Incoming]) -> None:
        """Nobody waits for these calls any more, and they need no answer."""
        for call in calls:
            call.cancel()
        self.sweep(len(calls))

    def watch(self, connection: Connection) -> None:
        """Read a new connection."""
        self._loop.add(connection)

    def lost(self, rank: int) -> Outlook:
        """A connection has ended."""
        outlook = self.outlook(rank)
        if outlook.is_back_soon and not self._closed:
            self._opener.want(self.peers[rank])
        return outlook

    def outlook(self, rank: int) -> Outlook:
        """What is known about the rank of a connection that has ended."""
        if self._closed:
            return Outlook(is_back_soon=False)
        over = self._opener.loss_of(self.rank)  # of ourselves: all of it is over
        if self._is_view and over is None:  # it may be in the next view before us
            return Outlook(is_back_soon=True, hint=CALL_AGAIN)
        if self._is_view and over is not None:
            cause = f"the cluster changed meanwhile: {over.message}"
            cause += f": {over.cause}" if over.cause else ""
            return Outlook(over.rank != rank, cause, CALL_AGAIN)
        loss = over or self._opener.loss_of(rank)
        return Outlook(is_back_soon=loss is None, cause=None if loss is None else str(loss))

    def wait_inside(self, wait: Callable[[], None]) -> None:
        """Wait for a call from within another."""
        if self._loop.is_mine:
            wait()
        else:
            self._workers.wait_inside(wait)

    @property
    def may_block(self) -> bool:
        """Whether this thread may wait."""
        return not self._loop.is_mine or here.call is not None

    # -- for the loop ------------------------------------------------------------------------------

    def connection_of(self, rank: int) -> Connection | None:
        """The connection to a rank, if there is one."""
        return self.peers[rank].connection

    def lose(self, connection: Connection, reason: Exception) -> None:
        """A connection is over."""
        self.peers[connection.rank].lose(connection, reason)

    def answer(self, call: Incoming, *, cork: bool) -> None:
        """Run a quick function."""
        self._handlers.run(call, cork=cork)

    def hand_over(self, call: Incoming) -> None:
        """Leave a call to the workers."""
        self._workers.add(call)

    def tick(self, now: float) -> bool:
        """Look at deadlines; whether anything is under way."""
        busy = False
        for peer in (*self.peers.values(), *((self._local,) if self._local else ())):
            if peer.is_busy:
                busy = True
                for call in peer.overdue(now):
                    call.expire()
                if isinstance(peer, Peer) and peer.connection is not None:
                    peer.admit_waiting()
                    for incoming in peer.connection.overdue(now):
                        self._refuse_late(incoming, "it was still running")
        if len(self._workers):
            self._workers.nudge()
            count = self._workers.count
            for incoming in self._workers.overdue(now):
                self._refuse_late(incoming, f"all its {count} workers were busy")
            for incoming in self._workers.hopeless(now):
                words = f"All {count} workers of rank {self.rank} wait for calls of their own, "
                words += "and this call comes from within another"
                incoming.origin.refuse(incoming, Failure("busy", words=words))
        return busy or len(self._workers) > 0

    def _refuse_late(self, call: Incoming, why: str) -> None:
        words = f"'{shortened(call.name)}' on rank {self.rank} gave no answer in time: {why}"
        call.origin.refuse(call, Failure("late", words=words, seconds=call.seconds))
        call.cancel()  # only now: a worker that finds it cancelled says so

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Let answers leave, tell the others, and end.  May be called twice."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + LINGER
        self._opener.close(deadline)
        for peer in self.peers.values():
            peer.stop()
        if here.call is None:  # or we would wait for ourselves
            self._wait_for(lambda: self._loop.is_idle, deadline)
        connections = [peer.connection for peer in self.peers.values() if peer.connection]
        self._flush(connections, deadline)  # first: nothing follows a goodbye
        for connection in connections:
            connection.say_goodbye()
        self._flush(connections, deadline)
        self._loop.close(deadline + LINGER)
        for peer in self.peers.values():
            peer.close()

    def _flush(self, connections: list[Connection], deadline: float) -> None:
        self._wait_for(
            lambda: all(each.is_flushed or not each.is_open for each in connections), deadline
        )

    @staticmethod
    def _wait_for(condition: Callable[[], bool], deadline: float) -> None:
        """Until the loop has done something."""
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.001)


# --------------------------------------------------------------------------------------------------
# Workers: a bounded number of threads that run functions for other ranks, fair among them.

STALE = 64
"""Calls without interest that may stay in the queue, unless they are half of it."""

IDLE = 5.0
"""Seconds after which a worker without work ends."""

STALLED_AFTER = 0.5
"""Seconds in which all workers wait for calls of their own, and none gets its answer."""


class Workers:
    """Threads that are started when there is work, and the queue before them."""

    def __init__(self, count: int, run: Callable[[Incoming], None]) -> None:
        self.count = count
        self._run = run
        self._queue: FairQueue[Incoming] = FairQueue()
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._stale = 0  # calls without interest that may be in the queue
        self._stall = Stall(count, STALLED_AFTER)
        self._closed = False
        self._earliest = math.inf  # no call in the queue is to be answered before this

    def __len__(self) -> int:
        """How many calls wait."""
        return len(self._queue)

    def add(self, call: Incoming) -> None:
        """Have a call answered when a worker is free."""
        with self._changed:
            if self._closed:
                return
            self._queue.add(call.origin, call)
            self._earliest = min(self._earliest, call.reply_by)
            if self._idle > 0:
                self._idle -= 1  # here, not where it wakes: two calls shall not wake one worker
                self._changed.notify()
            elif len(self._threads) < self.count:
                thread = threading.Thread(target=self._work, name="potluck-rpc-work", daemon=True)
                self._threads.add(thread)
                thread.start()

    def nudge(self) -> None:
        """Look again: a rank that could take no answers can."""
        with self._changed:
            self._idle = 0
            self._changed.notify_all()

    def forget(self, count: int = 1) -> list[Incoming]:
        """So many calls have lost their callers; those that are taken out of the queue for it.

        One that stays is passed over when its turn comes.  All are looked at only when they are
        many, so that each costs little, and the queue is at most twice as long as it should be.
        """
        with self._changed:
            self._stale += count
            if self._stale < max(STALE, len(self._queue) / 2):
                return []
            self._stale = 0
            return self._queue.take_out(lambda call: call.cancelled and _takes_answers(call.origin))

    def overdue(self, now: float) -> list[Incoming]:
        """Calls that were to be answered by now, and have not begun; taken out of the queue."""
        with self._changed:
            if now < self._earliest:
                return []
            late = self._queue.take_out(
                lambda call: call.reply_by <= now and _takes_answers(call.origin)
            )
            # A lower bound is enough: the next look is at the next moment that could be one.
            self._earliest = now if self._queue else math.inf
            return late

    def hopeless(self, now: float) -> list[Incoming]:
        """Calls from within others that have no worker to hope for; taken out of the queue."""
        with self._changed:
            if not self._queue or not self._stall.is_stalled(now):
                return []
            return self._queue.take_out(
                lambda call: bool(call.marks & Mark.NESTED) and _takes_answers(call.origin)
            )

    def wait_inside(self, wait: Callable[[], None]) -> None:
        """A worker waits for a call of its own."""
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

    def _next(self) -> Incoming | None:
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
    """Whether functions for somebody may run, and calls of theirs be refused."""
    return not origin.is_congested
