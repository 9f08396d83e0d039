"""Centralised: one rank in the middle does all the work.

The centre moves every byte of everybody, so this is for few ranks, short vectors, or one node with
a far better link than all others.  It is the direct form with the whole vector in one share; which
also makes its sums those of the direct form, to the last bit.
"""

from __future__ import annotations

from dataclasses import replace

from potluck.schedule.algorithms import direct
from potluck.schedule.schedule import Algorithm, Draft, Maker, Program
from potluck.schedule.task import AlgorithmSettings, Collective, Task


def owned_by(centre: int, layout: AlgorithmSettings) -> AlgorithmSettings:
    """The layout in which one rank owns everything."""
    return replace(layout, shares=tuple(int(rank == centre) for rank in range(len(layout.order))))


def all_reduce(task: Task, layout: AlgorithmSettings) -> Maker:
    """The first of the order adds everything up and tells all."""
    return direct.all_reduce(task, owned_by(layout.order[0], layout))


def reduce(task: Task, layout: AlgorithmSettings) -> Maker:
    """The root adds everything up."""
    return direct.reduce(task, owned_by(task.root, layout))


def broadcast(task: Task, layout: AlgorithmSettings) -> Maker:
    """The root tells all."""
    return direct.broadcast(task, owned_by(task.root, layout))


def gather(task: Task, layout: AlgorithmSettings) -> Maker:  # noqa: ARG001 - there is one way only
    """Everybody sends its block to the root."""
    blocks = task.spans()

    def program(rank: int) -> Program:
        draft = Draft.of(task, rank)
        if rank != task.root:
            draft.send(blocks[rank], to=(task.root,))
            return draft.finish()
        draft.keep(blocks[rank])
        for other in direct.around(rank, range(task.world_size)):
            draft.store(blocks[other], source=other)
        return draft.finish()

    return program


def scatter(task: Task, layout: AlgorithmSettings) -> Maker:  # noqa: ARG001 - there is one way only
    """The root sends everybody its block."""
    blocks = task.spans()

    def program(rank: int) -> Program:
        draft = Draft.of(task, rank)
        if rank != task.root:
            draft.store(blocks[rank], source=task.root)
            return draft.finish()
        for other in direct.around(rank, range(task.world_size)):
            draft.send(blocks[other], to=(other,))
        draft.keep(blocks[rank])
        return draft.finish()

    return program


CENTRAL = Algorithm(
    "central",
    "one rank in the middle does all the work",
    {
        Collective.ALL_REDUCE: all_reduce,
        Collective.REDUCE: reduce,
        Collective.BROADCAST: broadcast,
        Collective.GATHER: gather,
        Collective.SCATTER: scatter,
        Collective.BARRIER: all_reduce,
    },
)
