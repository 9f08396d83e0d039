"""Estimates: the price of a schedule in closed form, where walking it would take long.

Some algorithms have about N² transfers: for a thousand ranks too many to look at.
But what bounds them is known: the bytes that each rank moves, and the way of a single piece.  An
algorithm without an estimate is priced by walking its schedule (``pricing``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from potluck.collective.central import owned_by
from potluck.collective.costs import Costs
from potluck.collective.estimates_doubling import (
    doubling_all_gather,
    doubling_all_reduce,
    doubling_barrier,
)
from potluck.collective.loads import Load
from potluck.collective.task import Collective, Layout, Span, Task, split

__all__ = ["ESTIMATES", "Estimate"]

Estimate: TypeAlias = Callable[[Task, Layout, Costs], int]
"""Nanoseconds for a task among two ranks or more."""


# --- ring ---


def _circle(
    task: Task, layout: Layout, costs: Costs, blocks: Sequence[int], *, sums: int, results: int
) -> int:
    """Blocks go round, ``sums`` times as partial sums and ``results`` times as results."""
    size, order = task.world_size, layout.order
    hops_of_block = (sums + results) * (size - 1)
    rounds = sums * costs.wide + results * costs.itemsize
    # The first hop of a block carries one rank's own numbers, not a partial sum.
    first = sums * (costs.wide - costs.itemsize) * sum(blocks) // size
    moved = sum(blocks) * (size - 1) // size
    pieces = sum(costs.pieces(block * costs.itemsize) for block in blocks)
    load = Load(
        up=(moved * rounds - first,) * size,
        down=(moved * rounds - first,) * size,
        pieces=(2 * pieces * hops_of_block // size,) * size,
        added=(sums * moved * costs.itemsize,) * size,
    )
    ring = [*order, order[0]]
    longest = max(blocks) * costs.itemsize
    trip = sum(costs.hop(*pair, longest) for pair in pairwise(ring)) * hops_of_block // size
    idle = max(costs.hop(*pair, 0) for pair in pairwise(ring))
    return max(load.bound(costs) + idle, trip)


def ring_all_reduce(task: Task, layout: Layout, costs: Costs) -> int:
    """Twice round: as sums, then as results."""
    blocks = [span.length for span in split(Span(0, task.total), (1,) * task.world_size)]
    return _circle(task, layout, costs, blocks, sums=1, results=1)


def ring_reduce_scatter(task: Task, layout: Layout, costs: Costs) -> int:
    """Once round as sums."""
    return _circle(task, layout, costs, task.counts, sums=1, results=0)


def ring_all_gather(task: Task, layout: Layout, costs: Costs) -> int:
    """Once round as results."""
    return _circle(task, layout, costs, task.counts, sums=0, results=1)


# --- direct ---

Stage: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Ranks that send, each to all of the ranks that receive."""


