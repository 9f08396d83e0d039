"""ViewBackend: the ranks of one view, each connected to each, on the ports they already have.

A view is agreed on elsewhere; here it becomes a mesh.  Its lanes name the view's session, so those
of another view, or of another start of a process, do not fit.  When the view is over the mesh is
aborted: whatever runs on it ends at once, and the next view has a mesh of its own.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, cast

from msgspec import structs

from potluck.backend.lanes import MESSAGES, Extension, OpenLane, Route, answer_lane, open_lane
from potluck.backend.port import proved_node
from potluck.backend.stream_backend import LaneBackend
from potluck.errors import (
    BackendUnavailable,
    ChannelClosed,
    DistributedError,
    NoConnection,
    from_os_error,
)
from potluck.logs import get_logger
from potluck.net.secure_socket import NOBODY
from potluck.trust.admission import Refused, judge_lane, judge_node, judge_start, list_ranks
from potluck.trust.connect import Declined
from potluck.wire_messages import Lane, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from potluck._types import ProcessId, View
    from potluck.backend.base import Switchboard
    from potluck.backend.port import NodePort
    from potluck.net.secure_socket import OpeningSocket


# --------------------------------------------------------------------------------------------------
# The members of a view connect: all at once, so that nobody waits for others' handshakes.

logger = get_logger(__name__)

AT_ONCE = 8
"""Members that are dialled at the same time, each by a thread that ends when all are there.

More would only compete for the processor: a handshake computes more than it waits.
"""

PARTING = 1.0
"""Seconds for those threads to notice that they are not wanted any more."""


class _Late(Exception):
    """The deadline has passed."""


class Gathering:
    """Dials those below and awaits those above; the lanes of both meet on the switchboard."""

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        switchboard: Switchboard,
        dial: Callable[[int, Callable[[], None]], OpenLane],
    ) -> None:
        """``dial`` gets a rank and what to ask while it tries; it gives up before our deadline."""
        self._rank = rank
        self._peers = peers
        self._switchboard = switchboard
        self._dial = dial
        self._lower: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._failures: dict[int, DistributedError] = {}
        self._is_over = False

    def gather(
        self, deadline: float, look: Callable[[], None], interrupt: Callable[[], None]
    ) -> dict[int, OpenLane]:
        """The lanes of all other members.

        ``interrupt`` wakes whoever is in the middle of opening one, if it comes to no good end.
        """
        others = [rank for rank in range(len(self._peers)) if rank != self._rank]
        threads = self._start_dialling()
        try:
            looking = self._looking(deadline, look)
            lanes = self._switchboard.take_all(others, MESSAGES, looking, _is_open)
        except BaseException as error:
            self._is_over = True
            missing = self._switchboard.absent(others, MESSAGES)
            interrupt()
            _join(threads)
            if isinstance(error, _Late):
                raise self._incomplete(missing or others) from None
            raise
        _join(threads)
        return cast("dict[int, OpenLane]", lanes)

    def _looking(self, deadline: float, look: Callable[[], None]) -> Callable[[], None]:
        def look_around() -> None:
            look()
            for error in list(self._failures.values()):
                if isinstance(error, Declined):  # time does not change it
                    raise error
            if time.monotonic() >= deadline:
                raise _Late

        return look_around

    # -- those below -----------------------------------------------------------------------------

    def _start_dialling(self) -> list[threading.Thread]:
        for rank in range(self._rank):
            self._lower.put(rank)
        threads: list[threading.Thread] = []
        for _ in range(min(self._rank, AT_ONCE)):
            thread = threading.Thread(target=self._work, name="potluck-view", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more threads
                if not threads:
                    raise BackendUnavailable(
                        "This machine has no thread left to connect with", cause=str(error)
                    ) from error
                break  # then a few dial everybody
            threads.append(thread)
        return threads

    def _work(self) -> None:
        """Dial one after the other of those whom no other thread has taken on."""
        with contextlib.suppress(queue.Empty):
            while not self._is_over:
                rank = self._lower.get_nowait()
                try:
                    lane = self._dial(rank, self._check)
                except DistributedError as error:
                    self._failures[rank] = error
                except OSError as error:
                    self._failures[rank] = from_os_error(f"Rank {rank} was not reached", error)
                except Exception as error:  # a fault of ours must not look like theirs
                    logger.exception("could not dial rank %d", rank)
                    self._failures[rank] = NoConnection(
                        f"Rank {rank} was not reached", rank=rank, cause=repr(error)
                    )
                else:
                    unwanted = self._switchboard.put(rank, MESSAGES, lane)
                    if unwanted is not None:
                        cast("OpenLane", unwanted).sock.close()

    def _check(self) -> None:
        if self._is_over:
            raise ChannelClosed("Nobody waits for this connection any more")

    # -- who is missing --------------------------------------------------------------------------

    def _incomplete(self, missing: Sequence[int]) -> NoConnection:
        known = [self._failures.get(rank) for rank in missing]
        if len(known) == 1 and isinstance(known[0], NoConnection):
            return known[0]
        reasons = (
            f"rank {rank} on {self._peers[rank].name} {_reason(error)}"
            for rank, error in zip(missing, known, strict=True)
        )
        return NoConnection(
            f"Rank {self._rank} could not connect with {list_ranks(missing)} of this view",
            rank=missing[0],
            host=self._peers[missing[0]].name,
            cause="; ".join(reasons),
            hint="Check that these machines reach each other and that no firewall is between.",
        )


def _is_open(lane: object) -> bool:
    """Whether the other end has not closed a lane meanwhile; one that it has is closed here too."""
    sock = cast("OpenLane", lane).sock
    try:
        limit = sock.gettimeout()
        sock.setblocking(False)
        try:
            is_over = sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            is_over = False
        sock.settimeout(limit)
    except OSError:  # it was reset
        is_over = True
    if is_over:
        sock.close()
    return not is_over


def _reason(error: DistributedError | None) -> str:
    return f"was not reached ({error.cause or error.message})" if error else "did not connect"


def _join(threads: Sequence[threading.Thread]) -> None:
    end = time.monotonic() + PARTING
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


# --------------------------------------------------------------------------------------------------

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
