"""LaneBackend: a mesh over TCP whose members open further lanes when they first need them.

Of two ranks the higher dials and the lower answers, for messages and for every other purpose.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from abc import abstractmethod
from typing import TYPE_CHECKING, cast

from potluck._types import NodeId
from potluck.backend.base import PeerStream, Switchboard
from potluck.backend.mesh import MeshBackend
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.tcp import make_poller

if TYPE_CHECKING:
    from collections.abc import Callable

    from potluck.backend.lanes import OpenLane
    from potluck.net.transport import Poller
    from potluck.wire_messages import Peer


# --------------------------------------------------------------------------------------------------
# A leash on connections: another thread can cut them, and whoever waits for them wakes up.


class Leash:
    """Holds the connections of one group: those that are being opened, and those in use.

    To cut one is to shut it down.  It is closed by its owner, so no number of a descriptor is ever
    used again while somebody still waits for it.
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


class LaneBackend(MeshBackend):
    """What the backends over TCP have in common."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, make_poller())
        self._names: dict[int, str] = {}
        self._nodes: dict[int, str] = {}
        self._switchboard = Switchboard()
        self._leash = Leash()

    @abstractmethod
    def _dial(self, rank: int, purpose: str, deadline: float, look: Callable[[], None]) -> OpenLane:
        """Open a lane to a lower rank."""

    def _welcome(self, rank: int, lane: OpenLane, peer: Peer) -> None:
        """A rank is connected."""
        self._names[rank], self._nodes[rank] = peer.name, peer.node
        self._leash.let_go(lane.sock)  # the pump ends its links itself, after a last word
        self.add_link(rank, lane.stream(), lane.seal, lane.first)

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
            lane = cast("OpenLane", self._switchboard.take(rank, purpose, deadline, look_both))
        self._leash.hold(lane.sock)
        stream = lane.stream()
        stream.keep_in_cache()
        return PeerStream(stream, lane.seal, lane.first)

    def abandon_streams(self, is_over: Callable[[str], bool]) -> None:
        """Close lanes that nobody here will ask for again: only so many may wait."""
        for lane in self._switchboard.abandon(is_over):
            cast("OpenLane", lane).sock.close()

    def make_poller(self) -> Poller:
        """The fastest poller of this platform."""
        return make_poller()

    def _park(self, rank: int, purpose: str, lane: OpenLane) -> None:
        """A member has opened a lane: keep it until we need it."""
        unwanted = self._switchboard.put(rank, purpose, lane)
        if unwanted is not None:
            cast("OpenLane", unwanted).sock.close()

    def peer_name(self, rank: int) -> str:
        """The machine a rank runs on, and its address."""
        return f"{self._names[rank]} at {super().peer_name(rank)}"

    def node_of(self, rank: int) -> NodeId | None:
        """The machine a rank has proved to be on; in clear nobody proves anything."""
        node = self._nodes.get(rank)
        return NodeId(node) if node else None

    def _interrupt(self) -> None:
        self._leash.cut()
        self._clear_switchboard()

    def _clear_switchboard(self) -> None:
        for lane in self._switchboard.drain():
            cast("OpenLane", lane).sock.close()
