"""One rank as an agent sees it: its connection, while there is one, and the calls to it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from potluck.backend.framing import make_wire
from potluck.errors import ChannelClosed, DistributedError
from potluck.rpc.calls import Incoming, RpcFuture, here
from potluck.rpc.connection import BROKEN, ENDED, Connection, Left, in_words
from potluck.rpc.errors import RpcBusy, RpcInvalidMessage, RpcNoConnection, RpcTimeout, RpcTooLarge
from potluck.rpc.protocol import (
    MAX_RPC_MSG_SIZE,
    REQUEST_OVERHEAD,
    RESPONSE_OVERHEAD,
    SHORT,
    Budget,
    Failure,
    FrameKind,
    Mark,
    RpcResponse,
    Whereabouts,
    Window,
    error_of,
    milliseconds,
    reply_with,
)
from potluck.rpc.values import joined, joined_bytes

if TYPE_CHECKING:
    from potluck._types import View
    from potluck.backend.base import Backend, PeerStream
    from potluck.cluster.views import Stages
    from potluck.rpc.connection import Office, Outlook
    from potluck.rpc.protocol import Frame


# --------------------------------------------------------------------------------------------------
# Waiting for an answer: who waits reads, if nobody else does, so no thread has to wake another.

LONGEST = 3600.0
"""Seconds of one sleep: epoll ends at 24 days."""


def read_until_done(connection: Connection, call: RpcFuture[Any], deadline: float) -> None:
    """Read until a call is done or time is up.  ``connection.reading`` is held."""
    direct = connection.direct
    assert direct is not None
    try:
        connection.watch_reading(wanted=False)  # the agent's own thread sleeps on
        while not call.done and connection.is_open:
            if not connection.spin.until(connection.read_all):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return
                direct.wait(min(remaining, LONGEST))
    finally:
        connection.watch_reading(wanted=True)


# --------------------------------------------------------------------------------------------------
# Calls to one rank that wait at the caller: until they may be sent, or are known to be in vain.

FORKED = "this agent belongs to the parent process; make a backend and an agent here"

LOOK = 0.25
"""Seconds after which the deadlines of calls are looked at that wait for a view."""

STAYS_AFTER = 5.0
"""Seconds after which a rank that has not made a new agent, as we have, seems to keep its own."""

GLANCE = 64
"""Calls of a line that are looked at in one go."""

OVER = "the agent of this rank was closed"


class WaitingRoom:
    """Where calls wait; its lock is that of the connection as well."""

    def __init__(self, rank: int, office: Office) -> None:
        self.rank = rank
        self.connection: Connection | None = None
        self.lock = threading.Lock()
        self._office = office
        self._numbers = itertools.count(1)
        self._waiting: dict[int, RpcFuture[Any]] = {}
        # The same in two lines, short ones and long ones: none waits behind a longer one.
        self._lines: tuple[dict[int, RpcFuture[Any]], dict[int, RpcFuture[Any]]] = ({}, {})
        self._kept = Budget(office.config.octets)
        self._room = threading.Condition(self.lock)
        self._trouble: str | None = None  # why no calls are made now, and what to do then
        self._hint: str | None = None
        self._earliest = math.inf  # no call has a deadline before this

    def next_number(self) -> int:
        """For a call that was made before it came here."""
        return next(self._numbers)

    def _check(self, call: RpcFuture[Any]) -> None:
        if self._trouble is not None and not (call.idempotent and self._trouble is not OVER):
            raise self._no_connection(self._trouble, self._hint)
        if self.connection is not None and self.connection.allowance is not None:
            limit = self.connection.allowance.max_message
            if call.size > limit:
                raise RpcTooLarge(call.size, limit, rank=self.rank)

    def _admits(self, connection: Connection, call: RpcFuture[Any]) -> bool:
        is_meant = not connection.is_early or self._is_meant(connection, call)
        return is_meant and connection.window.admits(call.size)

    def _is_meant(self, connection: Connection, call: RpcFuture[Any]) -> bool:
        """Whether a call is for the agent that is there now.

        One of an older generation gets it when the rank seems to keep that agent, or if it is
        itself waiting for the function that makes the call.
        """
        if not connection.is_early:
            return True
        if connection.allowance is None:
            return False
        generations, generation = self._office.generations, connection.allowance.generation
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
        while len(self._waiting) >= self._office.config.backlog or not self._kept.admits(call.size):
            remaining = call.deadline - time.monotonic()
            if remaining <= 0 or not self._office.may_block:
                raise RpcBusy(
                    f"{len(self._waiting)} calls to rank {self.rank} wait already",
                    rank=self.rank,
                    hint="Wait for some of them before making more.",
                )
            self._room.wait(min(remaining, LONGEST))
            self._check(call)
        self._line_up(call)
        # An answer may have come meanwhile.
        return [] if self.connection is None else self._admit(self.connection)

    def _line_up(self, call: RpcFuture[Any]) -> None:
        self._waiting[call.number] = self._line_of(call)[call.number] = call
        self._kept.add(call.size)

    def _admit(self, connection: Connection) -> list[RpcFuture[Any]]:
        """Send what may be sent; returns what is too large for the other side."""
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
        """Look at the first of a line; whether there may be more that can be sent."""
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
                continue  # it holds up only others of its kind
            else:
                return False
            self._drop(call)
        return len(line) < before

    def _drop(self, call: RpcFuture[Any]) -> None:
        del self._waiting[call.number], self._line_of(call)[call.number]
        self._kept.remove(call.size)
        self._room.notify()

    def abandon(self, call: RpcFuture[Any]) -> bool:
        """Nobody waits for the call any more; False if it has ended in this instant."""
        with self.lock:
            if self._waiting.get(call.number) is call:
                self._drop(call)
                return True
            connection = self.connection
            if connection is not None and connection.sent.get(call.number) is call:
                connection.withdraw(call)
                return True
        peer = call.peer  # it may have moved on to the next view
        return peer is not self and peer.abandon(call)

    def wait_for(self, call: RpcFuture[Any], deadline: float) -> None:
        """Return when the call has ended or the deadline has passed."""
        raise NotImplementedError

    @property
    def silence(self) -> str:
        """Why it may give no answer."""
        connection = self.connection
        if connection is None or connection.allowance is None:
            return f": no RpcAgent of rank {self.rank} is connected"
        if connection.is_early:
            return (
                f": rank {self.rank} has made {connection.allowance.generation} agents so far, "
                f"rank {self._office.rank} {self._office.hello.generation}"
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

    # -- when the connection is over -----------------------------------------------------------

    def _judge(
        self, outlook: Outlook, cause: str, lost: list[RpcFuture[Any]], *, is_early: bool = False
    ) -> None:
        """Fail what was under way, and what need not wait; what comes now fails alike.

        After an ``is_early`` connection calls wait on, unless more is known.
        """
        waits = is_early and outlook.is_back_soon and outlook.cause is None
        with self.lock:
            if outlook.hint or self._trouble is None:  # the view is over, or nothing was known
                cause = outlook.cause or cause
                if outlook.hint and cause == ENDED:
                    cause = f"{ENDED}, or it has gone on to the next view"
            failed = list(lost)
            if self.connection is None and not waits:  # or there is another one by now
                failed += self._take_waiting(everything=not outlook.is_back_soon)
                if self._trouble is not OVER:
                    self._trouble, self._hint = cause, outlook.hint
        self._fail(failed, cause, outlook.hint)

    def _take_waiting(self, *, everything: bool) -> list[RpcFuture[Any]]:
        """Calls that shall not wait any longer.  The lock is held."""
        calls = [call for call in self._waiting.values() if everything or not call.idempotent]
        for call in calls:
            self._drop(call)
        self._room.notify_all()
        return calls

    def _fail(self, calls: list[RpcFuture[Any]], cause: str, hint: str | None) -> None:
        error = self._no_connection(cause, hint) if calls else None
        for call in calls:
            call.finish(None, copy.copy(error))

    def _no_connection(self, cause: str, hint: str | None) -> RpcNoConnection:
        name = None if cause is OVER else self._office.name_of(self.rank)
        return RpcNoConnection(self.rank, cause=cause, host=name, hint=hint)

    # -- from one view to the next -------------------------------------------------------------

    def move_to(self, other: WaitingRoom | None) -> None:
        """Calls that wait go on to the same process in another view; without it they fail."""
        with self.lock:
            calls = self._take_waiting(everything=True)
            for call in calls if other is not None else ():
                assert other is not None
                other.adopt(call)
        if other is None:
            self._fail(calls, "it is not among those who are here now", None)
        else:
            other.admit_waiting()

    def adopt(self, call: RpcFuture[Any]) -> None:
        """A call that another peer has kept waits here from now on."""
        with self.lock:
            call.peer, call.number = self, next(self._numbers)
            self._earliest = min(self._earliest, call.deadline)
            self._line_up(call)

    def admit_waiting(self) -> None:
        """Send what may be sent."""
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
            call.finish(None, RpcTooLarge(call.size, limit, rank=self.rank))


class Lobby(WaitingRoom):
    """Calls that were started while no view is connected, or the cluster is paused.

    A thread waits for the next one while there are any, and starts them there.
    """

    def __init__(
        self, office: Office, stages: Stages, start: Callable[[RpcFuture[Any], Any], None]
    ) -> None:
        super().__init__(office.rank, office)
        self._stages = stages
        self._start = start
        self._destinations: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        self.is_forked = False

    def new_call(self, name: str, seconds: float) -> RpcFuture[Any]:
        """A call that has not begun."""
        return RpcFuture(self, name, next(self._numbers), seconds)

    def hold(self, call: RpcFuture[Any], destination: Any) -> None:
        """Start a call as soon as that can be done; waits while too many are kept."""
        with self.lock:
            self._check(call)
            self._keep(call)
            self._destinations[call.number] = destination
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="potluck-rpc-lobby", daemon=True
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
            self._office.wait_inside(lambda: call.sleep_until(deadline))
        else:
            call.sleep_until(deadline)

    @property
    def silence(self) -> str:
        """Why it has not begun."""
        return f": {self._stages.late(0.0)}"

    @property
    def in_flight(self) -> int:
        """How many calls wait."""
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
            if self._stages.wait_until_decided(pause):
                self._start_all()

    def _start_all(self) -> None:
        with self.lock:
            calls = [(call, self._destinations[call.number]) for call in self._waiting.values()]
        for call, destination in calls:
            error: BaseException | None = None
            with self.lock:  # who cancels it finds it here or there
                if self._waiting.get(call.number) is not call:
                    continue
                self._drop(call)
                try:
                    self._start(call, destination)
                except RpcTimeout:  # paused again
                    self._destinations[call.number] = destination
                    self._line_up(call)
                    return
                except BaseException as other:  # noqa: BLE001 - the caller gets to know
                    error = other
            if error is not None:
                call.finish(None, error)

    def close(self) -> None:
        """The agent closes."""
        with self.lock:
            self._trouble = OVER
            calls = self._take_waiting(everything=True)
        self._fail(calls, OVER, None)


# --------------------------------------------------------------------------------------------------

LINGER = 0.5
"""Seconds for the last bytes to reach the other side."""


class Peer(WaitingRoom):
    """A rank that is called, and that calls."""

    def __init__(self, rank: int, office: Office) -> None:
        super().__init__(rank, office)
        self.is_forked = False

    def new_call(self, name: str, seconds: float) -> RpcFuture[Any]:
        """A call that has not begun."""
        return RpcFuture(self, name, next(self._numbers), seconds)

    # -- calls -------------------------------------------------------------------------------------

    def start(self, call: RpcFuture[Any]) -> None:
        """Send a call, or keep it until it may be sent; waits while too many are kept."""
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
            self._office.rouse()  # only a look at the right time may let it go
        self._refuse(refused)

    def wait_for(self, call: RpcFuture[Any], deadline: float) -> None:
        """Return when the call has ended or the deadline has passed."""
        if self.is_forked:  # no thread here brings an answer
            raise RpcNoConnection(self.rank, cause=FORKED)
        if here.call is not None:
            self._office.wait_inside(lambda: self._wait(call, deadline))
        else:
            self._wait(call, deadline)

    def _wait(self, call: RpcFuture[Any], deadline: float) -> None:
        connection = self.connection
        if connection is not None and connection.direct is not None:
            self._read(connection, call, deadline)
        if not call.done:
            call.sleep_until(deadline)

    def _read(self, connection: Connection, call: RpcFuture[Any], deadline: float) -> None:
        """Read until a call is done, unless another thread reads."""
        reading, is_held = connection.reading, False
        broken: Exception | None = None
        try:
            is_held = reading.acquire(blocking=False)
            if not is_held:
                return
            read_until_done(connection, call, deadline)
        except BROKEN as error:
            broken = error
        except BaseException:  # Ctrl-C: how far it got, nobody knows
            is_held = reading._is_owned()  # type: ignore[attr-defined] # noqa: SLF001 - as Condition
            if is_held:
                connection.watch_reading(wanted=True)
            if is_held and connection.is_reading:
                broken = ConnectionAbortedError("the thread that read it was interrupted")
            raise
        finally:
            if is_held:
                reading.release()
            if broken is not None:
                self.lose(connection, broken)

    @property
    def in_flight(self) -> int:
        """Calls to the rank that have not ended, those included that nobody waits for any more."""
        connection = self.connection
        return len(self._waiting) + (0 if connection is None else len(connection.sent))

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way that has a deadline."""
        connection = self.connection
        return bool(self._waiting or (connection and (connection.sent or connection.received)))

    # -- the connection ----------------------------------------------------------------------------

    def connect(self, opened: PeerStream) -> None:
        """A stream to the rank is open."""
        ranks = (self._office.rank, self.rank)
        connection = Connection(
            ranks, make_wire(opened), self._office.hello, self.lock, self._on_message
        )
        with self.lock:
            if self._trouble is not OVER:  # any other may be over when an agent greets us
                self.connection = connection
        if self.connection is connection:
            self._office.watch(connection)
        else:
            opened.stream.close()

    def lose(self, connection: Connection, reason: Exception | str) -> None:
        """A connection is over: its calls fail at once, but those that may be repeated wait.

        One that ends before its agent has greeted us, or that of an older agent, says nothing
        about the agent that calls wait for.
        """
        with self.lock:
            if connection is not self.connection:
                return
            self.connection = None
            is_early = connection.is_early and isinstance(reason, (OSError, Left))
            # One that we are about to close ends for that reason, whoever is faster.
            cause = OVER if self._trouble is OVER else in_words(reason)
            if not is_early:
                self._trouble = cause
            calls, orphans = connection.end()
            for call in calls:
                if call.idempotent:
                    self._line_up(call)
        connection.close()
        self._office.orphaned(orphans)
        lost = [call for call in calls if not call.idempotent]
        self._judge(self._office.lost(self.rank), cause, lost, is_early=is_early)

    def give_up(self) -> None:
        """The rank will not be back, at least not in this view."""
        self._judge(self._office.outlook(self.rank), "it is gone", [])

    def stop(self) -> None:
        """The agent is about to close: no more calls."""
        with self.lock:
            if not self._hint:  # of a view that is over we know more
                self._trouble = OVER

    def close(self) -> None:
        """The agent closes."""
        with self.lock:
            before, self._trouble = self._trouble, OVER
            connection, self.connection = self.connection, None
            calls, orphans = connection.end() if connection is not None else ([], [])
            calls += self._take_waiting(everything=True)
        if connection is not None:
            connection.close(linger=LINGER)
        self._office.orphaned(orphans)
        # Of a view that is over we know more than that the agent has closed.
        self._fail(calls, before if self._hint and before else OVER, self._hint)

    # -- messages ----------------------------------------------------------------------------------

    def _on_message(self, connection: Connection, frame: Frame, data: bytes | memoryview) -> None:
        kind = frame.kind
        if kind is FrameKind.RESPONSE:
            self._on_response(connection, frame, data)
        elif kind is FrameKind.REQUEST:
            call = connection.accept(frame, data)
            is_unwanted = call.cancelled and not connection.is_congested
            (self._office.forget if is_unwanted else self._office.serve)(call)
        elif kind is FrameKind.CANCEL:
            unwanted = connection.cancelled(frame.number)
            if unwanted is not None:
                self._office.forget(unwanted)
        elif kind is FrameKind.HELLO:
            with self.lock:
                connection.greeted(data)
                if self._trouble is not OVER:
                    self._trouble = self._hint = None
            self._send_waiting(connection)
        else:
            raise Left

    def _on_response(self, connection: Connection, frame: Frame, data: bytes | memoryview) -> None:
        response = RpcResponse.deserialize(data)
        with self.lock:
            call = connection.sent.pop(frame.number, None)
            if call is None or response.request_id != frame.number:
                raise RpcInvalidMessage("an answer to a call that was not made")
            connection.window.remove(call if isinstance(call, int) else call.size)
        if self._waiting:
            self._send_waiting(connection)
        if isinstance(call, int):
            return
        if response.error is None:
            call.finish(response.payload)
        else:
            call.finish(None, error_of(response, self.rank))


