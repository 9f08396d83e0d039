"""RpcAgent: calls between any two ranks of a group, by name.

Functions of bytes are the ground floor: :meth:`RpcAgent.register`, :meth:`RpcAgent.rpc_sync`.
Functions of values stand on it: :meth:`RpcAgent.expose`, :meth:`RpcAgent.call`.  Calls travel on
connections of their own, so they never meet messages or collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

from potluck import _process
from potluck._process import Closing, ForkSafeLock
from potluck._types import ProcessId, Seconds, in_seconds
from potluck.backend.base import DEFAULT_TIMEOUT, RPC, Backend, check_whole, read_view, write_view
from potluck.errors import Disconnected, DistributedError, InvalidRank, SelfSend, Timeout
from potluck.rpc.calls import Incoming, RpcConfig, RpcFuture, Service, current_call, here
from potluck.rpc.errors import RpcInvalidMessage, RpcNoConnection, RpcTimeout, RpcTooLarge
from potluck.rpc.peer import Lobby, Local, Mail
from potluck.rpc.protocol import (
    MAX_RPC_MSG_SIZE,
    REQUEST_OVERHEAD,
    SHORT,
    Mark,
    RpcRequest,
    name_in_bytes,
)
from potluck.rpc.server import AgentOffice, Handlers, RpcHandler, Workers
from potluck.rpc.values import Values, taken_bytes

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    from potluck.cluster.views import Stage, Stages
    from potluck.metrics.instruments import OperationMetrics
    from potluck.metrics.registry import DistributedMetrics
    from potluck.rpc.peer import Peer


# --------------------------------------------------------------------------------------------------
# Making calls: of bytes, and of values.

Destination: TypeAlias = int | str | ProcessId
"""A rank, the name or id of a machine, or the id of a process; of an id the beginning will do."""


class Caller:
    """The half of an agent that calls others."""

    def __init__(self, backend: Backend, office: AgentOffice, local: Local, values: Values) -> None:
        self._backend = backend
        self._office = office
        self._local = local
        self._values = values
        self._counts: OperationMetrics | None = None

    def _enter(self, seconds: float) -> float:
        """Wait until calls can be made; how much time is left then.

        Where ranks never change calls can always be made.
        """
        return seconds

    def _lobby(self) -> Lobby | None:
        """Where calls wait that cannot begin now; None if they can."""
        return None

    # -- calls of bytes ----------------------------------------------------------------------------

    def rpc_sync(
        self,
        dst: Destination,
        name: str,
        payload: Buffer = b"",
        timeout: Seconds | None = None,
        *,
        idempotent: bool = False,
    ) -> bytes:
        """Call a function of bytes on a rank, or on a node, and return what it returns.

        An ``idempotent`` call is made again when the connection is lost before the answer came.
        """
        call = self._begin(dst, name, [_view(payload)], timeout, 0, idempotent)
        value: bytes = self._sync(call)
        return value

    def rpc_async(
        self,
        dst: Destination,
        name: str,
        payload: Buffer = b"",
        timeout: Seconds | None = None,
        *,
        idempotent: bool = False,
    ) -> RpcFuture[bytes]:
        """Start such a call.  The payload must not change until the future is done."""
        call = self._begin(dst, name, [_view(payload)], timeout, 0, idempotent, later=True)
        self._office.rouse()
        return call

    # -- calls of values ---------------------------------------------------------------------------

    def call(self, dst: Destination, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of values and return what it returns."""
        return self._sync(self._start_typed(dst, name, args, kwargs))

    def call_async(
        self, dst: Destination, name: str, /, *args: Any, **kwargs: Any
    ) -> RpcFuture[Any]:
        """Start such a call.  Arrays given to it must not change until the future is done."""
        call = self._start_typed(dst, name, args, kwargs, later=True)
        self._office.rouse()
        return call

    def service(
        self, dst: Destination, *, timeout: Seconds | None = None, idempotent: bool = False
    ) -> Service:
        """A rank's functions as methods: ``agent.service(1).add(2, 3)``."""

        def start(name: str, args: Any, kwargs: Any, *, later: bool) -> Any:
            call = self._start_typed(
                dst, name, args, kwargs, timeout, idempotent=idempotent, later=later
            )
            if not later:
                return self._sync(call)
            self._office.rouse()
            return call

        return Service(start)

    def _start_typed(
        self,
        dst: Destination,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: Seconds | None = None,
        *,
        idempotent: bool = False,
        later: bool = False,
    ) -> RpcFuture[Any]:
        lead = REQUEST_OVERHEAD + len(name_in_bytes(name))
        parts = self._values.pack_arguments(args, kwargs, lead)
        return self._begin(dst, name, parts, timeout, Mark.TYPED, idempotent, later=later)

    # -- how they begin and end --------------------------------------------------------------------

    def _begin(
        self,
        dst: Destination,
        name: str,
        parts: list[Any],
        timeout: Seconds | None,
        marks: int,
        idempotent: bool,  # noqa: FBT001 - one of a fixed list
        *,
        later: bool = False,
    ) -> RpcFuture[Any]:
        """Start a call; one for ``later`` does not wait for a view of the cluster."""
        seconds = self._office.config.timeout if timeout is None else in_seconds(timeout)
        if not seconds >= 0:
            msg = f"A timeout must be zero or more seconds, not {seconds}"
            raise ValueError(msg)
        outer = here.call
        if outer is not None:
            marks |= Mark.NESTED
            seconds = min(seconds, outer.remaining)
        octets = name_in_bytes(name)
        lobby = self._lobby() if later else None
        if lobby is not None:
            call = lobby.new_call(name, seconds)
            call.destination = f"rank {dst}" if type(dst) is int else f"'{dst}'"
        else:
            left = self._enter(seconds)
            call = self._find(dst).new_call(name, left)
        call.seconds = seconds
        call.convert_with(self._values.unpack_answer if marks & Mark.TYPED else taken_bytes)
        call.marks, call.idempotent, call.parts = marks, idempotent, parts
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        call.size = REQUEST_OVERHEAD + len(octets) + size
        if call.size > self._office.config.max_message:
            raise RpcTooLarge(call.size, self._office.config.max_message, rank=call.peer.rank)
        if call.size <= SHORT and not (len(parts) == 1 and type(parts[0]) is bytes):
            call.parts = [b"".join(parts)]  # what may have to wait is our own
        call.notes = notes = self._office.notes
        notes.counts = self._counts
        if lobby is not None:
            lobby.hold(call, dst)
        else:
            call.peer.start(call)  # type: ignore[attr-defined]
        if outer is not None:
            outer.adopt(call)
        return call

    def _start_held(self, call: RpcFuture[Any], dst: Destination) -> None:
        """Start a call that has waited in the lobby."""
        self._enter(0.0)
        peer = self._find(dst)
        call.peer, call.number, call.destination = peer, peer.next_number(), ""
        peer.start(call)
        self._office.rouse()

    @staticmethod
    def _sync(call: RpcFuture[Any]) -> Any:
        try:
            return call.wait()
        except BaseException:  # Ctrl-C: nobody waits any more
            if not call.done:
                call.cancel()
            raise

    def _find(self, dst: Destination) -> Peer | Local:
        office, local = self._office, self._local
        local.check_open()
        if isinstance(dst, (str, ProcessId)):
            dst = office.rank_of(dst)
        elif type(dst) is not int:
            dst = check_whole(dst, "rank")
        if dst == office.rank:
            return local
        peer = office.peers.get(dst)
        if peer is None:
            raise InvalidRank(dst, len(office.peers) + 1)
        return peer


