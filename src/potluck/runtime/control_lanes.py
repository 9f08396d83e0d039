"""Which lane leads to which process: at most one is used, whoever dialled.

When two processes dial each other at the same moment there are two lanes.  Both sides keep the one
that the process with the smaller id dialled; the other is not written to any more, but read until
its end, so that nothing said on it is lost.  A lane that comes much later than another replaces it:
whoever dialled it has lost the first, though this side may not have noticed.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.cluster_cards import ProcessCard
from potluck.core.topology_nodes import NodeProfile
from potluck.net.addresses import Address
from potluck.runtime.io_lane import Lane
from potluck.vocabulary import ProcessId

__all__ = ["LaneTable", "OpenedLane"]


AT_ONCE = 2.0
"""Seconds within which two lanes were dialled at the same moment, each side knowing of none."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenedLane:
    """A control lane whose other end has said who it is."""

    lane: Lane
    card: ProcessCard
    dialler: ProcessId
    address: Address
    """Where it can be reached, as far as this lane shows."""
    link: str | None = None
    """The hardware address behind it, where one is known."""
    profile: NodeProfile | None = None
    """What its machine can do, if it told."""


class LaneTable:
    """The lanes of one process; used by the control thread alone."""

    def __init__(self, me: ProcessId) -> None:
        self._me = me
        self._by_process: dict[ProcessId, OpenedLane] = {}
        self._by_lane: dict[Lane, OpenedLane] = {}
        self._since: dict[ProcessId, float] = {}

    def __len__(self) -> int:
        return len(self._by_process)

    def add(self, opened: OpenedLane, now: float) -> tuple[bool, Lane | None]:
        """One more lane: whether its process is new, and the lane to part with, if any."""
        process = opened.card.process
        known = self._by_process.get(process)
        self._by_lane[opened.lane] = opened
        if known is None:
            self._by_process[process], self._since[process] = opened, now
            return True, None
        smaller = min(self._me, process)
        is_late = now - self._since[process] > AT_ONCE
        # Of two that the same side dialled the later one counts: it had lost the first.
        if is_late or opened.dialler == smaller or known.dialler != smaller:
            self._by_process[process], self._since[process] = opened, now
            return False, known.lane
        return False, opened.lane

    def ended(self, lane: Lane) -> OpenedLane | None:
        """A lane is over; returned if it was the one in use."""
        opened = self._by_lane.pop(lane, None)
        if opened is not None and self._by_process.get(opened.card.process) is opened:
            del self._by_process[opened.card.process], self._since[opened.card.process]
            return opened
        return None

    def remove(self, process: ProcessId) -> list[Lane]:
        """Forget a process; its lanes, to be closed."""
        self._by_process.pop(process, None)
        self._since.pop(process, None)
        lanes = [lane for lane, each in self._by_lane.items() if each.card.process == process]
        for lane in lanes:
            del self._by_lane[lane]
        return lanes

    def to(self, process: ProcessId) -> OpenedLane | None:
        """The lane to a process."""
        return self._by_process.get(process)

    def behind(self, lane: Lane) -> ProcessCard | None:
        """Who is at the other end of a lane."""
        opened = self._by_lane.get(lane)
        return opened.card if opened else None

    @property
    def opened(self) -> list[OpenedLane]:
        """The lanes in use."""
        return list(self._by_process.values())
