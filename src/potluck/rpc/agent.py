"""RpcAgent: calls between any two ranks of a group, by name.

There are functions of bytes (:meth:`RpcAgent.register`, :meth:`RpcAgent.rpc_sync`) and functions of
values (:meth:`RpcAgent.expose`, :meth:`RpcAgent.call`).  Calls use their own connections, apart
from messages and collectives.
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
from potluck.rpc.calls import (
    IncomingCall,
    Replier,
    RpcConfig,
    RpcFuture,
    Service,
    current_call,
    here,
)
from potluck.rpc.errors import RpcInvalidMessage, RpcNoConnection, RpcTimeout, RpcTooLarge
from potluck.rpc.peer import LocalPeer, RpcEndpoint, RpcPeer, ViewPendingCalls
from potluck.rpc.protocol import (
    MAX_RPC_MSG_SIZE,
    REQUEST_OVERHEAD,
    RESPONSE_OVERHEAD,
    SHORT,
    CallFailure,
    FrameFlag,
    RpcRequest,
    RpcResponse,
    name_in_bytes,
    reply_with,
)
from potluck.rpc.server import Handlers, RpcHandler, Workers
from potluck.rpc.values import ValueCodec, taken_bytes

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    from potluck.cluster.views import ViewSession, ViewSessions
    from potluck.metrics.instruments import OperationMetrics


Destination: TypeAlias = int | str | ProcessId
"""A rank, the name or id of a machine, or the id of a process; a prefix of an id is enough."""


def _view(payload: Buffer) -> bytes | memoryview:
    return payload if type(payload) is bytes else read_view(payload)


class TcpRpcBackend:
    """Messages for remote calls on any backend, apart from its other messages.

    It receives the reply that :meth:`RpcAgent.handle_request <potluck.RpcAgent.handle_request>`
    sends: eight bytes with the length, then the reply.

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
        """The rank of this process."""
        return self._backend.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
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


class LocalReply(Replier):
    """Collects the answer to a call as one message of bytes."""

    is_congested = False

    def __init__(self, rank: int, here: int, limit: int) -> None:
        self.rank = rank
        self.reply = b""
        self._here = here
        self._limit = min(limit, MAX_RPC_MSG_SIZE)

    def answer(self, call: IncomingCall, parts: list[Any], *, cork: bool = False) -> None:
        """Store a value."""
        size = RESPONSE_OVERHEAD + sum(map(len, parts))
        if size > self._limit:
            self.refuse(call, CallFailure("large", size=size, limit=self._limit), cork=cork)
        else:
            self.reply = RpcResponse(call.number, b"".join(parts)).serialize()

    def refuse(self, call: IncomingCall, failure: CallFailure, *, cork: bool = False) -> None:  # noqa: ARG002
        """Store the reason why there is no value."""
        self.reply = reply_with(call.number, failure, self._here, self._limit)


def _check(size: int) -> None:
    if size > MAX_RPC_MSG_SIZE:
        raise RpcInvalidMessage(
            f"RPC message size {size} exceeds maximum allowed size {MAX_RPC_MSG_SIZE} (1 GiB)",
            expected=MAX_RPC_MSG_SIZE,
            got=size,
        )


Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)

LINGER = 1.0
"""Seconds that closing waits for running functions."""

_claiming = ForkSafeLock()


