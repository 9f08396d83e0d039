"""Direct: everybody exchanges with everybody, and each rank owns a share of the vector.

To reduce, each rank sends every owner its part of that owner's share; the owner adds them in the
order of the ranks and sends the result to all.  A rank with a small share moves fewer bytes, one
without a share only its own contribution out and the result in: so shares fit unequal links.  The
sum of an element does not depend on who owns it.

On the stream between two ranks contributions and results share one order.  The share is therefore
worked off in segments, and the result of one segment follows the contributions to the next:
results flow back long before the last contribution has gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from potluck.schedule.schedule import Algorithm, Draft, Form, Maker, Operand, Program, ScheduleStep
from potluck.schedule.task import AlgorithmSettings, Collective, Span, Task, cut, facing, split

MOST_SEGMENTS = 8
"""More would shorten the tail by less than a piece takes, and lengthen every program."""

Owners = dict[int, list[Span]]
"""For each rank with a share: its segments."""


def share_out(task: Task, layout: AlgorithmSettings) -> Owners:
    """Who owns what, in segments of about a piece; all owners have equally many."""
    spans = split(Span(0, task.total), layout.shares)
    longest = max(span.length for span in spans)
    segments = min(MOST_SEGMENTS, max(1, -(-longest // layout.piece)))
    return {rank: cut(span, segments) for rank, span in enumerate(spans) if span.length}


def around(rank: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """The other ranks, beginning after ``rank``: so that not all turn to the same one first.

    >>> around(2, range(4))
    (3, 0, 1)
    """
    return (
        *(other for other in ranks if other > rank),
        *(other for other in ranks if other < rank),
    )


def gathering(task: Task, rank: int, segment: Span) -> ScheduleStep:
    """The step with which an owner adds up everybody's part of a segment, in the order of ranks."""
    sources = tuple(other for other in range(task.world_size) if other != rank)
    takes = (Form.DATA,) * len(sources)
    return ScheduleStep(*segment, sources, takes, own=Operand.INPUT, own_at=rank, final=True)


class Sharing:
    """Every owner reduces its share; those who are ``readers`` get the results."""

    def __init__(self, task: Task, layout: AlgorithmSettings, readers: Sequence[int]) -> None:
        self._task = task
        self._readers = readers
        self._owners = share_out(task, layout)
        self._ranks = list(self._owners)
        self._segments = max((len(spans) for spans in self._owners.values()), default=0)

    def program(self, rank: int) -> Program:
        """At any time contributions are one segment ahead of the sums, and results one behind."""
        draft = Draft.of(self._task, rank)
        others = around(rank, self._ranks)
        acts = (self._contribute, self._add_up, self._store)
        for turn in range(self._segments + len(acts) - 1):
            for late, act in enumerate(acts):
                if 0 <= turn - late < self._segments:
                    act(draft, rank, others, turn - late)
        return draft.finish()

    def _contribute(self, draft: Draft, _: int, others: tuple[int, ...], segment: int) -> None:
        for owner in others:
            draft.send(self._owners[owner][segment], to=(owner,))

    def _add_up(self, draft: Draft, rank: int, _: tuple[int, ...], segment: int) -> None:
        if rank in self._owners:
            step = gathering(self._task, rank, self._owners[rank][segment])
            into = Operand.OUTPUT if rank in self._readers else None
            draft.add(step._replace(into=into, to=around(rank, self._readers)))

    def _store(self, draft: Draft, rank: int, others: tuple[int, ...], segment: int) -> None:
        if rank in self._readers:
            for owner in others:
                draft.store(self._owners[owner][segment], source=owner)


def all_reduce(task: Task, layout: AlgorithmSettings) -> Maker:
    """Reduce each share at its owner, then everybody gets every share."""
    return Sharing(task, layout, range(task.world_size)).program


def reduce(task: Task, layout: AlgorithmSettings) -> Maker:
    """Reduce each share at its owner, then the root gets every share."""
    return Sharing(task, layout, (task.root,)).program


def reduce_scatter(task: Task, layout: AlgorithmSettings) -> Maker:  # noqa: ARG001 - the blocks are the shares
    """Reduce each block at the rank it belongs to."""
    blocks = task.spans()

    def program(rank: int) -> Program:
        draft = Draft.of(task, rank)
        for other in around(rank, range(task.world_size)):
            draft.send(blocks[other], to=(other,))
        draft.add(gathering(task, rank, blocks[rank])._replace(into=Operand.OUTPUT))
        return draft.finish()

    return program


def broadcast(task: Task, layout: AlgorithmSettings) -> Maker:
    """The root hands each owner its share, and the owner passes it to all others."""
    shares = split(Span(0, task.total), layout.shares)
    owners = [rank for rank, share in enumerate(shares) if share.length]
    root = task.root

    def program(rank: int) -> Program:
        draft = Draft.of(task, rank)
        everybody = around(rank, range(task.world_size))
        if rank == root:
            for owner in around(rank, owners):
                draft.send(shares[owner], to=(owner,))
            draft.send(shares[root], to=everybody)
            draft.keep(Span(0, task.total))
            return draft.finish()
        listeners = tuple(other for other in everybody if other != root)
        draft.store(shares[rank], source=root, to=listeners)
        for owner in around(rank, owners):
            draft.store(shares[owner], source=owner)
        return draft.finish()

    return program


def all_gather(task: Task, layout: AlgorithmSettings) -> Maker:  # noqa: ARG001 - the blocks are the shares
    """Everybody sends its block to everybody."""
    blocks = task.spans()

    def program(rank: int) -> Program:
        draft = Draft.of(task, rank)
        others = around(rank, range(task.world_size))
        draft.keep(blocks[rank], to=others)
        for other in others:
            draft.store(blocks[other], source=other)
        return draft.finish()

    return program


def all_to_all(task: Task, layout: AlgorithmSettings) -> Maker:  # noqa: ARG001 - the matrix says it all
    """Everybody sends each its own part."""
    return lambda rank: exchange(rank, task.sends(rank), task.receives(rank))


def exchange(rank: int, sends: Sequence[int], receives: Sequence[int]) -> Program:
    """One rank's part of an all-to-all; what others exchange among themselves it need not know.

    >>> exchange(0, sends=(1, 4), receives=(1, 2)).output
    Span(start=0, stop=3)
    """
    brings, gets = facing(rank, sends, receives)
    draft = Draft(rank, brings, gets, in_place=False)
    parts, places = _blocks(brings, sends), _blocks(gets, receives)
    others = around(rank, range(len(sends)))
    for other in others:
        draft.send(parts[other], to=(other,))
    draft.keep(parts[rank])
    for other in others:
        draft.store(places[other], source=other)
    return draft.finish()


def _blocks(span: Span, counts: Sequence[int]) -> list[Span]:
    return split(span, counts) if span.length else [span] * len(counts)


DIRECT = Algorithm(
    "direct",
    "everybody exchanges with everybody, each owning a share",
    {
        Collective.ALL_REDUCE: all_reduce,
        Collective.REDUCE: reduce,
        Collective.BROADCAST: broadcast,
        Collective.ALL_GATHER: all_gather,
        Collective.REDUCE_SCATTER: reduce_scatter,
        Collective.ALL_TO_ALL: all_to_all,
    },
)
