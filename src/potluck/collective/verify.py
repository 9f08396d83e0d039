"""The verifier: shows that a schedule is right, without a network.

:func:`inspect` reads it: spans within range, streams that match, every cell of every output
written, every dependency listed.  :func:`prove` also runs it on plain numpy, in place and out of
place, with streams of one element and the least staging, or with whatever limits and dice it is
given.

One run that ends proves more than itself.  Whatever an actor can do, it can still do after any
other has acted: room and data only grow until it takes them.  So all interleavings end in the same
state, and if one does not deadlock, none does; nor does any with more room.  Random dice
test that argument.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from potluck.collective.actors import Dice, Memory
from potluck.collective.checks import complaints
from potluck.collective.machine import Deadlock, Limits, Machine, straight
from potluck.collective.reduce import Array, ReduceOp, Reducer, quiet
from potluck.collective.schedule import Program, Schedule
from potluck.collective.task import Collective, Task

__all__ = ["Deadlock", "Faulty", "Limits", "expected", "inspect", "play", "prove", "run"]

Wires: TypeAlias = defaultdict[tuple[int, int], deque[Array]]
"""What is on its way from one rank to another."""


class Faulty(Exception):
    """The schedule does not do what it should; the text says where."""


def run(
    schedule: Schedule,
    inputs: Sequence[Array],
    reducer: Reducer,
    *,
    limits: Limits | None = None,
    in_place: bool = False,
    dice: Dice = straight,
) -> list[Array]:
    """Run a schedule on given inputs; what each rank gets.

    >>> from potluck.collective import registry
    >>> task = Task.whole(Collective.ALL_REDUCE, world_size=3, count=2)
    >>> inputs = [np.array([rank, 10]) for rank in range(3)]
    >>> outputs = run(registry.schedule("ring", task), inputs, Reducer.of(ReduceOp.SUM, "i8"))
    >>> [output.tolist() for output in outputs]
    [[3, 30], [3, 30], [3, 30]]
    """
    machine = Machine(schedule, inputs, reducer, limits=limits or Limits(), in_place=in_place)
    machine.run(dice)
    for rank, given in zip(machine.ranks, inputs, strict=True):
        if not in_place and rank.memory.input.tobytes() != given.tobytes():
            raise Faulty(f"Rank {rank.program.rank} changed its input")
    return [rank.memory.output for rank in machine.ranks]


def inspect(schedule: Schedule) -> None:
    """Raise unless the schedule keeps to the contract, as far as reading it tells."""
    for complaint in complaints(schedule):
        raise Faulty(complaint)


def prove(schedule: Schedule, *, limits: Limits | None = None, dice: Dice = straight) -> None:
    """Raise unless the schedule is right, with the least room or with ``limits``.

    It is run on whole numbers in place, and, where input and output may differ, beside; and if all
    ranks get the same sum, on numbers whose sum depends on the order of addition.
    """
    inspect(schedule)
    task = schedule.task
    reducer = exact(task)
    for in_place in (False, True) if task.in_place else (False,):
        got = run(schedule, distinct(task), reducer, limits=limits, in_place=in_place, dice=dice)
        compare(task, got, reducer)
    if task.collective is Collective.ALL_REDUCE:
        mean = Reducer.of(ReduceOp.MEAN, "f4")
        got = run(schedule, rough(task, "f4"), mean, limits=limits, in_place=True, dice=dice)
        if len({mine.tobytes() for mine in got}) > 1:
            raise Faulty("Two ranks have results that differ in some bits")


def play(schedule: Schedule, inputs: Sequence[Array], reducer: Reducer) -> list[Array]:
    """Run each rank's list strictly from top to bottom, on streams without limit.

    Much quicker than :func:`run`, and a property of its own: see the contract.
    """
    size = schedule.task.world_size
    wires: Wires = defaultdict(deque)
    memories = [
        Memory(program, given, reducer, world_size=size)
        for program, given in zip(schedule.programs, inputs, strict=True)
    ]
    players = [
        _perform(program, memory, wires)
        for program, memory in zip(schedule.programs, memories, strict=True)
    ]
    with quiet():
        while players:
            waiting = [player for player in players if next(player, None) is not None]
            if len(waiting) == len(players) and not any(wires.values()):
                raise Deadlock(f"{len(waiting)} ranks wait and nothing is on its way")
            players = waiting
    if any(wires.values()):
        raise Faulty("Something was sent that nobody awaits")
    return [memory.output for memory in memories]


def _perform(program: Program, memory: Memory, wires: Wires) -> Iterator[int]:
    """A rank at work; whenever it waits for another, that one's number."""
    for step in program.steps:
        arrived = []
        for peer in step.sources:
            while not wires[peer, program.rank]:
                yield peer
            arrived.append(wires[peer, program.rank].popleft())
        value = memory.value(step, arrived, step.start, step.stop)
        if step.into is not None:
            memory.cells(step.into, step.start, step.stop)[:] = value
        for peer in step.to:
            wires[program.rank, peer].append(value)


