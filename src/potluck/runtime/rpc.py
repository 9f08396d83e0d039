"""RpcAgent: calls between any two ranks of a group, by name.

Functions of bytes are the ground floor: :meth:`RpcAgent.register`, :meth:`RpcAgent.rpc_sync`.
Functions of values stand on it: :meth:`RpcAgent.expose`, :meth:`RpcAgent.call`.  Calls travel on
connections of their own, so they never meet messages or collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from potluck.backend.base import DEFAULT_TIMEOUT, Backend, read_view
from potluck.closing import Closing
from potluck.core.calls_encoding import MAX_RPC_MSG_SIZE, RpcRequest
from potluck.core.calls_errors import RpcNoConnection, RpcTimeout
from potluck.errors import DistributedError, Timeout
from potluck.forking import ForkSafeLock
from potluck.net import descriptors
from potluck.runtime.rpc_calling import Caller
from potluck.runtime.rpc_calls import Incoming, current_call
from potluck.runtime.rpc_config import RpcConfig
from potluck.runtime.rpc_handlers import Handlers, RpcHandler
from potluck.runtime.rpc_local import Local, Mail
from potluck.runtime.rpc_office import AgentOffice
from potluck.runtime.rpc_pool import Workers
from potluck.runtime.rpc_tcp import TcpRpcBackend
from potluck.runtime.rpc_values import Values
from potluck.runtime.rpc_waiting import Lobby

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    from potluck.metrics import DistributedMetrics
    from potluck.runtime.cluster_stage import Stage
    from potluck.runtime.cluster_stages import Stages

__all__ = ["MAX_RPC_MSG_SIZE", "RpcAgent"]

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)

LINGER = 1.0
"""Seconds that closing waits for functions that run."""

_claiming = ForkSafeLock()


class RpcAgent(Caller, Closing):
    """Calls functions on other ranks, and lets them call ours.

    Every rank that calls or is called makes one, on the same backend or context; it serves from
    that moment on.  It ends with the backend, or when it is closed.

    >>> from potluck import SimulatedBackend
    >>> left, right = SimulatedBackend.create_group(2)
    >>> with RpcAgent(left) as caller, RpcAgent(right) as server:
    ...     _ = server.register("shout", lambda payload: payload.upper())
    ...     caller.rpc_sync(1, "shout", b"dinner")
    b'DINNER'
    """

    def __init__(self, backend: Backend, config: RpcConfig | None = None) -> None:
        if not isinstance(backend, Backend):
            msg = f"An agent stands on a potluck.Backend, not on a {type(backend).__name__}"
            raise TypeError(msg)
        self._backend: Backend = getattr(backend, "innermost", backend)
        self.config = config or RpcConfig()
        self._values = Values()
        self._handlers = Handlers(self._values)
        self._is_closed = False
        self._waiting_calls: Lobby | None = None
        self._moving = threading.Lock()
        self._workers = Workers(self.config.workers, self._handlers.run)
        self._claim()
        self._stages: Stages | None = getattr(self._backend, "stages", None)
        try:
            below = self._backend if self._stages is None else self._present(self._stages)
        except BaseException:
            self._is_closed = True  # another may be made when there is a view
            raise
        office = self._furnish(below)
        super().__init__(self._backend, office, Local(office), self._values)
        metrics: DistributedMetrics | None = getattr(backend, "metrics", None)
        if metrics is not None:
            self._counts, self._handlers.counts = metrics.rpc.calls, metrics.rpc.served
            metrics.rpc.follow(self)
        office.begin(self._local)
        if self._stages is not None:
            self._stages.follow(self._move)
        self._backend.on_close(self.close)
        descriptors.on_fork(self)

    def _furnish(self, below: Backend) -> AgentOffice:
        is_view = below is not self._backend
        office = AgentOffice(below, self.config, self._handlers, self._workers, is_view=is_view)
        if is_view:
            below.on_close(office.close)
        return office

    # -- where ranks change: an office for each view, with the same functions and workers ----------

    @staticmethod
    def _present(stages: Stages) -> Backend:
        below = stages.wait_for(lambda _: True, DEFAULT_TIMEOUT).backend
        assert below is not None
        return below

    def _move(self, stage: Stage) -> None:
        """Another view is connected: serve there.

        Calls of the one before have ended with it, but for those that may be made again.
        """
        below = stage.backend
        with self._moving:
            if below is None or self._is_closed or self._office.is_of(below):
                return
            before, office = self._office, self._furnish(below)
            office.begin(self._local)
            self._office = self._local.office = office
            before.move_to(office)

    def _enter(self, seconds: float) -> float:
        """Wait until the members of the present view are connected."""
        if self._stages is None or self._is_closed:
            return seconds
        began = time.monotonic()
        try:
            stage = self._stages.wait_for(lambda _: True, seconds)
        except Timeout as error:
            raise RpcTimeout(str(error), seconds=seconds) from error
        except DistributedError as error:
            raise RpcNoConnection(self._office.rank, cause=str(error)) from error
        self._move(stage)
        return max(0.0, seconds - (time.monotonic() - began))

    def _lobby(self) -> Lobby | None:
        """Where calls wait while the cluster is paused or connects; None while it is neither."""
        if self._stages is None or self._is_closed or self._stages.is_decided:
            return None
        with self._moving:
            if self._waiting_calls is None:
                self._waiting_calls = Lobby(self._office, self._stages, self._start_held)
            return self._waiting_calls

    def _claim(self) -> None:
        with _claiming:
            other = vars(self._backend).get("_rpc_agent")
            if isinstance(other, RpcAgent) and not other.is_closed:
                msg = "This backend has an agent already; use that one, or close it first"
                raise ValueError(msg)
            vars(self._backend)["_rpc_agent"] = self

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    @property
    def in_flight(self) -> int:
        """Calls that this rank has made and that have not ended."""
        waiting = 0 if self._waiting_calls is None else self._waiting_calls.in_flight
        return waiting + self._office.in_flight

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self._backend.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._backend.world_size

    # -- functions ---------------------------------------------------------------------------------

    @overload
    def register(self, name: str, handler: Function) -> Function: ...
    @overload
    def register(self, name: str) -> Callable[[Function], Function]: ...

    def register(self, name: str, handler: Any = None) -> Any:
        """Let other ranks call a function that takes bytes and returns bytes; also a decorator."""
        if handler is None:
            return lambda function: self.register(name, function)
        self._handlers.add(name, handler, is_typed=False)
        return handler

    @overload
    def expose(self, function: Function, *, name: str | None = None) -> Function: ...
    @overload
    def expose(self, *, name: str | None = None) -> Callable[[Function], Function]: ...

    def expose(self, function: Any = None, *, name: str | None = None) -> Any:
        """Let other ranks call a function of values; also a decorator.

        Values are Python's plain ones, dataclasses and arrays.  What a function returns must not
        change until it has been sent: return a copy of what others change.
        """
        if function is None:
            return lambda later: self.expose(later, name=name)
        self._handlers.add(name or function.__name__, function, is_typed=True)
        return function

    def share(self, kind: Kind) -> Kind:
        """Let objects of a dataclass arrive; also a decorator."""
        return self._values.share(kind)

    def lookup(self, name: str) -> RpcHandler | None:
        """The function registered here under a name, if there is one."""
        handler = self._handlers.get(name)
        return None if handler is None else handler.function

    @staticmethod
    def current_call() -> Incoming | None:
        """Inside a function that is called: who calls, how much time is left, and whether still."""
        return current_call()

    # -- requests that came as messages ------------------------------------------------------------

    def handle_request(self, src: int, data: Buffer) -> None:
        """Answer a request that came as a message of bytes, with two messages.

        The first is the length of the second, eight bytes; see :class:`TcpRpcBackend`.
        """
        request = RpcRequest.deserialize(read_view(data))
        mail = Mail(src, self.rank, self.config.max_message)
        patience = int(self.config.timeout * 1000)
        call = Incoming(mail, request.request_id, request.function_name, request.payload, patience)
        self._handlers.run(call)
        messages = TcpRpcBackend(self._backend)
        messages.send(len(mail.reply).to_bytes(8, "little"), src)
        messages.send(mail.reply, src)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Answer what runs, tell the others, and fail what is under way.  May be called twice."""
        with self._moving:
            if self._is_closed:
                return
            self._is_closed = True
        if self._stages is not None:
            self._stages.unfollow(self._move)
        self._workers.close(time.monotonic() + LINGER)
        if self._waiting_calls is not None:
            self._waiting_calls.close()
        self._office.close()
        self._local.close()
        self._backend.forget(self.close)

    def become_forked(self) -> None:
        """In a forked child: nothing here may be used."""
        self._is_closed = True
        self._moving = threading.Lock()  # it may be held by a thread that is not here
        self._office.become_forked()
        self._local.become_forked()
        if self._waiting_calls is not None:
            self._waiting_calls.is_forked = True
