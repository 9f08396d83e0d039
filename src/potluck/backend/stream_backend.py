"""StreamBackend: a mesh over TCP whose members open further connections when they need them.

Groups of fixed ranks (:mod:`potluck.backend.tcp`) and the views of a cluster (:class:`ViewBackend`)
learn in different ways who and where their ranks are.  From there on they are connected by the same
code.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import weakref
from abc import abstractmethod
from typing import TYPE_CHECKING, cast

from msgspec import structs

from potluck._types import NodeId
from potluck.backend.base import IncomingStreams, PeerStream
from potluck.backend.lanes import (
    MESSAGES,
    ConnectionAcceptor,
    DialTarget,
    OpenConnection,
    answer_lane,
    open_lane,
)
from potluck.backend.mesh import MeshBackend
from potluck.backend.port import NodePort, proved_node
from potluck.errors import (
    BackendUnavailable,
    ChannelClosed,
    DistributedError,
    NoConnection,
    from_os_error,
)
from potluck.logs import get_logger
from potluck.net.secure_socket import NOBODY, OpeningSocket, SecureSocket
from potluck.net.tcp import make_poller
from potluck.trust.admission import (
    AdmissionRefused,
    judge_lane,
    judge_node,
    judge_start,
    list_ranks,
)
from potluck.trust.connect import Declined
from potluck.wire_messages import OpenRequest, RankEndpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from potluck._types import ProcessId, View
    from potluck.net.transport import Poller


# --------------------------------------------------------------------------------------------------
# A leash on connections: another thread can cut them, and whoever waits for them wakes up.


class AbortableSockets:
    """Holds the connections of one group: those that are being opened, and those in use.

    Cutting a connection shuts it down.  Its owner closes it, so the number of its descriptor is
    never reused while a thread still waits for it.
    """

    def __init__(self) -> None:
        self._held: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._is_cut = False
        self._lock = threading.Lock()

    def hold(self, sock: OpeningSocket) -> None:
        """One more; it is of no use if all have been cut already."""
        bare = _bare(sock)
        with self._lock:
            self._held.add(bare)
            is_cut = self._is_cut
        if is_cut:
            _shut_down(bare)

    def let_go(self, sock: OpeningSocket) -> None:
        """One less: it has another way to end."""
        with self._lock:
            self._held.discard(_bare(sock))

    def cut(self) -> None:
        """End them all, and those that are yet to come."""
        with self._lock:
            self._is_cut = True
            held = list(self._held)
        for sock in held:
            _shut_down(sock)


def _bare(sock: OpeningSocket) -> socket.socket:
    return sock.hand_over()[0] if isinstance(sock, SecureSocket) else sock


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed by its owner, or by the other side
        sock.shutdown(socket.SHUT_RDWR)


# --------------------------------------------------------------------------------------------------
# The ranks of a group connect: all at once, so that no rank waits for the handshakes of others.

logger = get_logger(__name__)

AT_ONCE = 8
"""Members that are dialled at the same time, each by a thread that ends when all are there.

