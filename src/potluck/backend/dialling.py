"""Building the mesh: each rank dials those below it and is dialled by those above."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import structs

from potluck.backend.extension import COMPLETE, MESSAGES, Deliver, Extension
from potluck.backend.introduction import Reception
from potluck.backend.lanes import OpenLane, answer_lane
from potluck.backend.membership import Membership
from potluck.backend.routes import Route, open_lane
from potluck.core.handshake import Refused, judge_lane, judge_node, list_ranks
from potluck.decoding import printable
from potluck.errors import (
    DistributedError,
    HandshakeRefused,
    MalformedFrame,
    Timeout,
    from_os_error,
)
from potluck.messages import Join, Lane, Peer, Table, unpack
from potluck.net.acceptor import Acceptor
from potluck.net.addresses import Address
from potluck.net.opening import RefusedByPeer, refuse
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.security import NOBODY

__all__ = [
    "Door",
    "Links",
    "Meeting",
    "Welcome",
    "missing_error",
    "refused_error",
    "shown",
    "unreachable_error",
]

Hello: TypeAlias = tuple[OpeningSocket, Join | Lane]

Welcome: TypeAlias = Callable[[int, OpenLane, Peer], None]
"""(rank, its connection, where it is)"""

ANSWER_TIME = 5.0
"""Seconds for the last steps of opening a lane with a member."""

_SAME_START = "Check that they were started with the same master address and world size."
_SAME_PEERS = "Check that they were started with the same list of peers, and where they run."


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
    peers: Sequence[Address] = ()
    """Where each rank listens, if that is agreed beforehand."""
    mapped: bool = False
    """Whether the master address may be one that leads to rank 0 and is not its own."""

    def entry(self, rank: int) -> str:
        """A rank for an error message, with its entry in the list of peers where there is one."""
        where = f" (peers[{rank}], {self.peers[rank]})" if self.peers else ""
        return f"rank {rank}{where}"


class Door:
    """Our own listener, with the hellos that have come so far."""

    def __init__(self, listener: socket.socket, members: Membership) -> None:
        self._hellos: queue.SimpleQueue[Hello] = queue.SimpleQueue()
        self.acceptor = Acceptor(
            listener,
            self._receive,
            members.security,
            lambda channel, where: Reception(members, channel, where),
            members.refused_stranger,
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
        self.table = self._table = table
        """Who is who: every rank, as rank 0 has written it down."""
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
        hold: Callable[[OpeningSocket], None] = lambda _: None,
    ) -> OpenLane:
        """Open a lane for one purpose to a rank; the one way to do so, for every purpose.

        The node that joined as that rank must answer, and both sides must agree on who belongs.
        """
        peer = self._table.peers[rank]
        masters = self._meeting.masters
        hosts = peer.hosts or list(dict.fromkeys(master.host for master in masters))
        hello = Lane(session=self._table.session, rank=self._meeting.rank, to=rank, purpose=purpose)
        end = self._meeting.deadline if deadline is None else deadline
        route = Route(self._meeting.members, structs.replace(peer, hosts=hosts), end, look, hold)
        return open_lane(hello, route)

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

    def extend(self, deliver: Deliver, waiting: Callable[[int], int]) -> Acceptor:
        """The group is complete: from now on its members may open further lanes.

        Each goes to ``deliver``; ``waiting`` says how many of a rank's nobody has asked for yet.
        """
        self._door.turn_away(COMPLETE)
        extension = Extension(self._judge_extension, self.answer, deliver, waiting)
        self._door.acceptor.receive = extension.receive
        return self._door.acceptor

    def _judge_extension(self, sock: OpeningSocket, lane: Lane) -> Refused | None:
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


def shown(peer: Peer) -> Peer:
    """The same with a name and addresses that do no harm in an error message."""
    hosts = [printable(host) for host in peer.hosts]
    return structs.replace(peer, name=printable(peer.name), hosts=hosts)


def missing_error(meeting: Meeting, missing: Sequence[int], what: str) -> Timeout:
    """The error for ranks that did not come, with what became of whoever called."""
    cause = meeting.members.last_refusal
    hint = None if cause else _SAME_PEERS if meeting.peers else _SAME_START
    stranger = meeting.members.last_stranger
    if stranger is not None and cause is None:
        cause, hint = printable(stranger.message), stranger.hint
    who = ", ".join(map(meeting.entry, missing)) if meeting.peers else list_ranks(missing)
    return Timeout(
        f"Rank {meeting.rank} waited {meeting.timeout:g} s for {who}, which {what}",
        seconds=meeting.timeout,
        missing=missing,
        rank=missing[0],
        cause=cause,
        hint=hint,
    )


def refused_error(meeting: Meeting, master: Address, error: HandshakeRefused) -> HandshakeRefused:
    """The error for a rank that rank 0 does not take, or that does not trust who answers there."""
    if isinstance(error, RefusedByPeer):
        what, cause = f"Rank 0 at {master} refused rank {meeting.rank}", error.cause
    else:
        what, cause = f"Rank {meeting.rank} cannot join rank 0 at {master}", error.message
    return HandshakeRefused(
        what, rank=meeting.rank, host=str(master), cause=cause or error.message, hint=error.hint
    )


def unreachable_error(meeting: Meeting, master: Address, error: Exception) -> DistributedError:
    """The error for a rank that has not met rank 0 in time."""
    cause = error if isinstance(error, DistributedError) else from_os_error("", error)  # type: ignore[arg-type]
    entry = " (peers[0])" if meeting.peers else ""
    return Timeout(
        f"Rank {meeting.rank} could not meet rank 0 at {master}{entry} "
        f"within {meeting.timeout:g} s",
        seconds=meeting.timeout,
        missing=(0,),
        rank=0,
        host=str(master),
        cause=cause.cause or cause.message,
        hint=cause.hint or "Check that rank 0 runs there and that no firewall is between.",
    )
