"""ViewBackend: the ranks of one view, each connected to each, on the ports they already have.

A view is agreed on elsewhere; here it becomes a mesh.  Its lanes name the view's session, so those
of another view, or of another start of a process, do not fit.  When the view is over the mesh is
aborted: whatever runs on it ends at once, and the next view has a mesh of its own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import structs

from potluck.backend.extension import MESSAGES, Extension
from potluck.backend.laned import LaneBackend
from potluck.backend.lanes import OpenLane, answer_lane
from potluck.backend.port import proved_node
from potluck.backend.routes import Route, open_lane
from potluck.backend.view_gathering import Gathering
from potluck.core.handshake import Refused, judge_lane, judge_node, judge_start
from potluck.errors import BackendUnavailable, ChannelClosed, DistributedError, from_os_error
from potluck.messages import Lane, Peer
from potluck.net.security import NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from potluck.backend.port import NodePort
    from potluck.net.secure_socket import OpeningSocket
    from potluck.vocabulary import ProcessId, View

__all__ = ["ViewBackend"]

ANSWER_WITHIN = 5.0
"""Seconds for the last steps of opening a lane with a member."""

LAST_WORDS = 0.3
"""Seconds before the deadline at which diallers give up and say why."""


class ViewBackend(LaneBackend):
    """One member of a view.

    ``peers`` says in rank order where the members are; each is the process that the view names, or
    is refused.  Returns when all are connected, at the latest at ``deadline``.  ``look`` is called
    while waiting, and raises when the view is superseded.

    :meth:`abort` ends it at once, :meth:`close` takes leave of the others; neither touches the
    port.  An aborted backend has to be closed as well.
    """

    def __init__(
        self,
        port: NodePort,
        view: View,
        me: ProcessId,
        peers: Sequence[Peer],
        *,
        deadline: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        rank = view.rank_of(me)
        if rank is None or len(peers) != len(view.members):
            raise BackendUnavailable(
                f"View {view.epoch} of {len(view.members)} cannot be opened by {me}",
                cause=f"{len(peers)} peers were named" if rank is not None else "it is no member",
            )
        super().__init__(rank, len(view.members))
        self.view = view
        self._port = port
        self._members = port.members
        self._peers = [self._as_expected(*each) for each in zip(peers, view.members, strict=True)]
        self._names = {number: peer.name for number, peer in enumerate(peers)}
        self._doorman = Extension(self._judge, self._answer, self._park, self._switchboard.count)
        try:
            port.serve(view.session, self._doorman.offer)
            self._connect(deadline, look)
        except BaseException as error:
            reason = error if isinstance(error, DistributedError) else _given_up(rank)
            self.abort(reason)
            raise

    def _as_expected(self, peer: Peer, process: ProcessId) -> Peer:
        """Where a member is, with the node it has to prove; in clear nobody proves anything."""
        is_proved = self._members.security.is_encrypted
        return structs.replace(peer, node=process.node if is_proved else NOBODY)

    def _connect(self, deadline: float, look: Callable[[], None]) -> None:
        # Diallers give up a moment before, so that the error has their reasons.
        soon = deadline - min(LAST_WORDS, max(0.0, deadline - time.monotonic()) / 4)

        def dial(rank: int, check: Callable[[], None]) -> OpenLane:
            return self._dial(rank, MESSAGES, soon, check)

        gathering = Gathering(self.rank, self._peers, self._switchboard, dial)
        lanes = gathering.gather(deadline, look, self._interrupt)
        try:
            for rank, lane in lanes.items():
                self._welcome(rank, lane, self._peers[rank])
        except BaseException as error:
            for lane in lanes.values():
                lane.sock.close()
            if isinstance(error, OSError):  # some systems set no options on what has been reset
                raise from_os_error("A member left while we connected", error) from error
            raise

    # -- lanes ---------------------------------------------------------------------------------

    def _dial(self, rank: int, purpose: str, deadline: float, look: Callable[[], None]) -> OpenLane:
        hello = Lane(
            session=self.view.session,
            rank=self.rank,
            to=rank,
            purpose=purpose,
            introduction=self._port.introduction(),
        )
        route = Route(self._members, self._peers[rank], deadline, look, self._leash.hold)
        return open_lane(hello, route)

    def _judge(self, sock: OpeningSocket, lane: Lane) -> Refused | None:
        """Whether a member may open a lane: those above us dial, each as who it is."""
        higher = range(self.rank + 1, self.world_size)
        refused = judge_lane(lane, self.view.session, self.rank, higher)
        if refused is not None:
            return refused
        rank, start = lane.rank, self.view.members[lane.rank].incarnation
        if lane.purpose == MESSAGES and rank in self._links:
            return Refused(f"rank {rank} is connected already")
        return judge_node(rank, self._peers[rank].node, proved_node(sock)) or judge_start(
            rank, start, lane.introduction.incarnation
        )

    def _answer(self, sock: OpeningSocket, lane: Lane) -> OpenLane:
        self._leash.hold(sock)
        return answer_lane(sock, lane, self._members, time.monotonic() + ANSWER_WITHIN)

    def peer_name(self, rank: int) -> str:
        """The machine a member runs on, and its address."""
        return super().peer_name(rank) if rank in self._links else self._names[rank]

    # -- endings -------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        self._port.withdraw(self.view.session)
        super()._interrupt()

    def close(self) -> None:
        """Take leave of the other members, or clear away what was aborted.  May be called twice."""
        if self._closed is None:
            self._port.withdraw(self.view.session)
            super().close()
            self._clear_switchboard()
        else:
            self._prepare_to_close()  # what stands on an aborted one ends as well

    def become_forked(self) -> None:
        """In a forked child: what stands on this backend is not the child's to end."""
        super().become_forked()
        self.__dict__.pop("_closing_actions", None)


def _given_up(rank: int) -> ChannelClosed:
    return ChannelClosed(f"Rank {rank} gave up while it was connecting")
