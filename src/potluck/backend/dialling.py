"""Building the mesh: each rank dials those below it and is dialled by those above."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from potluck.backend.lanes import OpenLane, answer_lane, dial_lane
from potluck.core.handshake import Refused, judge_lane, judge_node, list_ranks
from potluck.errors import MalformedFrame, NoConnection, Timeout
from potluck.messages import Join, Lane, Peer, Table, unpack
from potluck.net import tcp
from potluck.net.acceptor import Acceptor
from potluck.net.addresses import Address
from potluck.net.opening import refuse
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.security import NOBODY, Security
from potluck.vocabulary import NodeId

__all__ = ["Door", "Links", "Meeting", "Welcome", "missing_error"]

Hello: TypeAlias = tuple[OpeningSocket, Join | Lane]

Welcome: TypeAlias = Callable[[int, OpenLane, Peer], None]
"""(rank, its connection, where it is)"""

ANSWER_TIME = 5.0
"""Seconds for the last steps of opening a lane with a member."""

PAUSE = 0.02
"""Seconds between two rounds through a peer's addresses."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a rank brings to the rendezvous."""

    rank: int
    world_size: int
    masters: Sequence[Address]
    timeout: float
    deadline: float
    security: Security


class Door:
    """Our own listener, with the hellos that have come so far."""

    def __init__(self, listener: socket.socket, security: Security) -> None:
        self._hellos: queue.SimpleQueue[Hello] = queue.SimpleQueue()
        self.acceptor = Acceptor(listener, self._receive, security)

    def _receive(self, sock: OpeningSocket, payload: bytes) -> None:
        self._hellos.put((sock, unpack(payload, Join | Lane)))  # type: ignore[arg-type]

    def next_hello(self, deadline: float) -> Hello | None:
        """The next complete hello, or None at the deadline."""
        with contextlib.suppress(queue.Empty):
            return self._hellos.get(timeout=max(0.0, deadline - time.monotonic()))
        return None

    def turn_away(self, sentence: str) -> None:
        """From now on refuse everybody, those included who are waiting."""
        self.acceptor.receive = lambda sock, _: refuse(sock, sentence, for_now=True)
        with contextlib.suppress(queue.Empty):
            while True:
                refuse(self._hellos.get_nowait()[0], sentence, for_now=True)

    def close(self) -> None:
        """Stop listening."""
        self.turn_away("this rank has given up")
        self.acceptor.close()


class Links:
    """Connects one rank with all others."""

    def __init__(
        self,
        meeting: Meeting,
        table: Table,
        door: Door,
        welcome: Welcome,
    ) -> None:
        self._meeting = meeting
        self._table = table
        self._door = door
        self._welcome = welcome

    def dial_lower(self) -> None:
        """Dial every rank below; they have been listening since before the table was sent."""
        for rank in range(self._meeting.rank):
            self._welcome(rank, self._dial(rank), self._table.peers[rank])

    def _dial(self, rank: int) -> OpenLane:
        peer = self._table.peers[rank]
        hosts = peer.hosts or dict.fromkeys(master.host for master in self._meeting.masters)
        addresses = [Address(host, peer.port) for host in hosts]
        hello = Lane(session=self._table.session, rank=self._meeting.rank, to=rank)
        failure: Exception | None = None
        while time.monotonic() < self._meeting.deadline:
            for address in addresses:
                try:
                    return self._dial_once(address, hello, NodeId(peer.node))
                except (OSError, MalformedFrame) as error:
                    failure = error
            time.sleep(PAUSE)
        where = ", ".join(map(str, addresses))
        raise NoConnection(
            f"Rank {self._meeting.rank} could not connect to rank {rank} on {peer.name} ({where})",
            rank=rank,
            host=peer.name,
            cause=str(failure) if failure else "no time was left",
            hint="Check that the two machines reach each other and that no firewall is between.",
        )

    def _dial_once(self, address: Address, hello: Lane, node: NodeId) -> OpenLane:
        deadline, security = self._meeting.deadline, self._meeting.security
        sock = tcp.connect(address, deadline)
        try:
            soon = min(deadline, time.monotonic() + ANSWER_TIME)
            secured = security.dial(sock, str(address), soon, expected=node)
            return dial_lane(secured, hello, security, deadline)
        except BaseException:
            sock.close()
            raise

    def await_higher(self) -> None:
        """Wait until every rank above has dialled us."""
        expected = set(range(self._meeting.rank + 1, self._meeting.world_size))
        while expected:
            hello = self._door.next_hello(self._meeting.deadline)
            if hello is None:
                raise missing_error(self._meeting, sorted(expected), "did not connect")
            sock, lane = hello
            refused = self._judge(sock, lane, expected)
            if refused is not None:
                refuse(sock, refused.sentence)
                continue
            assert isinstance(lane, Lane)
            try:
                opened = answer_lane(
                    sock, lane, self._meeting.security, time.monotonic() + ANSWER_TIME
                )
            except (OSError, MalformedFrame):
                sock.close()  # it gave up this instant, and may dial again
                continue
            expected.discard(lane.rank)
            self._welcome(lane.rank, opened, self._table.peers[lane.rank])

    def _judge(self, sock: OpeningSocket, lane: Join | Lane, expected: set[int]) -> Refused | None:
        if not isinstance(lane, Lane):
            return Refused("this group is complete")
        proved = sock.peer if isinstance(sock, SecureSocket) else NOBODY
        return judge_lane(lane, self._table.session, self._meeting.rank, expected) or judge_node(
            lane.rank, self._table.peers[lane.rank].node, proved
        )


def missing_error(meeting: Meeting, missing: Sequence[int], what: str) -> Timeout:
    """The error for ranks that did not come."""
    return Timeout(
        f"Rank {meeting.rank} waited {meeting.timeout:g} s for {list_ranks(missing)}, which {what}",
        seconds=meeting.timeout,
        missing=missing,
        rank=missing[0],
        hint="Check that they were started with the same master address and world size.",
    )
