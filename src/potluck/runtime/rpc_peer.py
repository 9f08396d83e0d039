"""One rank as an agent sees it: its connection, while there is one, and the calls to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from potluck.core.calls_encoding import RpcResponse
from potluck.core.calls_errors import RpcInvalidMessage, RpcNoConnection
from potluck.core.calls_failures import error_of
from potluck.core.calls_frames import SHORT, FrameKind
from potluck.runtime.rpc_calls import RpcFuture, here
from potluck.runtime.rpc_connection import BROKEN, Connection, Left, in_words
from potluck.runtime.rpc_direct import read_until_done
from potluck.runtime.rpc_waiting import FORKED, OVER, WaitingRoom
from potluck.runtime.rpc_wire import make_wire

if TYPE_CHECKING:
    from potluck.backend.streams import PeerStream
    from potluck.core.calls_frames import Frame
    from potluck.runtime.rpc_duties import Office

__all__ = ["Peer"]

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
