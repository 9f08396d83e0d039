"""The peers of an agent, and the endpoint that they belong to.

An :class:`RpcEndpoint` serves the ranks of one backend, which is one view in a cluster.  It has an
:class:`RpcPeer` for each other rank, with its connection and the calls that wait for it, and a
:class:`LocalPeer` for calls of the rank to itself.  :class:`ViewPendingCalls` has the calls that
wait for the next view.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from potluck._types import ProcessId
from potluck.net.records import buffered
from potluck.rpc.calls import CallAccounting, CallTarget, IncomingCall, Replier, RpcFuture, here
from potluck.rpc.connection import (
    BROKEN,
    ENDED,
    AgentClosed,
    Connection,
    ConnectionOpener,
    Generations,
    ReconnectDecision,
    describe_end,
    name_of,
    places_of,
)
from potluck.rpc.errors import (
    RpcBusy,
    RpcInvalidMessage,
    RpcNoConnection,
    RpcTimeout,
    RpcTooLarge,
    shortened,
)
from potluck.rpc.protocol import (
    REQUEST_OVERHEAD,
    RESPONSE_OVERHEAD,
    SHORT,
    Budget,
    CallFailure,
    FrameFlag,
    FrameKind,
    RankAddress,
    RpcResponse,
    error_of,
    find_rank,
    milliseconds,
    reply_with,
)
from potluck.rpc.server import CANCELLED, Handlers, RpcLoop, Workers
from potluck.rpc.values import joined, joined_bytes
from potluck.trace.recorder import log_of

if TYPE_CHECKING:
    from potluck.backend.base import Backend, PeerStream
    from potluck.cluster.views import ViewSessions
    from potluck.net.transport import Poller
    from potluck.rpc.calls import RpcConfig
    from potluck.rpc.protocol import RpcFrame


LONGEST = 3600.0
"""Seconds of one sleep: epoll waits at most 24 days."""


def read_until_done(connection: Connection, call: RpcFuture[Any], deadline: float) -> None:
    """Read until a call is done or the deadline has passed.  ``connection.reading`` is held.

    The thread that waits reads its own answer, so that no thread has to wake another.
    """
    direct = connection.direct
    assert direct is not None
    try:
        connection.watch_reading(wanted=False)  # the agent's own thread keeps sleeping
        while not call.ended and connection.is_open:
            if not connection.spin.until(connection.read_all):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return
                direct.wait(min(remaining, LONGEST))
    finally:
        connection.watch_reading(wanted=True)


FORKED = "this agent belongs to the parent process. Make a backend and an agent in this process"

LOOK = 0.25
"""Seconds between two checks of the deadlines of calls that wait for a view."""

STAYS_AFTER = 5.0
"""Seconds after which a rank that has not made a new agent is assumed to keep its old one."""

GLANCE = 64
"""Calls of a queue that are checked at a time."""

OVER = "the agent of this rank was closed"


class PendingCalls(CallTarget):
    """Calls to one rank that cannot be sent yet; its lock is also that of the connection."""

    def __init__(self, rank: int, endpoint: RpcEndpoint) -> None:
        self.rank = rank
        self.connection: Connection | None = None
        self.lock = threading.Lock()
        self._endpoint = endpoint
        self._numbers = itertools.count(1)
        self._waiting: dict[int, RpcFuture[Any]] = {}
        # The same in two queues, short calls and long ones: none waits behind a longer one.
        self._lines: tuple[dict[int, RpcFuture[Any]], dict[int, RpcFuture[Any]]] = ({}, {})
        self._kept = Budget(endpoint.config.octets)
        self._room = threading.Condition(self.lock)
        self._failure: str | None = None  # why calls fail now, and what to do
        self._hint: str | None = None
        self._earliest = math.inf  # no call has an earlier deadline

    def next_number(self) -> int:
        """A number for a call that was made elsewhere."""
        return next(self._numbers)

    def _check(self, call: RpcFuture[Any]) -> None:
        if self._failure is not None and not (call.idempotent and self._failure is not OVER):
            raise self._no_connection(self._failure, self._hint)
        if self.connection is not None and self.connection.allowance is not None:
            limit = self.connection.allowance.max_message
            if call.size > limit:
                raise RpcTooLarge(call.size, limit, rank=self.rank)

    def _admits(self, connection: Connection, call: RpcFuture[Any]) -> bool:
        is_meant = not connection.is_early or self._is_meant(connection, call)
        return is_meant and connection.window.admits(call.size)

    def _is_meant(self, connection: Connection, call: RpcFuture[Any]) -> bool:
        """Whether a call is for the agent that is connected now.

        An agent of an older generation gets it if the rank seems to keep that agent, or if that
        agent waits for the function that makes the call.
        """
        if not connection.is_early:
            return True
        if connection.allowance is None:
            return False
        generations, generation = self._endpoint.generations, connection.allowance.generation
        if generations.is_staying(self.rank, generation):
            return True
        now = time.monotonic()
        if now >= connection.greeted_at + STAYS_AFTER:
            generations.note_staying(self.rank, generation)
            return True
        return now >= call.began + call.seconds / 2 or (
            here.call is not None and here.call.origin is connection
        )

    def _line_of(self, call: RpcFuture[Any]) -> dict[int, RpcFuture[Any]]:
        return self._lines[call.size > SHORT]

    def _keep(self, call: RpcFuture[Any]) -> list[RpcFuture[Any]]:
        while len(self._waiting) >= self._endpoint.config.backlog or not self._kept.admits(
            call.size
        ):
            remaining = call.deadline - time.monotonic()
            if remaining <= 0 or not self._endpoint.may_block:
                raise RpcBusy(
                    f"{len(self._waiting)} calls to rank {self.rank} are already waiting",
                    rank=self.rank,
                    hint="Wait for some of them before making more.",
                )
            self._room.wait(min(remaining, LONGEST))
            self._check(call)
        self._line_up(call)
        # An answer may have arrived meanwhile.
        return [] if self.connection is None else self._admit(self.connection)

    def _line_up(self, call: RpcFuture[Any]) -> None:
        self._waiting[call.number] = self._line_of(call)[call.number] = call
        self._kept.add(call.size)

    def _admit(self, connection: Connection) -> list[RpcFuture[Any]]:
        """Send waiting calls within the limits; return those that are too large."""
        refused: list[RpcFuture[Any]] = []
        if connection.allowance is None:
            return refused
        for line in self._lines:
            while line and self._admit_some(connection, line, refused):
                pass
        connection.flush()
        return refused

    def _admit_some(
        self,
        connection: Connection,
        line: dict[int, RpcFuture[Any]],
        refused: list[RpcFuture[Any]],
    ) -> bool:
        """Send the first calls of a queue; whether more may be sent."""
        assert connection.allowance is not None
        before = len(line)
        for call in list(itertools.islice(line.values(), GLANCE)):
            if not self._is_meant(connection, call):
                continue
            if call.size > connection.allowance.max_message:
                refused.append(call)
            elif connection.window.admits(call.size):
                connection.request(call)
            elif connection.window.is_larger(call.size):
                continue  # it delays only others like it
            else:
                return False
            self._drop(call)
        return len(line) < before

    def _drop(self, call: RpcFuture[Any]) -> None:
        del self._waiting[call.number], self._line_of(call)[call.number]
        self._kept.remove(call.size)
        self._room.notify()

    def abandon(self, call: RpcFuture[Any]) -> bool:
        """Stop waiting for a call; False if it has just ended."""
        with self.lock:
            if self._waiting.get(call.number) is call:
                self._drop(call)
                return True
            connection = self.connection
            if connection is not None and connection.sent.get(call.number) is call:
                connection.withdraw(call)
                return True
        peer = call.peer  # it may have moved to the next view
        return peer is not self and peer.abandon(call)

    @property
    def silence(self) -> str:
        """Why there may be no answer."""
        connection = self.connection
        if connection is None or connection.allowance is None:
            return f": no RpcAgent of rank {self.rank} is connected"
        if connection.is_early:
            return (
                f": rank {self.rank} has made {connection.allowance.generation} agents so far, but "
                f"rank {self._endpoint.rank} has made {self._endpoint.hello.generation}"
            )
        return ""

    def overdue(self, now: float) -> list[RpcFuture[Any]]:
        """Calls whose deadline has passed."""
        if now < self._earliest:
            return []
        with self.lock:
            sent = self.connection.sent.values() if self.connection else ()
            calls = [*self._waiting.values(), *(c for c in sent if isinstance(c, RpcFuture))]
            later = [call.deadline for call in calls if call.deadline > now]
            self._earliest = min(later, default=math.inf)
        return [call for call in calls if call.deadline <= now]

    # -- when the connection has ended ---------------------------------------------------------

    def _judge(
        self,
        decision: ReconnectDecision,
        cause: str,
        lost: list[RpcFuture[Any]],
        *,
        is_early: bool = False,
    ) -> None:
        """Fail the calls in progress and those that need not wait; later calls fail as well.

        After an ``is_early`` connection calls keep waiting, unless more is known.
        """
        waits = is_early and decision.is_back_soon and decision.cause is None
        with self.lock:
            if decision.hint or self._failure is None:  # the view has ended, or nothing was known
                cause = decision.cause or cause
                if decision.hint and cause == ENDED:
                    cause = f"{ENDED}, or it is already in the next view"
            failed = list(lost)
            if self.connection is None and not waits:  # there is no newer one
                failed += self._take_waiting(everything=not decision.is_back_soon)
                if self._failure is not OVER:
                    self._failure, self._hint = cause, decision.hint
        self._fail(failed, cause, decision.hint)

    def _take_waiting(self, *, everything: bool) -> list[RpcFuture[Any]]:
        """Remove and return waiting calls.  The lock is held."""
        calls = [call for call in self._waiting.values() if everything or not call.idempotent]
        for call in calls:
            self._drop(call)
        self._room.notify_all()
        return calls

    def _fail(self, calls: list[RpcFuture[Any]], cause: str, hint: str | None) -> None:
        error = self._no_connection(cause, hint) if calls else None
        for call in calls:
            call.finish(copy.copy(error))

    def _no_connection(self, cause: str, hint: str | None) -> RpcNoConnection:
        name = None if cause is OVER else self._endpoint.name_of(self.rank)
        return RpcNoConnection(self.rank, cause=cause, host=name, hint=hint)

    # -- from one view to the next -------------------------------------------------------------

    def move_to(self, other: PendingCalls | None) -> None:
        """Move waiting calls to the same process in another view; without one they fail."""
        with self.lock:
            calls = self._take_waiting(everything=True)
            for call in calls if other is not None else ():
                assert other is not None
                other.adopt(call)
        if other is None:
            self._fail(calls, "it is not in the current view", None)
        else:
            other.admit_waiting()

    def adopt(self, call: RpcFuture[Any]) -> None:
        """Take over a waiting call of another peer."""
        with self.lock:
            call.peer, call.number = self, next(self._numbers)
            self._earliest = min(self._earliest, call.deadline)
            self._line_up(call)

    def admit_waiting(self) -> None:
        """Send waiting calls within the limits."""
        connection = self.connection
        if connection is not None and self._waiting:
            self._send_waiting(connection)

    def _send_waiting(self, connection: Connection) -> None:
        with self.lock:
            refused = self._admit(connection)
        self._refuse(refused)

    def _refuse(self, calls: list[RpcFuture[Any]]) -> None:
        for call in calls:
            hello = self.connection.allowance if self.connection else None
            limit = hello.max_message if hello else 0
            call.finish(RpcTooLarge(call.size, limit, rank=self.rank))


class ViewPendingCalls(PendingCalls):
    """Calls that were started while no view is connected, or the cluster is paused.

    While there are any, a thread waits for the next view, and starts them there.
    """

    def __init__(
        self,
        endpoint: RpcEndpoint,
        sessions: ViewSessions,
        start: Callable[[RpcFuture[Any], Any], None],
    ) -> None:
        super().__init__(endpoint.rank, endpoint)
        self._sessions = sessions
        self._start = start
        self._destinations: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        self.is_forked = False

    def new_call(self, name: str, seconds: float) -> RpcFuture[Any]:
        """A call that has not been started."""
        return RpcFuture(self, name, next(self._numbers), seconds)

    def hold(self, call: RpcFuture[Any], destination: Any) -> None:
        """Start a call as soon as possible; blocks while too many wait."""
        with self.lock:
            self._check(call)
            self._keep(call)
            self._destinations[call.number] = destination
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="potluck-rpc-pending", daemon=True
                )
                self._thread.start()

    def _drop(self, call: RpcFuture[Any]) -> None:
        super()._drop(call)
        self._destinations.pop(call.number, None)

    def wait_for(self, call: RpcFuture[Any], deadline: float) -> None:
        """Return when the call has ended or the deadline has passed."""
        if self.is_forked:
            raise RpcNoConnection(self.rank, cause=FORKED)
        if here.call is not None:
            self._endpoint.wait_inside(lambda: call.sleep_until(deadline))
        else:
            call.sleep_until(deadline)

    @property
    def silence(self) -> str:
        """Why it has not been started."""
        return f": {self._sessions.late(0.0)}"

    @property
    def in_flight(self) -> int:
        """The number of calls that wait."""
        return len(self._waiting)

    def _run(self) -> None:
        while True:
            for call in self.overdue(time.monotonic()):
                call.expire()
            with self.lock:
                if not self._waiting:
                    self._thread = None
                    return
                pause = min(LOOK, max(0.0, self._earliest - time.monotonic()))
            if self._sessions.wait_until_decided(pause):
                self._start_all()

    def _start_all(self) -> None:
        with self.lock:
            calls = [(call, self._destinations[call.number]) for call in self._waiting.values()]
        for call, destination in calls:
            error: BaseException | None = None
            with self.lock:  # a thread that cancels it finds it here or there
                if self._waiting.get(call.number) is not call:
                    continue
                self._drop(call)
                try:
                    self._start(call, destination)
                except RpcTimeout:  # paused again
                    self._destinations[call.number] = destination
                    self._line_up(call)
                    return
                except BaseException as other:  # noqa: BLE001 - the caller gets any error
                    error = other
            if error is not None:
                call.finish(error)

    def close(self) -> None:
        """Fail the calls, because the agent closes."""
        with self.lock:
            self._failure = OVER
            calls = self._take_waiting(everything=True)
        self._fail(calls, OVER, None)


# --------------------------------------------------------------------------------------------------

LINGER = 0.5
"""Seconds in which the last bytes must reach the other side."""


class RpcPeer(PendingCalls):
    """Another rank: its connection, calls to it, and its own calls."""

    def __init__(self, rank: int, endpoint: RpcEndpoint) -> None:
        super().__init__(rank, endpoint)
        self.is_forked = False

    def new_call(self, name: str, seconds: float) -> RpcFuture[Any]:
        """A call that has not been started."""
        return RpcFuture(self, name, next(self._numbers), seconds)

    # -- calls -------------------------------------------------------------------------------------

    def start(self, call: RpcFuture[Any]) -> None:
        """Send a call, or keep it until it can be sent; blocks while too many wait."""
        with self.lock:
            self._check(call)
            self._earliest = min(self._earliest, call.deadline)
            connection = self.connection
            is_long = call.size > SHORT
            if (
                connection is not None
                and not self._lines[is_long]
                and self._admits(connection, call)
            ):
                connection.request(call)
                if is_long:
                    connection.flush()
                return
            refused = self._keep(call)
            is_kept = call.number in self._waiting
        if is_kept:
            self._endpoint.wake()  # the reading thread may have to send it later
        self._refuse(refused)

    def wait_for(self, call: RpcFuture[Any], deadline: float) -> None:
        """Return when the call has ended or the deadline has passed."""
        if self.is_forked:  # no thread of this process brings an answer
            raise RpcNoConnection(self.rank, cause=FORKED)
        if here.call is not None:
            self._endpoint.wait_inside(lambda: self._wait(call, deadline))
        else:
            self._wait(call, deadline)

    def _wait(self, call: RpcFuture[Any], deadline: float) -> None:
        connection = self.connection
        if connection is not None and connection.direct is not None:
            self._read(connection, call, deadline)
        if not call.ended:
            call.sleep_until(deadline)

    def _read(self, connection: Connection, call: RpcFuture[Any], deadline: float) -> None:
        """Read until a call is done, unless another thread is reading."""
        reading, is_held = connection.reading, False
        broken: Exception | None = None
        try:
            is_held = reading.acquire(blocking=False)
            if not is_held:
                return
            read_until_done(connection, call, deadline)
        except BROKEN as error:
            broken = error
        except BaseException:  # Ctrl-C: it may have been in the middle of a frame
            is_held = reading._is_owned()  # type: ignore[attr-defined] # noqa: SLF001 - as Condition
            if is_held:
                connection.watch_reading(wanted=True)
            if is_held and connection.is_reading:
                broken = ConnectionAbortedError("the thread that was reading it was interrupted")
            raise
        finally:
            if is_held:
                reading.release()
            if broken is not None:
                self.lose(connection, broken)

    @property
    def in_flight(self) -> int:
        """The number of calls to the rank that have not ended, including cancelled ones."""
        connection = self.connection
        return len(self._waiting) + (0 if connection is None else len(connection.sent))

    @property
    def is_busy(self) -> bool:
        """Whether a call with a deadline is in progress."""
        connection = self.connection
        return bool(self._waiting or (connection and (connection.sent or connection.received)))

    # -- the connection ----------------------------------------------------------------------------

    def connect(self, opened: PeerStream) -> None:
        """Use a stream to the rank."""
        ranks = (self._endpoint.rank, self.rank)
        wire = buffered(opened.stream, opened.seal, opened.first)
        connection = Connection(ranks, wire, self._endpoint.hello, self.lock, self._on_message)
        with self.lock:
            if self._failure is not OVER:  # any other failure ends with the next hello
                self.connection = connection
        if self.connection is connection:
            self._endpoint.watch(connection)
        else:
            opened.stream.close()

    def lose(self, connection: Connection, reason: Exception | str) -> None:
        """End a connection: its calls fail immediately, but idempotent ones wait.

        A connection that ends before its hello, or that of an older agent, tells nothing about the
        agent that calls wait for.
        """
        with self.lock:
            if connection is not self.connection:
                return
            self.connection = None
            is_early = connection.is_early and isinstance(reason, (OSError, AgentClosed))
            # A connection that we are closing ends for that reason, whichever side is faster.
            cause = OVER if self._failure is OVER else describe_end(reason)
            if not is_early:
                self._failure = cause
            calls, orphans = connection.end()
            for call in calls:
                if call.idempotent:
                    self._line_up(call)
        connection.close()
        self._endpoint.orphaned(orphans)
        lost = [call for call in calls if not call.idempotent]
        self._judge(self._endpoint.lost(self.rank), cause, lost, is_early=is_early)

    def give_up(self) -> None:
        """Fail the calls, because the rank will not come back in this view."""
        self._judge(self._endpoint.decision(self.rank), "it has left", [])

    def stop(self) -> None:
        """Refuse new calls, because the agent is about to close."""
        with self.lock:
            if not self._hint:  # the end of a view is a better reason
                self._failure = OVER

    def close(self) -> None:
        """Fail the calls, because the agent closes."""
        with self.lock:
            before, self._failure = self._failure, OVER
            connection, self.connection = self.connection, None
            calls, orphans = connection.end() if connection is not None else ([], [])
            calls += self._take_waiting(everything=True)
        if connection is not None:
            connection.close(linger=LINGER)
        self._endpoint.orphaned(orphans)
        # The end of a view is a better reason than a closed agent.
        self._fail(calls, before if self._hint and before else OVER, self._hint)

    # -- messages ----------------------------------------------------------------------------------

    def _on_message(
        self, connection: Connection, frame: RpcFrame, data: bytes | memoryview
    ) -> None:
        kind = frame.kind
        if kind is FrameKind.RESPONSE:
            self._on_response(connection, frame, data)
        elif kind is FrameKind.REQUEST:
            call = connection.accept(frame, data)
            is_unwanted = call.cancelled and not connection.is_congested
            (self._endpoint.forget if is_unwanted else self._endpoint.serve)(call)
        elif kind is FrameKind.CANCEL:
            unwanted = connection.cancelled(frame.number)
            if unwanted is not None:
                self._endpoint.forget(unwanted)
        elif kind is FrameKind.HELLO:
            with self.lock:
                connection.greeted(data)
                if self._failure is not OVER:
                    self._failure = self._hint = None
            self._send_waiting(connection)
        else:
            raise AgentClosed

    def _on_response(
        self, connection: Connection, frame: RpcFrame, data: bytes | memoryview
    ) -> None:
        response = RpcResponse.deserialize(data)
        with self.lock:
            call = connection.sent.pop(frame.number, None)
            if call is None or response.request_id != frame.number:
                raise RpcInvalidMessage("an answer without a call")
            connection.window.remove(call if isinstance(call, int) else call.size)
        if self._waiting:
            self._send_waiting(connection)
        if isinstance(call, int):
            return
        if response.error is None:
            call.finish(value=response.payload)
        else:
            call.finish(error_of(response, self.rank))


class LocalPeer(CallTarget, Replier):
    """Calls of this rank to itself: the same functions, workers and deadlines, no connection.

    They survive every change of the view.
    """

    is_congested = False
    silence = ""

    def __init__(self, endpoint: RpcEndpoint) -> None:
        self.move_to(endpoint)
        self._numbers = itertools.count(1)
        self._in_progress: dict[int, tuple[RpcFuture[Any], IncomingCall]] = {}
        self._window = Budget(endpoint.config.octets, endpoint.config.calls)
        self._changed = threading.Condition()
        self.is_closed = False
        self._over = "the agent of this rank was closed"

    def move_to(self, endpoint: RpcEndpoint) -> None:
        """Use the endpoint of another view, in which this process may have another rank."""
        self.endpoint, self.rank = endpoint, endpoint.rank

    def new_call(self, name: str, seconds: float) -> RpcFuture[Any]:
        """A call that has not been started."""
        return RpcFuture(self, name, next(self._numbers), seconds)

    def next_number(self) -> int:
        """A number for a call that was made elsewhere."""
        return next(self._numbers)

    def start(self, call: RpcFuture[Any]) -> None:
        """Make a call; blocks while too many are in progress."""
        with self._changed:
            self._wait_for_room(call)
            self._window.add(call.size)
        # A copy, because the function must not see later changes.  It takes time: no lock is held.
        try:
            lead = REQUEST_OVERHEAD + len(call.name.encode())
            payload = _joined(call.parts, lead, call.marks)
        except BaseException:
            with self._changed:
                self._window.remove(call.size)
            raise
        patience = milliseconds(call.deadline - time.monotonic())
        incoming = IncomingCall(self, call.number, call.name, payload, patience, call.marks)
        with self._changed:
            self.check_open()
            self._in_progress[call.number] = (call, incoming)
        self.endpoint.serve(incoming)

    def _wait_for_room(self, call: RpcFuture[Any]) -> None:
        while True:
            self.check_open()
            if self._window.admits(call.size):
                return
            remaining = call.deadline - time.monotonic()
            if remaining <= 0 or not self.endpoint.may_block:
                count = self._window.messages
                raise RpcBusy(
                    f"{count} calls of rank {self.rank} to itself are already waiting",
                    rank=self.rank,
                    hint="Wait for some of them before making more.",
                )
            self._changed.wait(min(remaining, LONGEST))

    def check_open(self) -> None:
        """Raise if the agent is closed."""
        if self.is_closed:
            raise RpcNoConnection(self.rank, cause=self._over)

    def abandon(self, call: RpcFuture[Any]) -> bool:
        """Stop waiting for a call; False if it has just ended."""
        known = self._take(call.number)
        if known is not None:
            known[1].cancel()
            self.endpoint.sweep(1)
        return known is not None

    def _take(self, number: int) -> tuple[RpcFuture[Any], IncomingCall] | None:
        with self._changed:
            known = self._in_progress.pop(number, None)
            if known is not None:
                self._window.remove(known[0].size)
                self._changed.notify()
        return known

    def wait_for(self, call: RpcFuture[Any], deadline: float) -> None:
        """Return when the call has ended or the deadline has passed."""
        self.check_forked()
        if here.call is not None:
            self.endpoint.wait_inside(lambda: call.sleep_until(deadline))
        else:
            call.sleep_until(deadline)

    def check_forked(self) -> None:
        """Raise in a forked child, where no thread brings an answer."""
        if self.is_closed and self._over is FORKED:
            raise RpcNoConnection(self.rank, cause=FORKED)

    def overdue(self, now: float) -> list[RpcFuture[Any]]:
        """Calls whose deadline has passed."""
        with self._changed:
            calls = [call for call, _ in self._in_progress.values()]
        return [call for call in calls if call.deadline <= now]

    @property
    def in_flight(self) -> int:
        """Calls that have not ended."""
        return len(self._in_progress)

    @property
    def is_busy(self) -> bool:
        """Whether a call is in progress."""
        return bool(self._in_progress)

    def answer(self, call: IncomingCall, parts: list[Any], *, cork: bool = False) -> None:  # noqa: ARG002
        """Give the call its value."""
        size, limit = sum(map(len, parts)), self.endpoint.config.max_message
        if size > limit:
            self._finish(call, None, RpcTooLarge(size, limit, what="response", rank=self.rank))
        else:
            self._finish(call, _joined(parts, RESPONSE_OVERHEAD, call.marks))

    def refuse(self, call: IncomingCall, failure: CallFailure, *, cork: bool = False) -> None:  # noqa: ARG002
        """Give the call its error."""
        reply = RpcResponse.deserialize(reply_with(call.number, failure, self.rank))
        self._finish(call, None, error_of(reply, self.rank))

    def _finish(self, call: IncomingCall, value: Any, error: Exception | None = None) -> None:
        known = self._take(call.number)
        if known is not None:
            known[0].finish(error, value)

    def close(self) -> None:
        """Fail the calls, because the agent closes."""
        with self._changed:
            self.is_closed = True
            calls = [call for call, _ in self._in_progress.values()]
            self._in_progress.clear()
            self._changed.notify_all()
        for call in calls:
            call.finish(RpcNoConnection(self.rank, cause=self._over))

    def become_forked(self) -> None:
        """Close in a forked child, without a lock: a thread of the parent may hold it."""
        self.is_closed, self._over = True, FORKED


def _joined(parts: list[Any], lead: int, marks: int) -> bytes | memoryview:
    return joined(parts, lead) if marks & FrameFlag.TYPED else joined_bytes(parts)


# --------------------------------------------------------------------------------------------------

LINGER = 1.0
"""Seconds that closing waits for answers to be sent."""

CALL_AGAIN = "It is not known whether the function ran. A new call uses the current members."


class RpcEndpoint:
    """The calls of one agent in one backend: its peers, the reading thread, and their deadlines."""

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
        self.accounting = CallAccounting(log_of(backend))
        self._backend = backend
        self._handlers = handlers
        self._workers = workers
        self._is_view = is_view  # another endpoint may follow this one
        others = (rank for rank in range(backend.world_size) if rank != backend.rank)
        self.peers = {rank: RpcPeer(rank, self) for rank in others}
        self._local: LocalPeer | None = None
        self._places: dict[int, RankAddress] | None = None
        self._opener = ConnectionOpener(backend, lambda rank: self.peers[rank].give_up())
        self._closed = False

    @property
    def in_flight(self) -> int:
        """The number of calls of this rank that have not ended."""
        mine = 0 if self._local is None else self._local.in_flight
        return mine + sum(peer.in_flight for peer in self.peers.values())

    def is_of(self, backend: Backend) -> bool:
        """Whether it serves this backend."""
        return self._backend is backend

    def rank_of(self, node: str | ProcessId) -> int:
        """The rank on a machine, by the name or id of the machine, or by the id of the process."""
        if self._places is None:
            self._places = places_of(self._backend)
        wanted = f"{node.node}/{node.incarnation}" if isinstance(node, ProcessId) else node
        return find_rank(wanted, self._places)

    def process_of(self, rank: int) -> ProcessId | None:
        """The process of a rank; None outside of a view."""
        view = self._backend.view
        return None if view is None else view.members[rank]

    def peer_of(self, process: ProcessId | None) -> RpcPeer | None:
        """The peer that is this process, if it is in this view."""
        return next((p for p in self.peers.values() if self.process_of(p.rank) == process), None)

    def move_to(self, other: RpcEndpoint) -> None:
        """Move waiting calls to the endpoint of the next view."""
        for peer in self.peers.values():
            if peer.connection is not None:  # it ends anyway
                peer.lose(peer.connection, "the members of the job have changed meanwhile")
            peer.move_to(other.peer_of(self.process_of(peer.rank)))

    def become_forked(self) -> None:
        """Make waiting calls fail in a forked child."""
        for peer in self.peers.values():
            peer.is_forked = True

    def name_of(self, rank: int) -> str | None:
        """The machine of a rank; None if it has no better name than its rank."""
        name = name_of(self._backend, rank)
        return None if name is None or name.endswith(f"rank {rank}") else name

    def begin(self, local: LocalPeer) -> None:
        """Connect to the peers, and answer calls."""
        self._local = local
        self._loop = RpcLoop(
            self._backend.make_poller(),
            self._handlers,
            self._workers,
            connection_of=lambda rank: self.peers[rank].connection,
            make_direct=self._direct_poller,
            lose=lambda connection, reason: self.peers[connection.rank].lose(connection, reason),
            tick=self._tick,
        )
        self._loop.start()
        for peer in self.peers.values():
            self._opener.want(peer.rank, peer.connect)

    def _direct_poller(self, connection: Connection) -> Poller | None:
        """A poller for threads that wait for answers; only a socket may have two pollers."""
        is_socket = hasattr(connection.wire.stream, "fileno")
        return self._backend.make_poller() if is_socket else None

    def wake(self) -> None:
        """Check deadlines from time to time, because a call is in progress."""
        self._loop.wake()

    # -- for peers ---------------------------------------------------------------------------------

    def serve(self, call: IncomingCall) -> None:
        """Answer a call: on the reading thread if it is quick, or on a worker."""
        if (
            self._handlers.is_quick(call)
            and self._loop.takes_quick
            and here.call is None
            and not call.origin.is_congested
        ):
            self._loop.run_soon(call)
        else:
            self._workers.add(call)
            self._loop.wake()

    def forget(self, call: IncomingCall) -> None:
        """Cancel a call of a peer."""
        call.cancel()
        if not call.origin.is_congested:  # if it is, the call is answered when it leaves the queue
            call.origin.refuse(call, CANCELLED)
            self.sweep(1)

    def sweep(self, count: int) -> None:
        """Remove cancelled calls from the queue of the workers."""
        for call in self._workers.forget(count):
            call.origin.refuse(call, CANCELLED)

    def orphaned(self, calls: list[IncomingCall]) -> None:
        """Cancel calls whose connection has ended, so that they need no answer."""
        for call in calls:
            call.cancel()
        self.sweep(len(calls))

    def watch(self, connection: Connection) -> None:
        """Read a new connection."""
        self._loop.add(connection)

    def lost(self, rank: int) -> ReconnectDecision:
        """Decide about the calls of a connection that has ended, and open another one."""
        decision = self.decision(rank)
        if decision.is_back_soon and not self._closed:
            self._opener.want(rank, self.peers[rank].connect)
        return decision

    def decision(self, rank: int) -> ReconnectDecision:
        """Whether a rank may come back after its connection has ended, and why it ended."""
        if self._closed:
            return ReconnectDecision(is_back_soon=False)
        over = self._opener.loss_of(self.rank)  # of ourselves: the whole view has ended
        if self._is_view and over is None:  # it may be in the next view before us
            return ReconnectDecision(is_back_soon=True, hint=CALL_AGAIN)
        if self._is_view and over is not None:
            cause = f"the members of the job have changed: {over.message}"
            cause += f": {over.cause}" if over.cause else ""
            return ReconnectDecision(over.rank != rank, cause, CALL_AGAIN)
        loss = over or self._opener.loss_of(rank)
        return ReconnectDecision(
            is_back_soon=loss is None, cause=None if loss is None else str(loss)
        )

    def wait_inside(self, wait: Callable[[], object]) -> None:
        """Wait for a call inside a called function."""
        if self._loop.is_mine:
            wait()
        else:
            self._workers.wait_inside(wait)

    @property
    def may_block(self) -> bool:
        """Whether the current thread may block."""
        return not self._loop.is_mine or here.call is not None

    # -- deadlines ---------------------------------------------------------------------------------

    def _tick(self, now: float) -> bool:
        """Check deadlines; whether any call is in progress."""
        busy = False
        for peer in (*self.peers.values(), *((self._local,) if self._local else ())):
            if peer.is_busy:
                busy = True
                for call in peer.overdue(now):
                    call.expire()
                if isinstance(peer, RpcPeer) and peer.connection is not None:
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
                words += "and this call was made inside another call"
                incoming.origin.refuse(incoming, CallFailure("busy", words=words))
        return busy or len(self._workers) > 0

    def _refuse_late(self, call: IncomingCall, why: str) -> None:
        words = f"'{shortened(call.name)}' on rank {self.rank} did not answer in time: {why}"
        call.origin.refuse(call, CallFailure("late", words=words, seconds=call.seconds))
        call.cancel()  # last: a worker that finds it cancelled would answer that

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Send the remaining answers, tell the peers, and close.  May be called twice."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + LINGER
        self._opener.close(deadline)
        for peer in self.peers.values():
            peer.stop()
        if here.call is None:  # or this thread would wait for itself
            self._wait_for(lambda: self._loop.is_idle, deadline)
        connections = [peer.connection for peer in self.peers.values() if peer.connection]
        self._flush(connections, deadline)  # first: the goodbye is the last frame
        for connection in connections:
            connection.send_goodbye()
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
        """Wait for the reading thread."""
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.001)
