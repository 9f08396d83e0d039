"""Calls of a rank to itself: the same functions, workers and deadlines, without a connection."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

from potluck.core.calls import Window, milliseconds
from potluck.core.calls_encoding import (
    MAX_RPC_MSG_SIZE,
    REQUEST_OVERHEAD,
    RESPONSE_OVERHEAD,
    RpcResponse,
)
from potluck.core.calls_errors import RpcBusy, RpcNoConnection, RpcTooLarge
from potluck.core.calls_failures import Failure, error_of, reply_with
from potluck.core.calls_frames import Mark
from potluck.runtime.rpc_calls import Incoming, RpcFuture, here
from potluck.runtime.rpc_values import joined, joined_bytes
from potluck.runtime.rpc_waiting import FORKED

if TYPE_CHECKING:
    from potluck.runtime.rpc_duties import Office

__all__ = ["Local", "Mail"]

LONGEST = 3600.0
"""Seconds of one sleep: more is too much for some systems."""


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
