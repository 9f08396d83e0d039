"""ViewBackend: the ranks of one view, each connected to each, on the ports they already have.

A view is agreed on elsewhere; here it becomes a mesh.  Its connections name the view's session, so
those of another view, or of another start of a process, do not fit.  When the view is over the mesh
is aborted: whatever runs on it ends at once, and the next view has a mesh of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from potluck.backend.stream_backend import StreamBackend
from potluck.errors import BackendUnavailable, DistributedError, NoConnection
from potluck.net.secure_socket import NOBODY
from potluck.trust.admission import AdmissionRefused, judge_start, list_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from potluck._types import ProcessId, View
    from potluck.backend.port import NodePort
    from potluck.net.secure_socket import OpeningSocket
    from potluck.wire_messages import OpenRequest, RankEndpoint


class ViewBackend(StreamBackend):
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
        peers: Sequence[RankEndpoint],
        *,
        deadline: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        rank = view.rank_of(me)
        if rank is None or len(peers) != len(view.members):
            raise BackendUnavailable(
                f"View {view.epoch} of {len(view.members)} cannot be opened by {me}",
                cause=f"{len(peers)} peers were named"
                if rank is not None
                else "it is not a member",
            )
        self._view = view
        is_proved = port.members.security.is_encrypted  # in clear no rank proves anything
        members = [
            structs.replace(peer, node=process.node if is_proved else NOBODY)
            for peer, process in zip(peers, view.members, strict=True)
        ]
        super().__init__(port, view.session, rank, members)
        self._form(deadline, look)

    @property
    def view(self) -> View:
        """The view that this backend connects."""
        return self._view

    def _judge(self, sock: OpeningSocket, lane: OpenRequest) -> AdmissionRefused | None:
        """Whether a member may open a connection: it must be the very process of the view."""
        return super()._judge(sock, lane) or judge_start(
            lane.rank, self.view.members[lane.rank].incarnation, lane.introduction.incarnation
        )

    def _incomplete(
        self, missing: Sequence[int], failures: Mapping[int, DistributedError]
    ) -> DistributedError:
        known = [failures.get(rank) for rank in missing]
        if len(known) == 1 and isinstance(known[0], NoConnection):
            return known[0]
        reasons = (
            f"rank {rank} on {self._peers[rank].name} {_reason(error)}"
            for rank, error in zip(missing, known, strict=True)
        )
        return NoConnection(
            f"Rank {self.rank} could not connect to {list_ranks(missing)} of this view",
            rank=missing[0],
            host=self._peers[missing[0]].name,
            cause="; ".join(reasons),
            hint="Check that these machines can reach each other and no firewall blocks them.",
        )

    # -- endings -------------------------------------------------------------------------------

    def close(self) -> None:
        """Take leave of the other members, or clear away what was aborted.  May be called twice."""
        if self._closed is None:
            self._port.withdraw(self._session)
            super().close()
            self._clear_switchboard()
        else:
            self._prepare_to_close()  # what stands on an aborted one ends as well

    def become_forked(self) -> None:
        """In a forked child: what stands on this backend is not the child's to end."""
        super().become_forked()
        self.__dict__.pop("_closing_actions", None)


def _reason(error: DistributedError | None) -> str:
    return f"could not be reached ({error.cause or error.message})" if error else "did not connect"
