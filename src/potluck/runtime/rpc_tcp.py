"""TcpRpcBackend: whole messages between ranks, apart from all other messages of a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.backend.base import RPC, read_view, write_view
from potluck.core.calls_encoding import MAX_RPC_MSG_SIZE
from potluck.core.calls_errors import RpcInvalidMessage, RpcNoConnection
from potluck.errors import Disconnected, SelfSend
from potluck.vocabulary import Seconds, in_seconds

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    from potluck.backend.base import Backend

__all__ = ["TcpRpcBackend"]


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