def exact(task: Task) -> Reducer:
    """A reduction that shows every operand, and allows repetition only where the task does."""
    once = task.collective is not Collective.BARRIER
    return Reducer.of(ReduceOp.SUM if once else ReduceOp.BIT_OR, "u8")


def compare(task: Task, got: Sequence[Array], reducer: Reducer) -> None:
    """Raise unless every rank got from :func:`distinct` what it should."""
    wanted = expected(task, distinct(task), reducer)
    for rank, (mine, right) in enumerate(zip(got, wanted, strict=True)):
        if mine.tobytes() != right.tobytes():
            raise Faulty(f"Rank {rank} gets {mine} instead of {right}")


def distinct(task: Task) -> list[Array]:
    """Inputs of which no two cells are alike, nor any sums of different cells."""
    inputs = []
    for rank in range(task.world_size):
        cells = np.arange(task.input(rank).length, dtype="u8")
        inputs.append((cells + 1) * np.uint64(2654435761) + (np.uint64(1) << np.uint64(rank % 64)))
    return inputs


def rough(task: Task, dtype: str) -> list[Array]:
    """Inputs whose sum depends on the order of addition."""
    cells = [np.arange(task.input(rank).length) for rank in range(task.world_size)]
    return [
        (np.sin(1 + cell * 7 + rank * 13) * 10.0 ** ((cell + rank) % 4)).astype(dtype)
        for rank, cell in enumerate(cells)
    ]


def expected(task: Task, inputs: Sequence[Array], reducer: Reducer) -> list[Array]:
    """What each rank should get: computed from all inputs at once, without any schedule."""
    size, root = task.world_size, task.root
    nothing = inputs[0][:0]
    match task.collective:
        case Collective.ALL_REDUCE | Collective.BARRIER:
            return [_reduced(inputs, reducer)] * size
        case Collective.REDUCE:
            return [_reduced(inputs, reducer) if rank == root else nothing for rank in range(size)]
        case Collective.REDUCE_SCATTER:
            return [_reduced(inputs, reducer)[slice(*span)] for span in task.spans()]
        case Collective.BROADCAST:
            return [inputs[root]] * size
        case Collective.ALL_GATHER:
            return [np.concatenate(inputs)] * size
        case Collective.GATHER:
            return [np.concatenate(inputs) if rank == root else nothing for rank in range(size)]
        case Collective.SCATTER:
            return [inputs[root][slice(*span)] for span in task.spans()]
    ends = [np.cumsum(task.sends(rank))[:-1] for rank in range(size)]  # an all-to-all
    parts = [np.split(given, at) for given, at in zip(inputs, ends, strict=True)]
    return [np.concatenate([row[rank] for row in parts]) for rank in range(size)]


def _reduced(inputs: Sequence[Array], reducer: Reducer) -> Array:
    partial = np.empty(len(inputs[0]), reducer.wide)
    result = np.empty(len(inputs[0]), reducer.dtype)
    with quiet():
        reducer.fold(inputs, partial)
        reducer.finish(partial, result, world_size=len(inputs))
    return result
