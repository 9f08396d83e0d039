"""Ring: each rank hears only its left neighbour and tells only its right one.

The vector is cut into as many blocks as there are ranks.  A block starts at one rank, is added to
at every next one until it has gone round, and then goes round once more as the result; every
link carries 2(N−1)/N of the vector, however many ranks there are.

Blocks are worked off in segments of a piece, in the order in which they can move: segment *g* makes
its turn *k* in wave *g + k*.  What comes from the left then leaves to the right in the same order,
so a partial sum is never stored: it stays in the two pieces in which it arrived.  The input is left
alone, and 16-bit numbers travel as wide partial sums without a wide copy of the vector.
"""

from __future__ import annotations

from collections.abc import Iterator

from potluck.schedule.algorithms import tree
from potluck.schedule.schedule import Algorithm, Draft, Form, Maker, Operand, Program, ScheduleStep
from potluck.schedule.task import AlgorithmSettings, Collective, Span, Task, cut, split


def waves(segments: int, turns: int) -> Iterator[tuple[int, int]]:
    """Every (segment, turn), in the order in which a rank meets them.

    >>> list(waves(2, 3))
    [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    """
    for wave in range(segments + turns - 1):
        for turn in range(max(0, wave - segments + 1), min(turns, wave + 1)):
            yield wave - turn, turn


def segmented(blocks: list[Span], piece: int) -> list[list[Span]]:
    """Each block in pieces; all have equally many, the last ones may be empty."""
    longest = max(block.length for block in blocks)
    segments = max(1, -(-longest // piece))
    return [cut(block, segments) for block in blocks]


def travel(task: Task, layout: AlgorithmSettings, blocks: list[Span], turns: int) -> Maker:
    """Blocks go round in ``turns`` steps; block *b* is complete at place *b* of the order.

    Of N ranks, the first adds nothing, N − 1 add their part, and further ones store the result.
    """
    order, size = layout.order, task.world_size
    parts = segmented(blocks, layout.piece)

    def program(rank: int) -> Program:
        draft = Draft.of(task, rank)
        place = order.index(rank)
        left, right = order[place - 1], order[(place + 1) % size]
        steps = [hop(turn, turns, size, left, right) for turn in range(turns)]
        for segment, turn in waves(len(parts[0]), turns):
            draft.add(steps[turn].at(parts[(place - 1 - turn) % size][segment]))
        return draft.finish()

    return program


def hop(turn: int, turns: int, size: int, left: int, right: int) -> ScheduleStep:
    """What a rank does with a block on its turn, wherever the block lies."""
    to = (right,) if turn < turns - 1 else ()
    if turn == size - 1:  # it has been everywhere; alone, it starts and ends here
        sources, takes = ((left,), (_arriving(turn),)) if turn else ((), ())
        into = Operand.OUTPUT
        return ScheduleStep(0, 0, sources, takes, Operand.INPUT, turn and 1, into, to, final=True)
    if turn >= size:
        return ScheduleStep(0, 0, (left,), (Form.DATA,), into=Operand.OUTPUT, to=to)
    if turn == 0:
        return ScheduleStep(0, 0, own=Operand.INPUT, to=to)
    return ScheduleStep(0, 0, (left,), (_arriving(turn),), Operand.INPUT, 1, None, to, Form.PARTIAL)


def _arriving(turn: int) -> Form:
    return Form.DATA if turn == 1 else Form.PARTIAL


def all_reduce(task: Task, layout: AlgorithmSettings) -> Maker:
    """Blocks go round twice: as sums, then as results."""
    blocks = split(Span(0, task.total), (1,) * task.world_size)
    return travel(task, layout, blocks, turns=2 * task.world_size - 1)


def reduce_scatter(task: Task, layout: AlgorithmSettings) -> Maker:
    """Blocks go round once and end where they belong."""
    spans = task.spans()
    return travel(task, layout, [spans[rank] for rank in layout.order], turns=task.world_size)


def all_gather(task: Task, layout: AlgorithmSettings) -> Maker:
    """Blocks go round once and are stored everywhere."""
    order, size = layout.order, task.world_size
    spans = task.spans()

    def program(rank: int) -> Program:
        draft = Draft.of(task, rank)
        place = order.index(rank)
        left, right = order[place - 1], order[(place + 1) % size]
        draft.keep(spans[rank], to=(right,) if size > 1 else ())
        for turn in range(1, size):
            to = (right,) if turn < size - 1 else ()
            draft.store(spans[order[place - turn]], source=left, to=to)
        return draft.finish()

    return program


def reduce(task: Task, layout: AlgorithmSettings) -> Maker:
    """A sum that grows round the ring and ends at the root."""
    first, *others = layout.turned_to(task.root)
    return tree.reduce_along(task, (first, *reversed(others)), arity=1)


def broadcast(task: Task, layout: AlgorithmSettings) -> Maker:
    """From the root round the ring, piece by piece."""
    return tree.broadcast_along(task, layout.turned_to(task.root), arity=1)


RING = Algorithm(
    "ring",
    "each rank hears its left neighbour and tells its right one",
    {
        Collective.ALL_REDUCE: all_reduce,
        Collective.REDUCE: reduce,
        Collective.BROADCAST: broadcast,
        Collective.ALL_GATHER: all_gather,
        Collective.REDUCE_SCATTER: reduce_scatter,
    },
)
