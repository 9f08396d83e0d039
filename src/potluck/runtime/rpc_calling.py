"""Making calls: of bytes, and of values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from potluck.backend.base import check_whole, read_view
from potluck.core.calls import name_in_bytes
from potluck.core.calls_encoding import REQUEST_OVERHEAD
from potluck.core.calls_errors import RpcTooLarge
from potluck.core.calls_frames import SHORT, Mark
from potluck.errors import InvalidRank
from potluck.runtime.rpc_calls import RpcFuture, here
from potluck.runtime.rpc_service import Service
from potluck.runtime.rpc_values import taken_bytes
from potluck.vocabulary import ProcessId, Seconds, in_seconds

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    from potluck.backend.base import Backend
    from potluck.metrics import OperationMetrics
    from potluck.runtime.rpc_local import Local
    from potluck.runtime.rpc_office import AgentOffice
    from potluck.runtime.rpc_peer import Peer
    from potluck.runtime.rpc_values import Values
    from potluck.runtime.rpc_waiting import Lobby

__all__ = ["Caller", "Destination"]

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
