"""Behind an agent: its peers, the thread that reads, the workers, and the deadlines of all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from potluck.core.calls_failures import Failure
from potluck.runtime.rpc_calls import Incoming, here
from potluck.runtime.rpc_loop import Loop
from potluck.runtime.rpc_opening import Opener
from potluck.runtime.rpc_peer import Peer
from potluck.runtime.rpc_pool import Workers

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.net.transport import Poller
    from potluck.runtime.rpc_config import RpcConfig
    from potluck.runtime.rpc_connection import Connection
    from potluck.runtime.rpc_handlers import Handlers
    from potluck.runtime.rpc_local import Local

__all__ = ["AgentOffice"]

LINGER = 1.0
"""Seconds that closing waits for functions that run and for answers that leave."""


class AgentOffice:
    """Where calls of one agent come and go."""

    def __init__(self, backend: Backend, config: RpcConfig, handlers: Handlers) -> None:
        self.rank = backend.rank
        self.config = config
        self._backend = backend
        self._handlers = handlers
        others = (rank for rank in range(backend.world_size) if rank != backend.rank)
        self.peers = {rank: Peer(rank, self) for rank in others}
        self._local: Local | None = None
        self._workers = Workers(config.workers, handlers.run, self._may_run)
        self._opener = Opener(backend, lambda rank, why: self.peers[rank].give_up(why))
        self._closed = False

    def begin(self, local: Local) -> None:
        """Connect, and serve."""
        self._local = local
        self._loop = Loop(self._backend.make_poller(), self._direct_poller, self)
        self._loop.start()
        for peer in self.peers.values():
            self._opener.want(peer)

    def _direct_poller(self, connection: Connection) -> Poller | None:
        """For those who wait for answers: a stream with a descriptor may have two pollers."""
        is_socket = hasattr(connection.wire.stream, "fileno")
        return self._backend.make_poller() if is_socket else None

    def rouse(self) -> None:
        """A call is under way for which perhaps nobody waits."""
        self._loop.rouse()

    # -- for peers ---------------------------------------------------------------------------------

    def serve(self, call: Incoming) -> None:
        """Have a call answered."""
        if self._handlers.is_quick(call) and self._loop.takes_quick and here.call is None:
            self._loop.run_soon(call)
        else:
            self._workers.add(call)
            self._loop.rouse()

    def forget(self, call: Incoming) -> None:
        """Nobody waits for a call any more."""
        call.cancel()
        call.origin.refuse(call, Failure("cancelled", words="The caller cancelled the call"))

    def watch(self, connection: Connection) -> None:
        """Read a new connection."""
        self._loop.add(connection)

    def lost(self, rank: int) -> bool:
        """A connection has ended; whether its rank may come back."""
        if self._closed or self._opener.is_gone(rank) is not None:
            return False
        self._opener.want(self.peers[rank])
        return True

    def wait_inside(self, wait: Callable[[], None]) -> None:
        """Wait for a call from within another."""
        if self._loop.is_mine:
            wait()
        else:
            self._workers.wait_inside(wait)

    @property
    def may_block(self) -> bool:
        """Whether this thread may wait."""
        return not self._loop.is_mine or here.call is not None

    # -- for the loop ------------------------------------------------------------------------------

    def connection_of(self, rank: int) -> Connection | None:
        """The connection to a rank, if there is one."""
        return self.peers[rank].connection

    def lose(self, connection: Connection, reason: Exception) -> None:
        """A connection is over."""
        self.peers[connection.rank].lose(connection, reason)

    def answer(self, call: Incoming) -> None:
        """Run a quick function."""
        self._handlers.run(call, cork=True)

    def hand_over(self, call: Incoming) -> None:
        """Leave a call to the workers."""
        self._workers.add(call)

    def tick(self, now: float) -> bool:
        """Look at deadlines; whether anything is under way."""
        busy = False
        for peer in (*self.peers.values(), *((self._local,) if self._local else ())):
            if peer.is_busy:
                busy = True
                for call in peer.overdue(now):
                    call.expire()
                if isinstance(peer, Peer) and peer.connection is not None:
                    for incoming in peer.connection.overdue(now):
                        self._refuse_late(incoming, "it was still running")
        if len(self._workers):
            self._workers.nudge()
            count = self._workers.count
            for incoming in self._workers.overdue(now):
                self._refuse_late(incoming, f"all its {count} workers were busy")
            for incoming in self._workers.hopeless(now):
                words = f"All {count} workers of rank {self.rank} wait for calls of their own, "
                words += "and this call comes from within another"
                incoming.origin.refuse(incoming, Failure("busy", words=words))
        return busy or len(self._workers) > 0

    def _refuse_late(self, call: Incoming, why: str) -> None:
        call.cancel()
        words = f"'{call.name}' on rank {self.rank} gave no answer in time: {why}"
        call.origin.refuse(call, Failure("late", words=words, seconds=call.seconds))

    def _may_run(self, rank: int) -> bool:
        peer = self.peers.get(rank)
        connection = peer.connection if peer is not None else None
        return connection is None or not connection.is_congested

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Let what runs be answered, tell the others, and end."""
        self._closed = True
        deadline = time.monotonic() + LINGER
        self._opener.close(deadline)
        self._workers.close(deadline)
        connections = [peer.connection for peer in self.peers.values() if peer.connection]
        for peer in self.peers.values():
            peer.part()
        while time.monotonic() < deadline:
            if all(each.is_flushed or not each.is_open for each in connections):
                break
            time.sleep(0.001)  # the loop sends
        self._loop.close(deadline + LINGER)
        for peer in self.peers.values():
            peer.close()