# --------------------------------------------------------------------------------------------------
# Calls of a rank to itself: the same functions, workers and deadlines, without a connection.


class Local:
    """This rank, as it sees itself; calls to it outlive every view."""

    is_congested = False
    silence = ""

    def __init__(self, office: Office) -> None:
        self.office = office
        """Of the present view."""
        self._numbers = itertools.count(1)
        self._under_way: dict[int, tuple[RpcFuture[Any], Incoming]] = {}
        self._window = Window(office.config.calls, office.config.octets)
        self._changed = threading.Condition()
        self.is_closed = False
        self._over = "the agent of this rank was closed"

    @property
    def rank(self) -> int:
        """At present."""
        return self.office.rank

    def new_call(self, name: str, seconds: float) -> RpcFuture[Any]:
        """A call that has not begun."""
        return RpcFuture(self, name, next(self._numbers), seconds)

    def next_number(self) -> int:
        """For a call that was made before it came here."""
        return next(self._numbers)

    def start(self, call: RpcFuture[Any]) -> None:
        """Make a call; waits while too many are under way."""
        with self._changed:
            self._wait_for_room(call)
            self._window.add(call.size)
        # A copy: the function must not see it change.  Without the lock: it may take long.
        try:
            lead = REQUEST_OVERHEAD + len(call.name.encode())
            payload = _joined(call.parts, lead, call.marks)
        except BaseException:
            with self._changed:
                self._window.remove(call.size)
            raise
        patience = milliseconds(call.deadline - time.monotonic())
        incoming = Incoming(self, call.number, call.name, payload, patience, call.marks)
        with self._changed:
            self.check_open()
            self._under_way[call.number] = (call, incoming)
        self.office.serve(incoming)

    def _wait_for_room(self, call: RpcFuture[Any]) -> None:
        while True:
            self.check_open()
            if self._window.admits(call.size):
                return
            remaining = call.deadline - time.monotonic()
            if remaining <= 0 or not self.office.may_block:
                raise RpcBusy(
                    f"{self._window.calls} calls of rank {self.rank} to itself wait already",
                    rank=self.rank,
                    hint="Wait for some of them before making more.",
                )
            self._changed.wait(min(remaining, LONGEST))

    def check_open(self) -> None:
        """Raise if no calls are made here any more."""
        if self.is_closed:
            raise RpcNoConnection(self.rank, cause=self._over)

    def abandon(self, call: RpcFuture[Any]) -> bool:
        """Nobody waits for the call any more; False if it has ended in this instant."""
        known = self._take(call.number)
        if known is not None:
            known[1].cancel()
            self.office.sweep(1)
        return known is not None

    def _take(self, number: int) -> tuple[RpcFuture[Any], Incoming] | None:
        with self._changed:
            known = self._under_way.pop(number, None)
            if known is not None:
                self._window.remove(known[0].size)
                self._changed.notify()
        return known

    def wait_for(self, call: RpcFuture[Any], deadline: float) -> None:
        """Return when the call has ended or the deadline has passed."""
        self.check_forked()
        if here.call is not None:
            self.office.wait_inside(lambda: call.sleep_until(deadline))
        else:
            call.sleep_until(deadline)

    def check_forked(self) -> None:
        """Raise in a forked child: no thread here brings an answer."""
        if self.is_closed and self._over is FORKED:
            raise RpcNoConnection(self.rank, cause=FORKED)

    def overdue(self, now: float) -> list[RpcFuture[Any]]:
        """Calls whose deadline has passed."""
        with self._changed:
            calls = [call for call, _ in self._under_way.values()]
        return [call for call in calls if call.deadline <= now]

    @property
    def in_flight(self) -> int:
        """Calls that have not ended."""
        return len(self._under_way)

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._under_way)

    def answer(self, call: Incoming, parts: list[Any], *, cork: bool = False) -> None:  # noqa: ARG002
        """A value."""
        size, limit = sum(map(len, parts)), self.office.config.max_message
        if size > limit:
            self._finish(call, None, RpcTooLarge(size, limit, what="response", rank=self.rank))
        else:
            self._finish(call, _joined(parts, RESPONSE_OVERHEAD, call.marks))

    def refuse(self, call: Incoming, failure: Failure, *, cork: bool = False) -> None:  # noqa: ARG002
        """None."""
        reply = RpcResponse.deserialize(reply_with(call.number, failure, self.rank))
        self._finish(call, None, error_of(reply, self.rank))

    def _finish(self, call: Incoming, value: Any, error: Exception | None = None) -> None:
        known = self._take(call.number)
        if known is not None:
            known[0].finish(value, error)

    def close(self) -> None:
        """The agent closes."""
        with self._changed:
            self.is_closed = True
            calls = [call for call, _ in self._under_way.values()]
            self._under_way.clear()
            self._changed.notify_all()
        for call in calls:
            call.finish(None, RpcNoConnection(self.rank, cause=self._over))

    def become_forked(self) -> None:
        """In a forked child, where any lock may be held by a thread that is not here."""
        self.is_closed, self._over = True, FORKED