def _straight(
    costs: Costs, sent: Sequence[int], got: Sequence[int], stages: Sequence[Stage], *, adds: bool
) -> int:
    """Everybody sends straight to others: elements out and in of each rank, and who to whom."""
    messages = [[0, 0] for _ in sent]
    for senders, receivers in stages:
        for rank in senders:
            messages[rank][0] += len(receivers) - (rank in receivers)
        for rank in receivers:
            messages[rank][1] += len(senders) - (rank in senders)
    if not any(sent):
        return 0
    part = -(-sum(sent) * costs.itemsize // sum(out for out, _ in messages))
    load = Load(
        up=[count * costs.itemsize for count in sent],
        down=[count * costs.itemsize for count in got],
        pieces=[sum(both) * costs.pieces(part) for both in messages],
        added=[count * costs.itemsize * adds for count in got],
    )
    idle = max(int(costs.hops(0)[np.ix_(*stage)].max()) for stage in stages)
    return max(load.bound(costs) + idle, _path(costs, part, stages))


def _path(costs: Costs, part: int, stages: Sequence[Stage]) -> int:
    """The time of one message of ``part`` bytes through all stages."""
    hops = costs.hops(part)
    part = min(part, costs.piece)
    turn = np.array([costs.host.piece + costs.up(rank, part) for rank in range(len(hops))])
    ready = np.zeros(len(hops), np.int64)
    for senders, receivers in stages:
        # A rank turns to one receiver after the other, and looks at one sender after the other.
        others = len(receivers) - np.isin(senders, receivers) - 1
        leaves = ready[list(senders)] + turn[list(senders)] * others
        arrives = (leaves[:, None] + hops[np.ix_(senders, receivers)]).max(axis=0)
        ready[list(receivers)] = arrives + costs.host.piece * (len(senders) - 1)
    return int(ready.max())


def _lengths(task: Task, layout: Layout) -> list[int]:
    return [span.length for span in split(Span(0, task.total), layout.shares)]


def direct_all_reduce(task: Task, layout: Layout, costs: Costs) -> int:
    """Contributions to the owners, results to all."""
    own, others = _lengths(task, layout), task.world_size - 1
    moved = [task.total - length + others * length for length in own]
    everybody, owners = range(task.world_size), _owners(own)
    return _straight(costs, moved, moved, [(everybody, owners), (owners, everybody)], adds=True)


def direct_reduce(task: Task, layout: Layout, costs: Costs) -> int:
    """Contributions to the owners, results to the root."""
    own, others, root = _lengths(task, layout), task.world_size - 1, task.root
    sent = [task.total] * task.world_size
    sent[root] -= own[root]
    got = [others * length for length in own]
    got[root] += task.total - own[root]
    everybody, owners = range(task.world_size), _owners(own)
    return _straight(costs, sent, got, [(everybody, owners), (owners, [root])], adds=True)


def direct_broadcast(task: Task, layout: Layout, costs: Costs) -> int:
    """Shares to the owners, and from them to all."""
    own, others, root = _lengths(task, layout), task.world_size - 1, task.root
    sent = [(others - 1) * length for length in own]
    sent[root] = task.total - own[root] + others * own[root]
    got = [task.total] * task.world_size
    got[root] = 0
    listeners = [rank for rank in range(task.world_size) if rank != root]
    owners = _owners(own)
    return _straight(costs, sent, got, [([root], owners), (owners, listeners)], adds=False)


def _owners(own: Sequence[int]) -> list[int]:
    return [rank for rank, length in enumerate(own) if length] or [0]


def direct_all_gather(task: Task, layout: Layout, costs: Costs) -> int:  # noqa: ARG001
    """Blocks to all."""
    sent = [count * (task.world_size - 1) for count in task.counts]
    got = [task.total - count for count in task.counts]
    everybody = range(task.world_size)
    return _straight(costs, sent, got, [(everybody, everybody)], adds=False)


def direct_reduce_scatter(task: Task, layout: Layout, costs: Costs) -> int:  # noqa: ARG001
    """Contributions to the ranks they belong to."""
    sent = [task.total - count for count in task.counts]
    got = [count * (task.world_size - 1) for count in task.counts]
    everybody = range(task.world_size)
    return _straight(costs, sent, got, [(everybody, everybody)], adds=True)


def direct_all_to_all(task: Task, layout: Layout, costs: Costs) -> int:  # noqa: ARG001
    """From each to each."""
    everybody = range(task.world_size)
    sent = [sum(task.sends(rank)) - task.sends(rank)[rank] for rank in everybody]
    got = [sum(task.receives(rank)) - task.receives(rank)[rank] for rank in everybody]
    return _straight(costs, sent, got, [(everybody, everybody)], adds=False)


# --- central ---


def central_all_reduce(task: Task, layout: Layout, costs: Costs) -> int:
    """The direct form with one owner."""
    return direct_all_reduce(task, owned_by(layout.order[0], layout), costs)


def central_reduce(task: Task, layout: Layout, costs: Costs) -> int:
    """The direct form, owned by the root."""
    return direct_reduce(task, owned_by(task.root, layout), costs)


def central_broadcast(task: Task, layout: Layout, costs: Costs) -> int:
    """The direct form, owned by the root."""
    return direct_broadcast(task, owned_by(task.root, layout), costs)


ESTIMATES: dict[tuple[str, Collective], Estimate] = {
    ("ring", Collective.ALL_REDUCE): ring_all_reduce,
    ("ring", Collective.REDUCE_SCATTER): ring_reduce_scatter,
    ("ring", Collective.ALL_GATHER): ring_all_gather,
    ("central", Collective.ALL_REDUCE): central_all_reduce,
    ("central", Collective.BARRIER): central_all_reduce,
    ("central", Collective.REDUCE): central_reduce,
    ("central", Collective.BROADCAST): central_broadcast,
    ("doubling", Collective.ALL_REDUCE): doubling_all_reduce,
    ("doubling", Collective.BARRIER): doubling_barrier,
    ("doubling", Collective.ALL_GATHER): doubling_all_gather,
    ("direct", Collective.ALL_REDUCE): direct_all_reduce,
    ("direct", Collective.REDUCE): direct_reduce,
    ("direct", Collective.BROADCAST): direct_broadcast,
    ("direct", Collective.ALL_GATHER): direct_all_gather,
    ("direct", Collective.REDUCE_SCATTER): direct_reduce_scatter,
    ("direct", Collective.ALL_TO_ALL): direct_all_to_all,
}
"""By name of the algorithm and collective."""
