"""Behind an agent: its peers, the thread that reads, the workers, and the deadlines of all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from potluck.core.calls import Whereabouts, find_rank
from potluck.core.calls_errors import shortened
from potluck.core.calls_failures import Failure
from potluck.runtime.recorder_logs import log_of
from potluck.runtime.rpc_calls import Incoming, here
from potluck.runtime.rpc_duties import Generations, Outlook
from potluck.runtime.rpc_handlers import CANCELLED
from potluck.runtime.rpc_loop import Loop
from potluck.runtime.rpc_notes import Notes
from potluck.runtime.rpc_opening import Opener
from potluck.runtime.rpc_peer import Peer
from potluck.runtime.rpc_places import name_of, places_of
from potluck.vocabulary import ProcessId

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.net.transport import Poller
    from potluck.runtime.rpc_config import RpcConfig
    from potluck.runtime.rpc_connection import Connection
    from potluck.runtime.rpc_handlers import Handlers
    from potluck.runtime.rpc_local import Local
    from potluck.runtime.rpc_pool import Workers
    from potluck.vocabulary import View

__all__ = ["AgentOffice"]

LINGER = 1.0
"""Seconds that closing waits for answers that leave."""

CALL_AGAIN = "Whether the function ran is not known; a new call goes to those who are here now."


class AgentOffice:
    """Where calls of one agent come and go."""

    def __init__(
        self,
        backend: Backend,
        config: RpcConfig,
        handlers: Handlers,
        workers: Workers,
        *,
        is_view: bool = False,
    ) -> None:
        self.rank = backend.rank
        self.config = config
        self.generations = Generations.of(backend)
        self.generations.latest += 1
        self.hello = config.hello(self.generations.latest)
        self.notes = Notes(log_of(backend))
        self._backend = backend
        self._handlers = handlers
        self._workers = workers
        self._is_view = is_view  # another office follows this one
        others = (rank for rank in range(backend.world_size) if rank != backend.rank)
        self.peers = {rank: Peer(rank, self) for rank in others}
        self._local: Local | None = None
        self._places: dict[int, Whereabouts] | None = None
        self._opener = Opener(backend, lambda rank: self.peers[rank].give_up())
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Calls of this rank that have not ended."""
        mine = 0 if self._local is None else self._local.in_flight
        return mine + sum(peer.in_flight for peer in self.peers.values())

    def is_of(self, backend: Backend) -> bool:
        """Whether it is this backend's office."""
        return self._backend is backend

    def rank_of(self, node: str | ProcessId) -> int:
        """The rank that runs on a machine, by its name or id, or by the id of its process."""
        if self._places is None:
            self._places = places_of(self._backend)
        wanted = f"{node.node}/{node.incarnation}" if isinstance(node, ProcessId) else node
        return find_rank(wanted, self._places)

    def process_of(self, rank: int) -> ProcessId | None:
        """Which process a rank of a view is."""
        view: View | None = getattr(self._backend, "view", None)
        return None if view is None else view.members[rank]

    def peer_of(self, process: ProcessId | None) -> Peer | None:
        """The same process in this view, if it is here."""
        return next((p for p in self.peers.values() if self.process_of(p.rank) == process), None)

    def move_to(self, other: AgentOffice) -> None:
        """Another view has begun: what waits goes on there."""
        for peer in self.peers.values():
            if peer.connection is not None:  # it is about to end anyway
                peer.lose(peer.connection, "the members of the cluster have changed meanwhile")
            peer.move_to(other.peer_of(self.process_of(peer.rank)))

    def become_forked(self) -> None:
        """In a forked child: nobody waits here in vain."""
        for peer in self.peers.values():
            peer.is_forked = True

    def name_of(self, rank: int) -> str | None:
        """Where a rank is, for people; None if that says nothing new."""
        name = name_of(self._backend, rank)
        return None if name is None or name.endswith(f"rank {rank}") else name

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
        if (
            self._handlers.is_quick(call)
            and self._loop.takes_quick
            and here.call is None
            and not call.origin.is_congested
        ):
            self._loop.run_soon(call)
        else:
            self._workers.add(call)
            self._loop.rouse()

    def forget(self, call: Incoming) -> None:
        """Nobody waits for a call any more."""
        call.cancel()
        if not call.origin.is_congested:  # or it is answered when it leaves the queue
            call.origin.refuse(call, CANCELLED)
            self.sweep(1)

    def sweep(self, count: int) -> None:
        """So many calls have lost their callers."""
        for call in self._workers.forget(count):
            call.origin.refuse(call, CANCELLED)

    def orphaned(self, calls: list[Incoming]) -> None:
        """Nobody waits for these calls any more, and they need no answer."""
        for call in calls:
            call.cancel()
        self.sweep(len(calls))

    def watch(self, connection: Connection) -> None:
        """Read a new connection."""
        self._loop.add(connection)

    def lost(self, rank: int) -> Outlook:
        """A connection has ended."""
        outlook = self.outlook(rank)
        if outlook.is_back_soon and not self._closed:
            self._opener.want(self.peers[rank])
        return outlook

    def outlook(self, rank: int) -> Outlook:
        """What is known about the rank of a connection that has ended."""
        if self._closed:
            return Outlook(is_back_soon=False)
        over = self._opener.loss_of(self.rank)  # of ourselves: all of it is over
        if self._is_view and over is None:  # it may be in the next view before us
            return Outlook(is_back_soon=True, hint=CALL_AGAIN)
        if self._is_view and over is not None:
            cause = f"the cluster changed meanwhile: {over.message}"
            cause += f": {over.cause}" if over.cause else ""
            return Outlook(over.rank != rank, cause, CALL_AGAIN)
        loss = over or self._opener.loss_of(rank)
        return Outlook(is_back_soon=loss is None, cause=None if loss is None else str(loss))

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

    def answer(self, call: Incoming, *, cork: bool) -> None:
        """Run a quick function."""
        self._handlers.run(call, cork=cork)

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
                    peer.admit_waiting()
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
        words = f"'{shortened(call.name)}' on rank {self.rank} gave no answer in time: {why}"
        call.origin.refuse(call, Failure("late", words=words, seconds=call.seconds))
        call.cancel()  # only now: a worker that finds it cancelled says so

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Let answers leave, tell the others, and end.  May be called twice."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + LINGER
        self._opener.close(deadline)
        for peer in self.peers.values():
            peer.stop()
        if here.call is None:  # or we would wait for ourselves
            self._wait_for(lambda: self._loop.is_idle, deadline)
        connections = [peer.connection for peer in self.peers.values() if peer.connection]
        self._flush(connections, deadline)  # first: nothing follows a goodbye
        for connection in connections:
            connection.say_goodbye()
        self._flush(connections, deadline)
        self._loop.close(deadline + LINGER)
        for peer in self.peers.values():
            peer.close()

    def _flush(self, connections: list[Connection], deadline: float) -> None:
        self._wait_for(
            lambda: all(each.is_flushed or not each.is_open for each in connections), deadline
        )

    @staticmethod
    def _wait_for(condition: Callable[[], bool], deadline: float) -> None:
        """Until the loop has done something."""
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.001)
