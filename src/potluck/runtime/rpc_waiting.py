"""Calls to one rank that wait at the caller: until they may be sent, or are known to be in vain."""

from __future__ import annotations

import copy
import itertools
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from potluck.core.calls import Budget
from potluck.core.calls_errors import RpcBusy, RpcNoConnection, RpcTimeout, RpcTooLarge
from potluck.core.calls_frames import SHORT
from potluck.runtime.rpc_calls import RpcFuture, here
from potluck.runtime.rpc_connection import ENDED
from potluck.runtime.rpc_direct import LONGEST

if TYPE_CHECKING:
    from collections.abc import Callable

    from potluck.runtime.cluster_stages import Stages
    from potluck.runtime.rpc_connection import Connection
    from potluck.runtime.rpc_duties import Office, Outlook

__all__ = ["FORKED", "OVER", "Lobby", "WaitingRoom"]

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
