"""Tree, of any arity: sums rise from the leaves to the root, results sink back.

A node waits for all its children and has one parent, so a vector passes as many ranks as the tree
is deep, piece by piece; each inner link carries the whole vector once up and once down.  With arity
1 the tree is a chain: every link carries the vector once, which is the best for long broadcasts.
"""

from __future__ import annotations

from collections.abc import Sequence

from potluck.schedule.schedule import Algorithm, Draft, Form, Maker, Operand, Program, ScheduleStep
from potluck.schedule.task import AlgorithmSettings, Collective, Span, Task


def parent_of(place: int, arity: int) -> int | None:
    """The place above; None at the root, which is place 0.

    >>> [parent_of(place, 2) for place in range(5)]
    [None, 0, 0, 1, 1]
    """
    return (place - 1) // arity if place else None


def children_of(place: int, arity: int, size: int) -> range:
    """The places below.

    >>> list(children_of(1, arity=2, size=5))
    [3, 4]
    """
    return range(min(place * arity + 1, size), min(place * arity + arity + 1, size))


class TreeShape:
    """Who is whose parent, as ranks."""

    def __init__(self, order: Sequence[int], arity: int) -> None:
        self.arity = arity
        self.order = order
        self._places = {rank: place for place, rank in enumerate(order)}

    def parent(self, rank: int) -> int | None:
        """The rank above."""
        above = parent_of(self._places[rank], self.arity)
        return None if above is None else self.order[above]

    def children(self, rank: int) -> tuple[int, ...]:
        """The ranks below."""
        below = children_of(self._places[rank], self.arity, len(self.order))
        return tuple(self.order[place] for place in below)

    def rise(self, draft: Draft, rank: int, span: Span, to_all: tuple[int, ...] = ()) -> None:
        """Add up what comes from below, and hand it up; the root has the sum, and sends it on."""
        below, above = self.children(rank), self.parent(rank)
        takes = tuple(Form.PARTIAL if self.children(child) else Form.DATA for child in below)
        step = ScheduleStep(*span, below, takes, own=Operand.INPUT)
        if above is None:
            draft.add(step._replace(final=True, into=Operand.OUTPUT, to=to_all))
        else:
            draft.add(step._replace(to=(above,), gives=Form.PARTIAL if below else Form.DATA))


def all_reduce(task: Task, layout: AlgorithmSettings) -> Maker:
    """Sums rise to the first of the order, the result sinks."""
    family = TreeShape(layout.order, layout.arity)
    span = Span(0, task.total)

    def program(rank: int) -> Program:
        draft = Draft.of(task, rank)
        below, above = family.children(rank), family.parent(rank)
        family.rise(draft, rank, span, to_all=below)
        if above is not None:
            draft.store(span, source=above, to=below)
        return draft.finish()

    return program


def reduce(task: Task, layout: AlgorithmSettings) -> Maker:
    """Sums rise to the root."""
    return reduce_along(task, layout.headed_by(task.root), layout.arity)


def broadcast(task: Task, layout: AlgorithmSettings) -> Maker:
    """The root's vector sinks."""
    return broadcast_along(task, layout.headed_by(task.root), layout.arity)


def reduce_along(task: Task, order: Sequence[int], arity: int) -> Maker:
    """Sums rise along a tree whose root comes first in ``order``."""
    family = TreeShape(order, arity)

    def program(rank: int) -> Program:
        draft = Draft.of(task, rank)
        family.rise(draft, rank, Span(0, task.total))
        return draft.finish()

    return program


def broadcast_along(task: Task, order: Sequence[int], arity: int) -> Maker:
    """A vector sinks along a tree whose root comes first in ``order``."""
    family = TreeShape(order, arity)
    span = Span(0, task.total)

    def program(rank: int) -> Program:
        draft = Draft.of(task, rank)
        below, above = family.children(rank), family.parent(rank)
        if above is None:
            draft.keep(span, to=below)
        else:
            draft.store(span, source=above, to=below)
        return draft.finish()

    return program


TREE = Algorithm(
    "tree",
    "sums rise to a root and the result sinks back",
    {
        Collective.ALL_REDUCE: all_reduce,
        Collective.REDUCE: reduce,
        Collective.BROADCAST: broadcast,
        Collective.BARRIER: all_reduce,
    },
)
