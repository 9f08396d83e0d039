"""Calls of a rank to itself: the same functions, workers and deadlines, without a connection."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

from potluck.core.calls import milliseconds
from potluck.core.calls_encoding import RpcResponse
from potluck.core.calls_errors import RpcNoConnection, RpcTooLarge
from potluck.core.calls_failures import Failure, error_of, reply_with
from potluck.runtime.rpc_calls import Incoming, RpcFuture, here

if TYPE_CHECKING:
    from potluck.runtime.rpc_duties import Office

__all__ = ["Local", "Mail"]


class Local:
    """This rank, as it sees itself."""

    def __init__(self, office: Office) -> None:
        self.rank = office.rank
        self._office = office
        self._numbers = itertools.count(1)
        self._under_way: dict[int, tuple[RpcFuture[Any], Incoming]] = {}
        self._lock = threading.Lock()
        self.is_closed = False

    def new_call(self, name: str, seconds: float) -> RpcFuture[Any]:
        """A call that has not begun."""
        return RpcFuture(self, name, next(self._numbers), seconds)

    def start(self, call: RpcFuture[Any]) -> None:
        """Make a call."""
        patience = milliseconds(call.deadline - time.monotonic())
        payload = b"".join(call.parts)  # a copy: the function must not see it change
        incoming = Incoming(self, call.number, call.name, payload, patience, call.marks)
        with self._lock:
            if self.is_closed:
                raise RpcNoConnection(self.rank, cause="the agent of this rank was closed")
            self._under_way[call.number] = (call, incoming)
        self._office.serve(incoming)

    def abandon(self, call: RpcFuture[Any]) -> bool:
        """Nobody waits for the call any more; False if it has ended in this instant."""
        with self._lock:
            known = self._under_way.pop(call.number, None)
        if known is not None:
            known[1].cancel()
        return known is not None

    def wait_for(self, call: RpcFuture[Any], deadline: float) -> None:
        """Return when the call has ended or the deadline has passed."""
        if here.call is not None:
            self._office.wait_inside(lambda: call.sleep_until(deadline))
        else:
            call.sleep_until(deadline)

    def overdue(self, now: float) -> list[RpcFuture[Any]]:
        """Calls whose deadline has passed."""
        with self._lock:
            calls = [call for call, _ in self._under_way.values()]
        return [call for call in calls if call.deadline <= now]

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._under_way)

    def answer(self, call: Incoming, parts: list[Any], *, cork: bool = False) -> None:  # noqa: ARG002
        """A value."""
        size, limit = sum(map(len, parts)), self._office.config.max_message
        if size > limit:
            self._finish(call, None, RpcTooLarge(size, limit, what="response", rank=self.rank))
        else:
            self._finish(call, b"".join(parts))

    def refuse(self, call: Incoming, failure: Failure, *, cork: bool = False) -> None:  # noqa: ARG002
        """None."""
        reply = RpcResponse.deserialize(reply_with(call.number, failure, self.rank))
        self._finish(call, None, error_of(reply, self.rank))

    def _finish(self, call: Incoming, value: Any, error: Exception | None = None) -> None:
        with self._lock:
            known = self._under_way.pop(call.number, None)
        if known is not None:
            known[0].finish(value, error)

    def close(self) -> None:
        """The agent closes."""
        with self._lock:
            self.is_closed = True
            calls = [call for call, _ in self._under_way.values()]
            self._under_way.clear()
        for call in calls:
            cause = "the agent of this rank was closed"
            call.finish(None, RpcNoConnection(self.rank, cause=cause))


class Mail:
    """A caller that gets its answer as one message of bytes."""

    def __init__(self, rank: int, here: int) -> None:
        self.rank = rank
        self.reply = b""
        self._here = here

    def answer(self, call: Incoming, parts: list[Any], *, cork: bool = False) -> None:  # noqa: ARG002
        """A value."""
        self.reply = RpcResponse(call.number, b"".join(parts)).serialize()

    def refuse(self, call: Incoming, failure: Failure, *, cork: bool = False) -> None:  # noqa: ARG002
        """None."""
        self.reply = reply_with(call.number, failure, self._here)
