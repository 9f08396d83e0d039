"""Gathering the lanes of a view: those of members who are still there."""

from __future__ import annotations

import time
from socket import socketpair

from potluck.backend.extension import MESSAGES
from potluck.backend.lanes import OpenLane
from potluck.backend.streams import Switchboard
from potluck.backend.view_gathering import Gathering
from potluck.messages import Peer
from support.threads import PATIENCE, Background, eventually

SOMEBODY = Peer(["127.0.0.1"], 1, "somebody", "")


def never(rank: int, check: object) -> OpenLane:
    """Dials nobody: the first rank only waits."""
    raise AssertionError(rank, check)


def test_a_lane_that_was_given_up_is_not_taken_for_its_member() -> None:
    """Who gave up and comes again is awaited, also when all others are here by then."""
    switchboard = Switchboard()
    (gone, theirs), (kept, other), (again, far) = socketpair(), socketpair(), socketpair()
    try:
        switchboard.put(1, MESSAGES, OpenLane(gone))
        theirs.close()
        gathering = Gathering(0, [SOMEBODY] * 3, switchboard, never)
        end = time.monotonic() + PATIENCE
        gathered = Background(lambda: gathering.gather(end, lambda: None, lambda: None))
        switchboard.put(2, MESSAGES, OpenLane(kept))
        eventually(lambda: switchboard.absent([1, 2], MESSAGES) == [1])
        assert gone.fileno() == -1  # closed on this side as well
        switchboard.put(1, MESSAGES, OpenLane(again))
        assert {rank: lane.sock for rank, lane in gathered.result().items()} == {1: again, 2: kept}
    finally:
        for sock in (gone, theirs, kept, other, again, far):
            sock.close()
