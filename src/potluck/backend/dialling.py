"""Building the mesh: each rank dials those below it and is dialled by those above."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from potluck.backend.introduction import Call, Declined, Reception, dial
from potluck.backend.lanes import OpenLane, answer_lane, dial_lane
from potluck.backend.membership import Membership
from potluck.core.handshake import Refused, judge_lane, judge_node, list_ranks
from potluck.errors import MalformedFrame, NoConnection, Timeout
from potluck.messages import Join, Lane, Peer, Table, unpack
from potluck.net.acceptor import Acceptor
from potluck.net.addresses import Address
from potluck.net.opening import refuse
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.security import NOBODY
from potluck.vocabulary import NodeId

__all__ = ["Door", "Links", "Meeting", "Welcome", "missing_error"]

Hello: TypeAlias = tuple[OpeningSocket, Join | Lane]

Welcome: TypeAlias = Callable[[int, OpenLane, Peer], None]
"""(rank, its connection, where it is)"""

MESSAGES = "messages"
"""The purpose of the first lane between two ranks."""

COMPLETE = "this group is complete"

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
    members: Membership
    port: int = 0
    """Where ranks other than 0 listen; 0 is any that is free."""


class Door:
    """Our own listener, with the hellos that have come so far."""

    def __init__(self, listener: socket.socket, members: Membership) -> None:
        self._hellos: queue.SimpleQueue[Hello] = queue.SimpleQueue()
        self.acceptor = Acceptor(
            listener,
            self._receive,
            members.security,
            lambda channel, where: Reception(members, channel, where),
        )

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
            self._welcome(rank, self.open(rank), self._table.peers[rank])

    def open(
        self,
        rank: int,
        purpose: str = MESSAGES,
        deadline: float | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> OpenLane:
        """Open a lane for one purpose to a rank; the one way to do so, for every purpose.

        The node that joined as that rank must answer, and both sides must agree on who belongs.
        ``look`` is called between two attempts, and raises when trying makes no sense any more.
        """
        deadline = self._meeting.deadline if deadline is None else deadline
        peer = self._table.peers[rank]
        hosts = peer.hosts or dict.fromkeys(master.host for master in self._meeting.masters)
        addresses = [Address(host, peer.port) for host in hosts]
        hello = Lane(session=self._table.session, rank=self._meeting.rank, to=rank, purpose=purpose)
        failure: Exception | None = None
        while time.monotonic() < deadline:
            for address in addresses:
                try:
                    return self._dial_once(address, hello, NodeId(peer.node), deadline)
                except Declined:
                    raise
                except (OSError, MalformedFrame) as error:
                    failure = error
            look()
            time.sleep(PAUSE)
        where = ", ".join(map(str, addresses))
        raise NoConnection(
            f"Rank {self._meeting.rank} could not connect to rank {rank} on {peer.name} ({where})",
            rank=rank,
            host=peer.name,
            cause=str(failure) if failure else "no time was left",
            hint="Check that the two machines reach each other and that no firewall is between.",
        )

    def _dial_once(self, address: Address, hello: Lane, node: NodeId, deadline: float) -> OpenLane:
        members = self._meeting.members
        sock = dial(members, Call(address, deadline, ANSWER_TIME, node))
        try:
            return dial_lane(sock, hello, members, deadline)
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
                opened = self.answer(sock, lane)
            except (OSError, MalformedFrame):
                sock.close()  # it gave up this instant, and may dial again
                continue
            expected.discard(lane.rank)
            self._welcome(lane.rank, opened, self._table.peers[lane.rank])

    def answer(self, sock: OpeningSocket, lane: Lane) -> OpenLane:
        """Grant a lane to somebody who may have it."""
        return answer_lane(sock, lane, self._meeting.members, time.monotonic() + ANSWER_TIME)

    def extend(self, deliver: Callable[[int, str, OpenLane], None]) -> Acceptor:
        """The group is complete: from now on its members may open further lanes."""
        self._door.turn_away(COMPLETE)
        self._door.acceptor.receive = Extension(self, deliver).receive
        return self._door.acceptor

    def judge_extension(self, sock: OpeningSocket, lane: Lane) -> Refused | None:
        """Whether a member may open a further lane: those above us dial, as for messages."""
        higher = set(range(self._meeting.rank + 1, self._meeting.world_size))
        return self._judge(sock, lane, higher)

    def _judge(self, sock: OpeningSocket, lane: Join | Lane, expected: set[int]) -> Refused | None:
        if not isinstance(lane, Lane):
            return Refused(COMPLETE)
        proved = sock.peer if isinstance(sock, SecureSocket) else NOBODY
        return judge_lane(lane, self._table.session, self._meeting.rank, expected) or judge_node(
            lane.rank, self._table.peers[lane.rank].node, proved
        )


class Extension:
    """The door of a complete group: its members may open further lanes, and nobody else anything.

    Each lane is answered on a thread of its own, for a moment, so that nobody holds up others.
    """

    def __init__(self, links: Links, deliver: Callable[[int, str, OpenLane], None]) -> None:
        self._links = links
        self._deliver = deliver

    def receive(self, sock: OpeningSocket, payload: bytes) -> None:
        """Take a hello."""
        lane = unpack(payload, Join | Lane)  # type: ignore[arg-type]
        if not isinstance(lane, Lane) or lane.purpose == MESSAGES:
            refuse(sock, COMPLETE, for_now=True)
            return
        refused = self._links.judge_extension(sock, lane)
        if refused is not None:
            refuse(sock, refused.sentence)
            return
        threading.Thread(
            target=self._answer, args=(sock, lane), name="potluck-lane", daemon=True
        ).start()

    def _answer(self, sock: OpeningSocket, lane: Lane) -> None:
        try:
            opened = self._links.answer(sock, lane)
        except (OSError, MalformedFrame):
            sock.close()  # it gave up this instant, and may dial again
        else:
            self._deliver(lane.rank, lane.purpose, opened)


def missing_error(meeting: Meeting, missing: Sequence[int], what: str) -> Timeout:
    """The error for ranks that did not come."""
    return Timeout(
        f"Rank {meeting.rank} waited {meeting.timeout:g} s for {list_ranks(missing)}, which {what}",
        seconds=meeting.timeout,
        missing=missing,
        rank=missing[0],
        cause=meeting.members.last_refusal,
        hint="Check that they were started with the same master address and world size.",
    )
