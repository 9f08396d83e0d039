"""What can be told of a schedule by reading it: complaints, as sentences.

These checks know the contract of ``schedule`` but share no code with what writes programs; a faulty
algorithm, or a fault in :mod:`potluck.collective.hazards`, does not hide itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from potluck.collective.schedule import Form, Place, Program, Schedule, Step
from potluck.collective.task import Task

__all__ = ["complaints"]


def complaints(schedule: Schedule) -> Iterator[str]:
    """Everything that is wrong, in words; nothing if the schedule keeps to the contract."""
    programs = schedule.programs
    for program in programs:
        for index, step in enumerate(program.steps):
            for complaint in (*_peers(schedule.task, program, step), *_value(schedule.task, step)):
                yield f"Rank {program.rank}, step {index}: {complaint}"
            for complaint in _ranges(program, step):
                yield f"Rank {program.rank}, step {index}: {complaint}"
        for complaint in _memory(schedule.task, program):
            yield f"Rank {program.rank}, {complaint}"
    yield from _streams(programs)


def _peers(task: Task, program: Program, step: Step) -> Iterator[str]:
    for peers in (step.sources, step.to):
        if len(set(peers)) < len(peers):
            yield f"a rank appears twice in {peers}"
        for peer in peers:
            if not 0 <= peer < task.world_size or peer == program.rank:
                yield f"{peer} is no other rank"
    if len(step.takes) != len(step.sources):
        yield "there is not one form for each source"


def _value(task: Task, step: Step) -> Iterator[str]:
    if step.operands == 0 or (step.into is None and not step.to):
        yield "it has nothing to do"
    if not 0 <= step.own_at <= len(step.sources):
        yield "the own operand has no place in the order"
    combines = step.operands > 1
    partial = {*step.takes, step.gives} & {Form.PARTIAL} or step.own is Place.SUM
    if not task.collective.reduces and (combines or partial or step.final):
        yield f"{task.collective.value} reduces nothing"
    if step.final and (step.gives is Form.PARTIAL or step.into is Place.SUM):
        yield "a final value is treated as a partial one"
    if combines and not step.final:
        if step.into is Place.OUTPUT:
            yield "a partial value is stored as if it were final"
        if step.to and step.gives is Form.DATA:
            yield "a partial value is sent as if it were final"


def _ranges(program: Program, step: Step) -> Iterator[str]:
    if step.start >= step.stop:
        yield "its span is empty"
    if step.into is Place.INPUT:
        yield "it writes to the input"
    for place in (step.own, step.into):
        if place is None:
            continue
        home = program.input if place is Place.INPUT else program.output
        if not home.start <= step.start <= step.stop <= home.stop:
            yield f"{step.start} to {step.stop} is beyond {place.name.lower()} {tuple(home)}"


def _memory(task: Task, program: Program) -> Iterator[str]:
    """Follow the life of every cell; cells between two boundaries of spans share theirs."""
    edges = {*program.output, *program.input}
    for step in program.steps:
        edges |= {step.start, step.stop}
    for start, _ in pairwise(sorted(edges)):
        yield from _life(task, program, start)


def _life(task: Task, program: Program, cell: int) -> Iterator[str]:
    writer: int | None = None
    readers: set[int] = set()
    for index, step in enumerate(program.steps):
        if not step.start <= cell < step.stop:
            continue
        for complaint in _read(step, writer, in_place=task.in_place):
            yield f"step {index} {complaint} cell {cell}"
        if step.into is not None:
            before = readers if writer is None else readers | {writer}
            if not before <= set(step.overwrites):
                yield f"step {index} overwrites cell {cell} before others are done with it"
            writer, readers = index, set()
        elif step.own is not None and (step.own is not Place.INPUT or task.in_place):
            readers.add(index)
    if program.output.start <= cell < program.output.stop and (
        writer is None or program.steps[writer].into is not Place.OUTPUT
    ):
        yield f"the output's cell {cell} is never written"


def _read(step: Step, writer: int | None, *, in_place: bool) -> Iterator[str]:
    if step.own is Place.INPUT:
        if writer is not None and in_place:
            yield "reads the input's overwritten"
    elif step.own is not None:
        if writer is None:
            yield "reads the unwritten"
        elif writer not in step.reads:
            yield f"does not wait for step {writer} to write"


def _streams(programs: list[Program]) -> Iterator[str]:
    sent: dict[tuple[int, int], list[tuple[int, Form]]] = {}
    awaited: dict[tuple[int, int], list[tuple[int, Form]]] = {}
    for program in programs:
        for step in program.steps:
            for peer in step.to:
                sent.setdefault((program.rank, peer), []).append((step.length, step.gives))
            for peer, form in zip(step.sources, step.takes, strict=False):
                awaited.setdefault((peer, program.rank), []).append((step.length, form))
    for pair in sorted(sent.keys() | awaited.keys()):
        if sent.get(pair) != awaited.get(pair):
            yield f"Rank {pair[0]} does not send what rank {pair[1]} awaits"