def _joined(parts: list[Any], lead: int, marks: int) -> bytes | memoryview:
    return joined(parts, lead) if marks & Mark.TYPED else joined_bytes(parts)


class Mail:
    """A caller that gets its answer as one message of bytes."""

    is_congested = False

    def __init__(self, rank: int, here: int, limit: int) -> None:
        self.rank = rank
        self.reply = b""
        self._here = here
        self._limit = min(limit, MAX_RPC_MSG_SIZE)

    def answer(self, call: Incoming, parts: list[Any], *, cork: bool = False) -> None:
        """A value."""
        size = RESPONSE_OVERHEAD + sum(map(len, parts))
        if size > self._limit:
            self.refuse(call, Failure("large", size=size, limit=self._limit), cork=cork)
        else:
            self.reply = RpcResponse(call.number, b"".join(parts)).serialize()

    def refuse(self, call: Incoming, failure: Failure, *, cork: bool = False) -> None:  # noqa: ARG002
        """None."""
        self.reply = reply_with(call.number, failure, self._here, self._limit)


# --------------------------------------------------------------------------------------------------
# Where the ranks of a backend are, for those who address them by name.


def name_of(backend: Backend, rank: int) -> str | None:
    """Where a rank is, for people; None if it is not known, as of ourselves."""
    with contextlib.suppress(DistributedError, KeyError, OSError):
        return backend.peer_name(rank)
    return None