def _view(payload: Buffer) -> bytes | memoryview:
    return payload if type(payload) is bytes else read_view(payload)


# --------------------------------------------------------------------------------------------------
# TcpRpcBackend: whole messages between ranks, apart from all other messages of a backend.


class TcpRpcBackend:
    """Messages for remote calls, on top of any backend; any rank reaches any other.

    The reply that :meth:`RpcAgent.handle_request <potluck.RpcAgent.handle_request>` sends is
    received with this: eight bytes of length first, then so many bytes.

    >>> from potluck import SimulatedBackend
    >>> left, right = map(TcpRpcBackend, SimulatedBackend.create_group(2))
    >>> left.send(b"soup?", 1)
    >>> inbox = bytearray(5)
    >>> right.recv(inbox, 0)
    >>> inbox
    bytearray(b'soup?')
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self._backend.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._backend.world_size

    def send(self, data: Buffer, dst: int, *, timeout: Seconds | None = None) -> None:
        """Send a message."""
        view = read_view(data)
        _check(len(view))
        try:
            self._backend.post_send(view, dst, group=RPC).finish_within(self._limit(timeout))
        except (Disconnected, SelfSend) as error:
            raise RpcNoConnection(dst, cause=str(error)) from error

    def recv(self, into: Buffer, src: int, *, timeout: Seconds | None = None) -> None:
        """Receive a message into ``into``, which has its exact size."""
        view = write_view(into)
        _check(len(view))
        try:
            self._backend.post_recv_into(view, src, group=RPC).finish_within(self._limit(timeout))
        except (Disconnected, SelfSend) as error:
            raise RpcNoConnection(src, cause=str(error)) from error

    def _limit(self, timeout: Seconds | None) -> float | None:
        return self._backend.timeout if timeout is None else in_seconds(timeout)


def _check(size: int) -> None:
    if size > MAX_RPC_MSG_SIZE:
        raise RpcInvalidMessage(
            f"RPC message size {size} exceeds maximum allowed size {MAX_RPC_MSG_SIZE} (1 GiB)",
            expected=MAX_RPC_MSG_SIZE,
            got=size,
        )


# --------------------------------------------------------------------------------------------------

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
        _process.on_fork(self)

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