class RpcAgent(Closing):
    """Calls functions on other ranks, and answers their calls.

    Every rank that calls or is called makes one, on the same backend or context.  It answers calls
    until it, or the backend, is closed.

    >>> from potluck import SimulatedBackend
    >>> left, right = SimulatedBackend.create_group(2)
    >>> with RpcAgent(left) as caller, RpcAgent(right) as server:
    ...     _ = server.register("shout", lambda payload: payload.upper())
    ...     caller.rpc_sync(1, "shout", b"dinner")
    b'DINNER'
    """

    def __init__(self, backend: Backend, config: RpcConfig | None = None) -> None:
        if not isinstance(backend, Backend):
            msg = f"RpcAgent needs a potluck.Backend, got a {type(backend).__name__}"
            raise TypeError(msg)
        self._backend = backend.innermost
        self.config = config or RpcConfig()
        self._values = ValueCodec()
        self._handlers = Handlers(self._values)
        self._is_closed = False
        self._waiting_calls: ViewPendingCalls | None = None
        self._moving = threading.Lock()
        self._workers = Workers(self.config.workers, self._handlers.run)
        self._claim()
        self._sessions: ViewSessions | None = self._backend.sessions
        try:
            below = self._backend if self._sessions is None else self._present(self._sessions)
        except BaseException:
            self._is_closed = True  # so that another may be made when there is a view
            raise
        endpoint = self._make_endpoint(below)
        self._endpoint = endpoint
        self._local = LocalPeer(endpoint)
        self._counts: OperationMetrics | None = None
        metrics = backend.call_metrics()
        if metrics is not None:
            self._counts, self._handlers.counts = metrics.rpc.calls, metrics.rpc.served
            metrics.rpc.follow(self, lambda agent: agent.in_flight)
        endpoint.begin(self._local)
        if self._sessions is not None:
            self._sessions.follow(self._move)
        self._backend.on_close(self.close)
        _process.on_fork(self)

    def _make_endpoint(self, below: Backend) -> RpcEndpoint:
        is_view = below is not self._backend
        endpoint = RpcEndpoint(below, self.config, self._handlers, self._workers, is_view=is_view)
        if is_view:
            below.on_close(endpoint.close)
        return endpoint

    # -- where ranks change: an endpoint for each view, with the same functions and workers --------

    @staticmethod
    def _present(sessions: ViewSessions) -> Backend:
        below = sessions.wait_for(lambda _: True, DEFAULT_TIMEOUT).backend
        assert below is not None
        return below

    def _move(self, session: ViewSession) -> None:
        """Serve the view that has just been connected.

        Calls of the previous view have failed with it, except idempotent ones.
        """
        below = session.backend
        with self._moving:
            if below is None or self._is_closed or self._endpoint.is_of(below):
                return
            before, endpoint = self._endpoint, self._make_endpoint(below)
            endpoint.begin(self._local)
            self._endpoint = endpoint
            self._local.move_to(endpoint)
            before.move_to(endpoint)

    def _enter(self, seconds: float) -> float:
        """Wait until the current view is connected; return how many seconds are left."""
        if self._sessions is None or self._is_closed:
            return seconds
        began = time.monotonic()
        try:
            session = self._sessions.wait_for(lambda _: True, seconds)
        except Timeout as error:
            raise RpcTimeout(str(error), seconds=seconds) from error
        except DistributedError as error:
            raise RpcNoConnection(self._endpoint.rank, cause=str(error)) from error
        self._move(session)
        return max(0.0, seconds - (time.monotonic() - began))

    def _pending(self) -> ViewPendingCalls | None:
        """Where calls wait while the cluster is paused or connecting; None otherwise."""
        if self._sessions is None or self._is_closed or self._sessions.is_decided:
            return None
        with self._moving:
            if self._waiting_calls is None:
                self._waiting_calls = ViewPendingCalls(
                    self._endpoint, self._sessions, self._start_held
                )
            return self._waiting_calls

    def _claim(self) -> None:
        with _claiming:
            other = self._backend.services.get(RpcAgent)
            if other is not None and not other.is_closed:
                msg = "This backend already has an RpcAgent. Use that one, or close it first"
                raise ValueError(msg)
            self._backend.services.put(RpcAgent, self)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    @property
    def in_flight(self) -> int:
        """The number of calls that this rank has made and that have not ended."""
        waiting = 0 if self._waiting_calls is None else self._waiting_calls.in_flight
        return waiting + self._endpoint.in_flight

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._backend.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
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

        Values are Python's plain types, dataclasses and arrays.  What a function returns must not
        change until it has been sent: return a copy of shared data.
        """
        if function is None:
            return lambda later: self.expose(later, name=name)
        self._handlers.add(name or function.__name__, function, is_typed=True)
        return function

    def share(self, kind: Kind) -> Kind:
        """Accept objects of a dataclass from other ranks; also a decorator."""
        return self._values.share(kind)

    def lookup(self, name: str) -> RpcHandler | None:
        """The function registered under a name, if there is one."""
        handler = self._handlers.get(name)
        return None if handler is None else handler.function

    @staticmethod
    def current_call() -> IncomingCall | None:
        """Inside a called function: its caller, the time left, and whether it was cancelled."""
        return current_call()

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

        An ``idempotent`` call is repeated if the connection is lost before the answer arrives.
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
        """Start a call of a function of bytes; the payload must not change until it is done."""
        call = self._begin(dst, name, [_view(payload)], timeout, 0, idempotent, later=True)
        self._endpoint.wake()
        return call

    # -- calls of values ---------------------------------------------------------------------------

    def call(self, dst: Destination, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of values and return what it returns."""
        return self._sync(self._start_typed(dst, name, args, kwargs))

    def call_async(
        self, dst: Destination, name: str, /, *args: Any, **kwargs: Any
    ) -> RpcFuture[Any]:
        """Start a call of a function of values; its arrays must not change until it is done."""
        call = self._start_typed(dst, name, args, kwargs, later=True)
        self._endpoint.wake()
        return call

    def service(
        self, dst: Destination, *, timeout: Seconds | None = None, idempotent: bool = False
    ) -> Service:
        """The functions of a rank as methods: ``agent.service(1).add(2, 3)``."""

        def start(name: str, args: Any, kwargs: Any, *, later: bool) -> Any:
            call = self._start_typed(
                dst, name, args, kwargs, timeout, idempotent=idempotent, later=later
            )
            if not later:
                return self._sync(call)
            self._endpoint.wake()
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
        return self._begin(dst, name, parts, timeout, FrameFlag.TYPED, idempotent, later=later)

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
        """Start a call; with ``later`` it does not wait for a view of the cluster."""
        seconds = self._endpoint.config.timeout if timeout is None else in_seconds(timeout)
        if not seconds >= 0:
            msg = f"A timeout must be zero or more seconds, not {seconds}"
            raise ValueError(msg)
        outer = here.call
        if outer is not None:
            marks |= FrameFlag.NESTED
            seconds = min(seconds, outer.remaining)
        encoded = name_in_bytes(name)
        pending = self._pending() if later else None
        if pending is not None:
            call = pending.new_call(name, seconds)
            call.destination = f"rank {dst}" if type(dst) is int else f"'{dst}'"
        else:
            left = self._enter(seconds)
            call = self._find(dst).new_call(name, left)
        call.seconds = seconds
        call.convert_with(self._values.unpack_answer if marks & FrameFlag.TYPED else taken_bytes)
        call.marks, call.idempotent, call.parts = marks, idempotent, parts
        size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        call.size = REQUEST_OVERHEAD + len(encoded) + size
        if call.size > self._endpoint.config.max_message:
            raise RpcTooLarge(call.size, self._endpoint.config.max_message, rank=call.peer.rank)
        if call.size <= SHORT and not (len(parts) == 1 and type(parts[0]) is bytes):
            call.parts = [b"".join(parts)]  # a copy: it may have to wait
        call.accounting = accounting = self._endpoint.accounting
        accounting.counts = self._counts
        if pending is not None:
            pending.hold(call, dst)
        else:
            call.peer.start(call)  # type: ignore[attr-defined]
        if outer is not None:
            outer.adopt(call)
        return call

    def _start_held(self, call: RpcFuture[Any], dst: Destination) -> None:
        """Start a call that has waited for a view."""
        self._enter(0.0)
        peer = self._find(dst)
        call.peer, call.number, call.destination = peer, peer.next_number(), ""
        peer.start(call)
        self._endpoint.wake()

    @staticmethod
    def _sync(call: RpcFuture[Any]) -> Any:
        try:
            return call.wait()
        except BaseException:  # Ctrl-C: the caller no longer waits
            if not call.ended:
                call.cancel()
            raise

    def _find(self, dst: Destination) -> RpcPeer | LocalPeer:
        endpoint, local = self._endpoint, self._local
        local.check_open()
        if isinstance(dst, (str, ProcessId)):
            dst = endpoint.rank_of(dst)
        elif type(dst) is not int:
            dst = check_whole(dst, "rank")
        if dst == endpoint.rank:
            return local
        peer = endpoint.peers.get(dst)
        if peer is None:
            raise InvalidRank(dst, len(endpoint.peers) + 1)
        return peer

    # -- requests as messages ----------------------------------------------------------------------

    def handle_request(self, src: int, data: Buffer) -> None:
        """Answer a request received as a message, with two messages.

        The first has eight bytes, the length of the second; see :class:`TcpRpcBackend`.
        """
        request = RpcRequest.deserialize(read_view(data))
        reply_to = LocalReply(src, self.rank, self.config.max_message)
        patience = int(self.config.timeout * 1000)
        call = IncomingCall(
            reply_to, request.request_id, request.function_name, request.payload, patience
        )
        self._handlers.run(call)
        messages = TcpRpcBackend(self._backend)
        messages.send(len(reply_to.reply).to_bytes(8, "little"), src)
        messages.send(reply_to.reply, src)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Answer running calls, tell the peers, and fail pending calls.  May be called twice."""
        with self._moving:
            if self._is_closed:
                return
            self._is_closed = True
        if self._sessions is not None:
            self._sessions.unfollow(self._move)
        self._workers.close(time.monotonic() + LINGER)
        if self._waiting_calls is not None:
            self._waiting_calls.close()
        self._endpoint.close()
        self._local.close()
        self._backend.forget(self.close)

    def become_forked(self) -> None:
        """Mark the agent of the parent as unusable in a forked child."""
        self._is_closed = True
        self._moving = threading.Lock()  # a thread of the parent may hold it
        self._endpoint.become_forked()
        self._local.become_forked()
        if self._waiting_calls is not None:
            self._waiting_calls.is_forked = True