More would only compete for the processor: a handshake computes more than it waits.
"""

PARTING = 1.0
"""Seconds for those threads to notice that they are not wanted any more."""


class MeshIncomplete(Exception):
    """The deadline has passed; the argument is the ranks that are missing."""


class MeshConnections:
    """Dials those below and awaits those above; the lanes of both meet on the switchboard."""

    def __init__(
        self,
        rank: int,
        peers: Sequence[RankEndpoint],
        switchboard: IncomingStreams,
        dial: Callable[[int, Callable[[], None]], OpenConnection],
    ) -> None:
        """``dial`` gets a rank and what to ask while it tries; it gives up before our deadline."""
        self._rank = rank
        self._peers = peers
        self._switchboard = switchboard
        self._dial = dial
        self._lower: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.failures: dict[int, DistributedError] = {}
        """Why the ranks below were not reached, of those that were not."""
        self._is_over = False

    def gather(
        self,
        deadline: float,
        look: Callable[[], None],
        interrupt: Callable[[], None],
        is_fit: Callable[[object], bool],
    ) -> dict[int, OpenConnection]:
        """The connections to all other members.

        If that fails, ``interrupt`` wakes the threads that are still opening one.
        """
        others = [rank for rank in range(len(self._peers)) if rank != self._rank]
        threads = self._start_dialling()
        try:
            looking = self._looking(deadline, look)
            lanes = self._switchboard.take_all(others, MESSAGES, looking, is_fit)
        except BaseException as error:
            self._is_over = True
            missing = self._switchboard.absent(others, MESSAGES)
            interrupt()
            _join(threads)
            if isinstance(error, MeshIncomplete):
                raise MeshIncomplete(missing or others) from None
            raise
        _join(threads)
        return cast("dict[int, OpenConnection]", lanes)

    def _looking(self, deadline: float, look: Callable[[], None]) -> Callable[[], None]:
        def look_around() -> None:
            look()
            for error in list(self.failures.values()):
                if isinstance(error, Declined):  # time does not change it
                    raise error
            if time.monotonic() >= deadline:
                raise MeshIncomplete

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
                        "This machine cannot start a thread to connect with", cause=str(error)
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
                    self.failures[rank] = error
                except OSError as error:
                    self.failures[rank] = from_os_error(f"Could not reach rank {rank}", error)
                except Exception as error:  # a fault of ours must not look like theirs
                    logger.exception("could not dial rank %d", rank)
                    self.failures[rank] = NoConnection(
                        f"Could not reach rank {rank}", rank=rank, cause=repr(error)
                    )
                else:
                    unwanted = self._switchboard.put(rank, MESSAGES, lane)
                    if unwanted is not None:
                        cast("OpenConnection", unwanted).close()

    def _check(self) -> None:
        if self._is_over:
            raise ChannelClosed("This connection is no longer wanted: connecting has ended")


def _is_open(lane: object) -> bool:
    """Whether the other end has not closed a lane meanwhile; one that it has is closed here too."""
    lane = cast("OpenConnection", lane)
    if lane.first:
        return True  # it was in use: these bytes say how it ended
    sock = lane.sock
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


def _join(threads: Sequence[threading.Thread]) -> None:
    end = time.monotonic() + PARTING
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


# --------------------------------------------------------------------------------------------------

ANSWER_WITHIN = 5.0
"""Seconds for the last steps of opening a lane with a member."""

LAST_WORDS = 0.3
"""Seconds before the deadline at which diallers give up and say why."""


class StreamBackend(MeshBackend):
    """A mesh over TCP: the ranks of one session, each on a port that serves it.

    ``peers`` says in rank order where they are; each has to prove the node that is named there,
    unless that is empty.  Of two ranks the higher dials and the lower answers, for messages and for
    every other purpose.
    """

    def __init__(
        self, port: NodePort, session: bytes, rank: int, peers: Sequence[RankEndpoint]
    ) -> None:
        super().__init__(rank, len(peers), make_poller())
        self._port, self._session, self._peers = port, session, peers
        self._members = port.members
        self._switchboard = IncomingStreams()
        self._leash = AbortableSockets()
        self._doorman = ConnectionAcceptor(
            self._judge, self._answer, self._park, self._switchboard.count
        )

    # -- forming -------------------------------------------------------------------------------

    def _form(self, deadline: float, look: Callable[[], None], *, is_fixed: bool = False) -> None:
        """Connect with all others, at the latest at ``deadline``.

        Where ranks are fixed the port serves no other session, and one that has connected and ended
        since counts: it does not come again.  A member of a view may.
        """
        try:
            self._port.serve(self._session, self._doorman.offer, alone=is_fixed)
            self._connect(deadline, look, (lambda _: True) if is_fixed else _is_open)
        except BaseException as error:
            gave_up = ChannelClosed(f"Rank {self.rank} gave up while connecting")
            self.abort(error if isinstance(error, DistributedError) else gave_up)
            raise

    def _connect(
        self, deadline: float, look: Callable[[], None], is_fit: Callable[[object], bool]
    ) -> None:
        # Diallers give up a moment before, so that the error has their reasons.
        soon = deadline - min(LAST_WORDS, max(0.0, deadline - time.monotonic()) / 4)

        def dial(rank: int, check: Callable[[], None]) -> OpenConnection:
            return self._dial(rank, MESSAGES, soon, check)

        gathering = MeshConnections(self.rank, self._peers, self._switchboard, dial)
        try:
            lanes = gathering.gather(deadline, look, self._interrupt, is_fit)
        except MeshIncomplete as error:
            raise self._incomplete(error.args[0], gathering.failures) from None
        try:
            for rank, lane in lanes.items():
                self._welcome(rank, lane)
        except BaseException as error:
            for lane in lanes.values():
                lane.close()
            if isinstance(error, OSError):  # some systems set no options on what has been reset
                raise from_os_error(
                    "A member left while this rank was connecting", error
                ) from error
            raise

    @abstractmethod
    def _incomplete(
        self, missing: Sequence[int], failures: Mapping[int, DistributedError]
    ) -> DistributedError:
        """The error for ranks that are missing at the deadline, with what is known of them."""

    def _welcome(self, rank: int, lane: OpenConnection) -> None:
        """A rank is connected."""
        self._leash.let_go(lane.sock)  # the pump ends its links itself, after a last word
        self.add_link(rank, lane.stream(), lane.seal, lane.first)

    # -- lanes ---------------------------------------------------------------------------------

    def _dial(
        self, rank: int, purpose: str, deadline: float, look: Callable[[], None]
    ) -> OpenConnection:
        """Open a lane to a lower rank."""
        hello = OpenRequest(
            session=self._session,
            rank=self.rank,
            to=rank,
            purpose=purpose,
            introduction=self._port.introduction(),
        )
        route = DialTarget(self._members, self._peers[rank], deadline, look, self._leash.hold)
        return open_lane(hello, route)

    def _judge(self, sock: OpeningSocket, lane: OpenRequest) -> AdmissionRefused | None:
        """Whether a rank may open a lane: those above us dial, each as who it is."""
        higher = range(self.rank + 1, self.world_size)
        refused = judge_lane(lane, self._session, self.rank, higher)
        if refused is not None:
            return refused
        if lane.purpose == MESSAGES and lane.rank in self._links:
            return AdmissionRefused(f"rank {lane.rank} is already connected")
        return judge_node(lane.rank, self._peers[lane.rank].node, proved_node(sock))

    def _answer(self, sock: OpeningSocket, lane: OpenRequest) -> OpenConnection:
        self._leash.hold(sock)
        return answer_lane(sock, lane, self._members, time.monotonic() + ANSWER_WITHIN)

    def open_stream(
        self, rank: int, purpose: str, deadline: float, look: Callable[[], None]
    ) -> PeerStream:
        """A connection of its own: the higher of the two ranks dials."""

        def look_both() -> None:
            self._check_open()
            look()

        self._check_open()
        if rank < self.rank:
            lane = self._dial(rank, purpose, deadline, look_both)
        else:
            lane = cast(
                "OpenConnection", self._switchboard.take(rank, purpose, deadline, look_both)
            )
        self._leash.hold(lane.sock)
        stream = lane.stream()
        stream.keep_in_cache()
        return PeerStream(stream, lane.seal, lane.first)

    def abandon_streams(self, is_over: Callable[[str], bool]) -> None:
        """Close connections that are not needed here any more: only a few may wait."""
        for lane in self._switchboard.abandon(is_over):
            cast("OpenConnection", lane).close()

    def make_poller(self) -> Poller:
        """The fastest poller of this platform."""
        return make_poller()

    def _park(self, rank: int, purpose: str, lane: OpenConnection) -> None:
        """A member has opened a lane: keep it until we need it."""
        unwanted = self._switchboard.put(rank, purpose, lane)
        if unwanted is not None:
            cast("OpenConnection", unwanted).close()

    def peer_name(self, rank: int) -> str:
        """The machine a rank runs on, and its address once it is connected."""
        name = self._peers[rank].name
        return f"{name} at {super().peer_name(rank)}" if rank in self._links else name

    def node_of(self, rank: int) -> NodeId | None:
        """The machine a rank has proved to be on; None on an unencrypted connection."""
        node = self._peers[rank].node
        return NodeId(node) if node else None

    def _interrupt(self) -> None:
        self._port.withdraw(self._session)
        self._leash.cut()
        self._clear_switchboard()

    def _clear_switchboard(self) -> None:
        for lane in self._switchboard.drain():
            cast("OpenConnection", lane).close()


# --------------------------------------------------------------------------------------------------
# The ranks of one view, each connected to each, on the ports they already have.
#
# A view is agreed on elsewhere; here it becomes a mesh.  Its connections name the view's session,
# so those of another view, or of another start of a process, do not fit.  When the view is over the
# mesh is aborted: whatever runs on it ends at once, and the next view has a mesh of its own.


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
