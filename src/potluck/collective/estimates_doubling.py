"""Estimates for recursive doubling: round by round, for each place of the order."""

from __future__ import annotations

from collections.abc import Sequence

from potluck.collective.costs import Costs
from potluck.collective.loads import Load
from potluck.collective.task import Layout, Task

__all__ = ["doubling_all_gather", "doubling_all_reduce", "doubling_barrier"]


def _powers(below: int) -> list[int]:
    """1, 2, 4 … as long as they are below."""
    return [1 << exponent for exponent in range((below - 1).bit_length())]


def _heard(costs: Costs, ready: list[int], order: Sequence[int], partners: list[int]) -> list[int]:
    """When each place has heard from its partner, given when each was ready to tell."""
    return [
        max(ready[place], ready[partner] + costs.hop(order[partner], order[place], 0))
        for place, partner in enumerate(partners)
    ]


def doubling_all_reduce(task: Task, layout: Layout, costs: Costs) -> int:
    """Whole vectors between partners; guests tell their host before, and hear from it after."""
    order, size = layout.order, task.world_size
    core = 1 << (size.bit_length() - 1)
    nbytes = task.total * costs.wide
    hosts = range(size - core)
    ready = [0] * core
    for place in hosts:
        ready[place] = costs.hop(order[place + core], order[place], 0)
    for distance in _powers(core):
        ready = _heard(costs, ready, order, [place ^ distance for place in range(core)])
    ends = [costs.hop(order[place], order[place + core], 0) + ready[place] for place in hosts]
    messages = [0] * size
    for place, rank in enumerate(order):
        messages[rank] = 1 if place >= core else len(_powers(core)) + (place in hosts)
    moved = [nbytes * count for count in messages]
    pieces = [2 * costs.pieces(nbytes) * count for count in messages]
    idle = [0] * size
    # The hops already count the work on one piece each; with many, the processor may be the limit.
    path = max([*ready, *ends]) + Load(moved, moved, idle, idle).bound(costs)
    return max(path, Load(moved, moved, pieces, moved).bound(costs))


def doubling_barrier(task: Task, layout: Layout, costs: Costs) -> int:
    """Round by round, once the way round."""
    size = task.world_size
    ready = [0] * size
    for distance in _powers(size):
        partners = [(place - distance) % size for place in range(size)]
        ready = _heard(costs, ready, layout.order, partners)
    return max(ready)


def doubling_all_gather(task: Task, layout: Layout, costs: Costs) -> int:
    """Each round passes on all that is known, as soon as the round before is over."""
    size, order = task.world_size, layout.order
    ready = [0] * size  # by place: when all is there that the next round passes on
    for distance in _powers(size):
        part = task.total * costs.itemsize * min(distance, size - distance) // size
        pairs = [(order[place - distance], order[place]) for place in range(size)]
        ready = [
            max(now, ready[place - distance] + costs.flow(*pair, part) + costs.hop(*pair, 0))
            for place, (now, pair) in enumerate(zip(ready, pairs, strict=True))
        ]
    return max(ready)
