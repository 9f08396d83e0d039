"""Pricing: how long a schedule takes on given links, without running it.

Each rank's list is walked from top to bottom.  Of every step two moments are kept: when the first
piece of its value is there and when the last is; a step that forwards can begin at the former and
cannot end before the latter, which is what pipelining means.  Streams are used in order.  What
streams share (the ways out and in of a rank, its processor) bounds the end of all work on it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from potluck.collective.costs import Costs
from potluck.collective.schedule import Form, Program, Schedule, Step

__all__ = ["Timeline", "Transfer", "price", "timeline"]


class Transfer(NamedTuple):
    """One span on its way from one rank to another, in nanoseconds from the start."""

    source: int
    target: int
    start: int
    stop: int
    form: Form
    leaves: int
    """When its first piece leaves."""
    arrives: int
    """When its last piece has arrived."""


@dataclass(frozen=True)
class Timeline:
    """Who is busy when."""

    duration: int
    transfers: tuple[Transfer, ...]


class Moments(NamedTuple):
    """When the first and when the last piece of something is there."""

    first: int
    last: int


class Queue:
    """Something that all streams of a rank share: it is never faster than its work allows."""

    def __init__(self) -> None:
        self._begin: int | None = None
        self._work = 0

    def serve(self, begin: int, work: int) -> int:
        """Add work that can begin at a moment; the earliest end of all work so far."""
        self._begin = begin if self._begin is None else min(self._begin, begin)
        self._work += work
        return self._begin + self._work


class Walk:
    """One walk over a schedule."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.costs = costs
        size = schedule.task.world_size
        self._up = [Queue() for _ in range(size)]
        self._down = [Queue() for _ in range(size)]
        self._processor = [Queue() for _ in range(size)]
        self._free: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._wires: defaultdict[tuple[int, int], deque[Moments]] = defaultdict(deque)
        self.end = 0
        self.transfers: list[Transfer] = []
        walkers = [self._perform(program) for program in schedule.programs]
        while walkers:
            walkers = [walker for walker in walkers if next(walker, None) is not None]

    def _perform(self, program: Program) -> Iterator[int]:
        """Walk one rank's list; whenever it waits for another, that one's number."""
        rank, steps = program.rank, program.steps
        values: list[Moments] = []
        for step in steps:
            first = last = 0
            for peer in step.sources:
                while not self._wires[peer, rank]:
                    yield peer
                arrival = self._wires[peer, rank].popleft()
                first, last = max(first, arrival.first), max(last, arrival.last)
            for index in step.reads:
                earlier = values[index]
                last = max(last, earlier.last)
                if steps[index].start <= step.start:
                    begun = steps[index].start == step.start
                    first = max(first, earlier.first if begun else earlier.last)
            value = self._value(rank, step, Moments(first, max(first, last)))
            values.append(value)
            self.end = max(self.end, value.last)
            for place, peer in enumerate(step.to):
                self._send(rank, peer, step, value, place)

    def _value(self, rank: int, step: Step, ready: Moments) -> Moments:
        """When the value is there, given when its operands are."""
        costs = self.costs
        size = step.length * costs.itemsize
        ends = len(step.sources) + len(step.to)
        adding = costs.adding(size) * (step.operands - 1)
        work = costs.pieces(size) * costs.host.piece * ends + adding
        tail = costs.host.piece * max(0, len(step.sources) - 1) + adding // costs.pieces(size)
        end = self._processor[rank].serve(ready.first, work)
        return Moments(ready.first + tail, max(ready.last + tail, end))

    def _send(self, rank: int, peer: int, step: Step, value: Moments, place: int) -> None:
        """Put a value on its way; it is number ``place`` of those that go out at the same time."""
        costs = self.costs
        size = step.length * (costs.wide if step.gives is Form.PARTIAL else costs.itemsize)
        turn = place * (costs.host.piece + costs.up(rank, min(size, costs.piece)))
        leaves = max(value.first + turn, self._free[rank, peer])
        left = max(value.last, leaves + costs.flow(rank, peer, size))
        left = max(left, self._up[rank].serve(leaves, costs.up(rank, size)))
        self._free[rank, peer] = left
        hop = costs.hop(rank, peer, size)
        late = hop - costs.flow(rank, peer, min(size, costs.piece))
        last = max(left, self._down[peer].serve(leaves, costs.down(peer, size))) + late
        self._wires[rank, peer].append(Moments(leaves + hop, last))
        self.end = max(self.end, last)
        self.transfers.append(Transfer(rank, peer, step.start, step.stop, step.gives, leaves, last))


def timeline(schedule: Schedule, costs: Costs) -> Timeline:
    """When which span is on its way."""
    walk = Walk(schedule, costs)
    return Timeline(walk.end, tuple(walk.transfers))


def price(schedule: Schedule, costs: Costs) -> int:
    """How many nanoseconds the schedule takes.

    >>> from potluck.collective import registry
    >>> from potluck.collective.costs import Network
    >>> from potluck.collective.task import Collective, Task
    >>> from potluck.vocabulary import LinkMatrix
    >>> network = Network(LinkMatrix.uniform(4, rate=125_000_000, latency=100_000))
    >>> ring = registry.schedule("ring", Task.whole(Collective.ALL_REDUCE, 4, count=4 << 20))
    >>> price(ring, Costs(network)) // 1_000_000  # milliseconds; no way is shorter than 201
    201
    """
    return Walk(schedule, costs).end
