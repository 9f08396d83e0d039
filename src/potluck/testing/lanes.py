"""Control lanes between simulated processes, with the manners of TCP connections.

A lane has two ends.  What is sent at one end arrives at the other in order.  An end that closes
says so, and the other hears it if the network lets it through; an end whose machine lost its power
says nothing, and whoever goes on sending to it learns of it only when that machine is back and
answers with a reset.
"""

from __future__ import annotations

from typing import Any, Protocol

from potluck.testing.network import Flow, LossyNetwork
from potluck.vocabulary import ProcessId

__all__ = ["LaneEnd", "LaneOwner", "join_ends"]


class LaneOwner(Protocol):
    """Who holds an end of a lane."""

    host: str
    is_powered: bool

    def lane_opened(self, end: LaneEnd) -> None:
        """The other side's hello has arrived."""

    def lane_closed(self, end: LaneEnd, cause: str) -> None:
        """The other side has ended the lane."""

    def lane_delivers(self, end: LaneEnd, message: Any) -> None:
        """A message has arrived."""


class LaneEnd:
    """One end of a lane, in the hands of one start of one process."""

    __slots__ = (
        "_flow",
        "card",
        "is_open",
        "is_opening",
        "is_replacement",
        "other",
        "owner",
        "peer",
    )

    other: LaneEnd

    def __init__(self, owner: LaneOwner, peer: ProcessId, card: Any, flow: Flow) -> None:
        self.owner = owner
        self.peer = peer
        self.card = card
        """What the other side said of itself in its hello."""
        self.is_open = False
        self.is_opening = True
        self.is_replacement = False
        """Whether it took the place of another lane, so that nobody need be told."""
        self._flow = flow

    @property
    def is_in_use(self) -> bool:
        """Whether it is open, or about to be."""
        return self.is_open or self.is_opening

    def send(self, message: Any) -> None:
        """Post a message to the other end."""
        self._flow.send(self.other.receive, message)

    def receive(self, message: Any) -> None:
        """A message arrives; a closed end answers with a reset, a machine without power not."""
        if self.is_open:
            self.owner.lane_delivers(self, message)
        elif self.owner.is_powered:
            self._flow.send(self.other.hang_up, "the connection was reset", certain=True)

    def open(self, _: None = None) -> None:
        """Take it into use, unless its owner has ended meanwhile."""
        if self.is_opening:
            self.is_opening = False
            self.is_open = True
            self.owner.lane_opened(self)
        elif self.owner.is_powered:
            self._flow.send(self.other.hang_up, "the connection was reset", certain=True)

    def open_other(self) -> None:
        """Let the answer to the other side's hello travel there."""
        self._flow.send(self.other.open, None, certain=True)

    def close(self, cause: str) -> None:
        """End it here, and tell the other side."""
        if self.is_in_use:
            self.drop()
            self._flow.send(self.other.hang_up, cause, certain=True)

    def drop(self) -> None:
        """End it here without a word."""
        self.is_open = self.is_opening = False

    def hang_up(self, cause: str) -> None:
        """The other side has closed."""
        if self.is_in_use:
            was_open = self.is_open
            self.drop()
            if was_open:
                self.owner.lane_closed(self, cause)


def join_ends(
    network: LossyNetwork,
    dialler: tuple[LaneOwner, ProcessId, Any],
    acceptor: tuple[LaneOwner, ProcessId, Any],
) -> tuple[LaneEnd, LaneEnd]:
    """A new lane, open at neither end yet; each side is (owner, process id, card)."""
    (one, one_id, one_card), (two, two_id, two_card) = dialler, acceptor
    here = LaneEnd(one, two_id, two_card, network.flow(one.host, two.host))
    there = LaneEnd(two, one_id, one_card, network.flow(two.host, one.host))
    here.other, there.other = there, here
    return here, there
