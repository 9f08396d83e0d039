"""One rank as an agent sees it: its connection, while there is one, and the calls to it."""

from __future__ import annotations

import itertools
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from potluck.core.calls_encoding import RpcResponse
from potluck.core.calls_errors import RpcBusy, RpcInvalidMessage, RpcNoConnection, RpcTooLarge
from potluck.core.calls_failures import error_of
from potluck.core.calls_frames import FrameKind
from potluck.runtime.rpc_calls import RpcFuture, here
from potluck.runtime.rpc_connection import BROKEN, Connection, Left, in_words
from potluck.runtime.rpc_direct import read_until_done
from potluck.runtime.rpc_wire import make_wire

if TYPE_CHECKING:
    from potluck.backend.streams import PeerStream
    from potluck.core.calls_frames import Frame
    from potluck.runtime.rpc_duties import Office

__all__ = ["Peer"]

OVER = "the agent of this rank was closed"

LINGER = 0.5
"""Seconds for the last bytes to reach the other side."""


class Peer:
    """A rank that is called, and that calls."""

    def __init__(self, rank: int, office: Office) -> None:
        self.rank = rank
        self.connection: Connection | None = None
        self.lock = threading.Lock()
        self._office = office
        self._numbers = itertools.count(1)
        self._waiting: dict[int, RpcFuture[Any]] = {}
        self._waiting_octets = 0
        self._room = threading.Condition(self.lock)
        self._trouble: str | None = None
        self._earliest = math.inf  # no call has a deadline before this

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
            refused: list[RpcFuture[Any]] = []
            if connection is None or self._waiting or not self._admits(connection, call):
                refused = self._keep(call)
            else:
                connection.request(call)
        self._refuse(refused)

    def _check(self, call: RpcFuture[Any]) -> None:
        if self._trouble is not None and not (call.idempotent and self._trouble is not OVER):
            raise RpcNoConnection(self.rank, cause=self._trouble)
        if self.connection is not None and self.connection.allowance is not None:
            limit = self.connection.allowance.max_message
            if call.size > limit:
                raise RpcTooLarge(call.size, limit, rank=self.rank)

    @staticmethod
    def _admits(connection: Connection, call: RpcFuture[Any]) -> bool:
        return connection.allowance is not None and connection.window.admits(call.size)

    def _keep(self, call: RpcFuture[Any]) -> list[RpcFuture[Any]]:
        config = self._office.config
        while len(self._waiting) >= config.backlog or (
            self._waiting and self._waiting_octets + call.size > config.octets
        ):
            remaining = call.deadline - time.monotonic()
            if remaining <= 0 or not self._office.may_block:
                raise RpcBusy(
                    f"{len(self._waiting)} calls to rank {self.rank} wait already",
                    rank=self.rank,
                    hint="Wait for some of them before making more.",
                )
            self._room.wait(remaining)
            self._check(call)
        self._waiting[call.number] = call
        self._waiting_octets += call.size
        # An answer may have come meanwhile.
        return [] if self.connection is None else self._admit(self.connection)

    def _admit(self, connection: Connection) -> list[RpcFuture[Any]]:
        """Send what may be sent; returns what is too large for the other side."""
        refused = []
        while self._waiting and connection.allowance is not None:
            call = next(iter(self._waiting.values()))
            if call.size > connection.allowance.max_message:
                refused.append(call)
            elif connection.window.admits(call.size):
                connection.request(call)
            else:
                break
            self._drop(call)
        return refused

    def _drop(self, call: RpcFuture[Any]) -> None:
        del self._waiting[call.number]
        self._waiting_octets -= call.size
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
            return False

    def wait_for(self, call: RpcFuture[Any], deadline: float) -> None:
        """Return when the call has ended or the deadline has passed."""
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
        if not connection.reading.acquire(blocking=False):
            return
        broken: Exception | None = None
        try:
            read_until_done(connection, call, deadline)
        except BROKEN as error:
            broken = error
        except BaseException:  # Ctrl-C: how far it got, nobody knows
            if connection.is_reading:
                broken = ConnectionAbortedError("the thread that read it was interrupted")
            raise
        finally:
            connection.reading.release()
            if broken is not None:
                self.lose(connection, broken)

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
            ranks, make_wire(opened), self._office.config, self.lock, self._on_message
        )
        with self.lock:
            if self._trouble is not OVER:
                self.connection, self._trouble = connection, None
        if self.connection is connection:
            self._office.watch(connection)
        else:
            opened.stream.close()

    def lose(self, connection: Connection, reason: Exception | str) -> None:
        """A connection is over: its calls fail at once, but those that may be repeated wait."""
        with self.lock:
            if connection is not self.connection:
                return
            self.connection = None
            # One that we are about to close ends for that reason, whoever is faster.
            self._trouble = cause = OVER if self._trouble is OVER else in_words(reason)
            for call in connection.end():
                self._waiting[call.number] = call
                self._waiting_octets += call.size
        connection.close()
        self._fail_waiting(cause, everything=not self._office.lost(self.rank))

    def give_up(self, cause: str) -> None:
        """The rank will not be back."""
        with self.lock:
            self._trouble = self._trouble or cause
        self._fail_waiting(cause, everything=True)

    def _fail_waiting(self, cause: str, *, everything: bool) -> None:
        with self.lock:
            failed = [call for call in self._waiting.values() if everything or not call.idempotent]
            for call in failed:
                self._drop(call)
            self._room.notify_all()
        for call in failed:
            call.finish(None, RpcNoConnection(self.rank, cause=cause))

    def part(self) -> None:
        """The agent is about to close: no more calls, and let the other side know."""
        with self.lock:
            self._trouble = OVER
            connection = self.connection
        if connection is not None:
            connection.say_goodbye()

    def close(self) -> None:
        """The agent closes."""
        with self.lock:
            self._trouble = OVER
            connection, self.connection = self.connection, None
            calls = connection.end() if connection is not None else []
        if connection is not None:
            connection.close(linger=LINGER)
        for call in calls:
            call.finish(None, RpcNoConnection(self.rank, cause=OVER))
        self._fail_waiting(OVER, everything=True)

    # -- messages ----------------------------------------------------------------------------------

    def _on_message(self, connection: Connection, frame: Frame, data: bytes | memoryview) -> None:
        kind = frame.kind
        if kind is FrameKind.RESPONSE:
            self._on_response(connection, frame, data)
        elif kind is FrameKind.REQUEST:
            call = connection.accept(frame, data)
            (self._office.forget if call.cancelled else self._office.serve)(call)
        elif kind is FrameKind.CANCEL:
            unwanted = connection.cancelled(frame.number)
            if unwanted is not None:
                self._office.forget(unwanted)
        elif kind is FrameKind.HELLO:
            with self.lock:
                connection.greeted(data)
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

    def _send_waiting(self, connection: Connection) -> None:
        with self.lock:
            refused = self._admit(connection)
        self._refuse(refused)

    def _refuse(self, calls: list[RpcFuture[Any]]) -> None:
        for call in calls:
            hello = self.connection.allowance if self.connection else None
            limit = hello.max_message if hello else 0
            call.finish(None, RpcTooLarge(call.size, limit, rank=self.rank))
