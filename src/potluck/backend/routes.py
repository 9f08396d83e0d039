"""The way to a rank: its addresses are dialled, again and again, until it opens a lane."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from potluck.backend.introduction import Declined, open_any
from potluck.backend.lanes import OpenLane, dial_lane
from potluck.backend.membership import Membership
from potluck.errors import MalformedFrame, NoConnection
from potluck.messages import Lane, Peer
from potluck.net.addresses import Address
from potluck.net.secure_socket import OpeningSocket
from potluck.vocabulary import NodeId

__all__ = ["Route", "open_lane"]

ANSWER_WITHIN = 8.0
"""Seconds for the answer to a hello: longer than a lane may wait for its view to be known."""

PAUSE, LONGEST_PAUSE = 0.02, 0.25
"""Seconds between two rounds through a peer's addresses: doubling, with jitter."""


@dataclass(frozen=True, slots=True)
class Route:
    """Whom to dial, and for how long."""

    members: Membership
    peer: Peer
    """Where it is, best address first; its node has to answer, unless that is empty."""
    deadline: float
    look: Callable[[], None] = lambda: None
    """Called while waiting; raises when trying makes no sense any more."""
    hold: Callable[[OpeningSocket], None] = lambda _: None
    """Gets the connection while it opens, to be able to end it from another thread."""

    @property
    def addresses(self) -> list[Address]:
        """Where to try."""
        return [Address(host, self.peer.port) for host in self.peer.hosts]


def open_lane(hello: Lane, route: Route) -> OpenLane:
    """Open a lane to the rank that ``hello`` names; the one way to do so, for every purpose."""
    failure: Exception | None = None
    pause = PAUSE
    while time.monotonic() < route.deadline:
        try:
            return _open_once(hello, route)
        except Declined:
            raise
        except (OSError, MalformedFrame) as error:
            if failure is None or not isinstance(error, TimeoutError):
                failure = error  # that the last try had no time left tells nobody anything
        route.look()
        time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
        pause = min(LONGEST_PAUSE, pause * 2)
    peer, where = route.peer, ", ".join(map(str, route.addresses))
    raise NoConnection(
        f"Rank {hello.rank} could not connect to rank {hello.to} on {peer.name} ({where})",
        rank=hello.to,
        host=peer.name,
        cause=str(failure) if failure else "no time was left",
        hint="Check that the two machines reach each other and that no firewall is between.",
    )


def _open_once(hello: Lane, route: Route) -> OpenLane:
    def say(sock: OpeningSocket) -> OpenLane:
        route.hold(sock)
        soon = min(route.deadline, time.monotonic() + ANSWER_WITHIN)
        return dial_lane(sock, hello, route.members, soon)

    node = NodeId(route.peer.node) if route.peer.node else None
    return open_any(route.members, route.addresses, route.deadline, node, route.look, say)