def places_of(backend: Backend) -> dict[int, Whereabouts]:
    """Name and id of every rank, our own included."""
    view: View | None = getattr(backend, "view", None)
    places = {}
    for rank in range(backend.world_size):
        name = name_of(backend, rank) or socket.gethostname()
        if view is None:
            places[rank] = Whereabouts(name, backend.node_of(rank) or "")
        else:
            places[rank] = Whereabouts(name, *view.members[rank])
    return places


# --------------------------------------------------------------------------------------------------
# Connections of an agent: opened as soon as both agents are there, and again after a loss.
#
# Of two ranks the higher dials, as for every stream.  One thread does all of it, and ends when
# there is nothing to open.

PURPOSE = "rpc"

DIAL = 1.0
"""Seconds for one attempt: one that hangs holds up the other ranks' connections."""

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two rounds; each is twice as long as the last."""

LONGEST_LISTENING = 0.25
"""The same when nobody is to be dialled: looking costs little, and somebody may wait to call."""


class Opener:
    """Opens what is missing."""

    def __init__(self, backend: Backend, give_up: Callable[[int], None]) -> None:
        self._backend = backend
        self._give_up = give_up
        self._missing: dict[int, Peer] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def want(self, peer: Peer) -> None:
        """Open a connection to a rank."""
        with self._changed:
            if self._closed:
                return
            self._missing[peer.rank] = peer
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="potluck-rpc-open", daemon=True
                )
                self._thread.start()

    def loss_of(self, rank: int) -> DistributedError | None:
        """Why a rank will not be back, if so."""
        with contextlib.suppress(DistributedError):
            self._backend.progress(0)  # or nobody may have noticed yet
        return self._backend.loss_of(rank)

    def close(self, deadline: float) -> None:
        """Open nothing more."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        pause, known = FIRST_PAUSE, -1
        while True:
            with self._changed:
                if self._closed or not self._missing:
                    self._thread = None
                    return
                round_ = sorted(self._missing.values(), key=lambda peer: peer.rank)
            for peer in round_:
                self._try(peer)
            dials = any(peer.rank < self._backend.rank for peer in round_)
            longest = LONGEST_PAUSE if dials else LONGEST_LISTENING
            pause = FIRST_PAUSE if len(round_) != known else min(2 * pause, longest)
            known = len(round_)
            with self._changed:
                if self._missing and not self._closed:
                    self._changed.wait(pause)

    def _try(self, peer: Peer) -> None:
        def look() -> None:
            if self._closed:
                raise ChannelClosed("the agent was closed")

        dials = peer.rank < self._backend.rank
        deadline = time.monotonic() + DIAL if dials else 0.0
        try:
            opened = self._backend.open_stream(peer.rank, PURPOSE, deadline, look)
        except (DistributedError, OSError):
            if self.loss_of(peer.rank) is not None and not self._closed:
                with self._changed:
                    self._missing.pop(peer.rank, None)
                self._give_up(peer.rank)
            return
        with self._changed:
            self._missing.pop(peer.rank, None)
        peer.connect(opened)
