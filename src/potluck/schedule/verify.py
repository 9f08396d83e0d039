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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from potluck.schedule.reduce import Array, Dtype, ReduceOp, Reducer, quiet
from potluck.schedule.schedule import (
    RELAYED,
    STAGED,
    Form,
    Operand,
    Program,
    Schedule,
    ScheduleStep,
)
from potluck.schedule.task import Collective, Span, Task

# --------------------------------------------------------------------------------------------------
# What can be told of a schedule by reading it: complaints, as sentences.
#
# These checks know the contract of ``schedule`` but share no code with what writes programs; a
# faulty algorithm, or a fault in :mod:`potluck.schedule.schedule`, does not hide itself.


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


def _peers(task: Task, program: Program, step: ScheduleStep) -> Iterator[str]:
    for peers in (step.sources, step.to):
        if len(set(peers)) < len(peers):
            yield f"a rank appears twice in {peers}"
        for peer in peers:
            if not 0 <= peer < task.world_size or peer == program.rank:
                yield f"{peer} is not another rank"
    if len(step.takes) != len(step.sources):
        yield "there is not one form for each source"


def _value(task: Task, step: ScheduleStep) -> Iterator[str]:
    if step.operands == 0 or (step.into is None and not step.to):
        yield "it has nothing to do"
    if not 0 <= step.own_at <= len(step.sources):
        yield "the own operand has no place in the order"
    combines = step.operands > 1
    partial = {*step.takes, step.gives} & {Form.PARTIAL} or step.own is Operand.SUM
    if not task.collective.reduces and (combines or partial or step.final):
        yield f"{task.collective.value} reduces nothing"
    if step.final and (step.gives is Form.PARTIAL or step.into is Operand.SUM):
        yield "a final value is treated as a partial one"
    if combines and not step.final:
        if step.into is Operand.OUTPUT:
            yield "a partial value is stored as if it were final"
        if step.to and step.gives is Form.DATA:
            yield "a partial value is sent as if it were final"


def _ranges(program: Program, step: ScheduleStep) -> Iterator[str]:
    if step.start >= step.stop:
        yield "its span is empty"
    if step.into is Operand.INPUT:
        yield "it writes to the input"
    for place in (step.own, step.into):
        if place is None:
            continue
        home = program.input if place is Operand.INPUT else program.output
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
        elif step.own is not None and (step.own is not Operand.INPUT or task.in_place):
            readers.add(index)
    if program.output.start <= cell < program.output.stop and (
        writer is None or program.steps[writer].into is not Operand.OUTPUT
    ):
        yield f"the output's cell {cell} is never written"


def _read(step: ScheduleStep, writer: int | None, *, in_place: bool) -> Iterator[str]:
    if step.own is Operand.INPUT:
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


# --------------------------------------------------------------------------------------------------
# The parts of the machine that plays schedules: memory, streams, and whoever makes progress.
#
# An *actor* does one small thing when asked (hand on, take in, combine) and names whoever may be
# able to go on because of it.  Between them they keep to the contract of ``schedule`` with the
# least room it allows: the prescribed staging and not one piece more.

Dice: TypeAlias = Callable[[int], int]
"""Called with *n*, returns one of 0 … *n* − 1."""


class RankMemory:
    """The arrays of one rank, by place and coordinate, and how values come to be."""

    def __init__(
        self,
        program: Program,
        given: Array,
        reducer: Reducer,
        *,
        world_size: int,
        in_place: bool = False,
    ) -> None:
        self._reducer = reducer
        self._world_size = world_size
        brings, gets = program.input, program.output
        if in_place:
            hull = Span(min(brings.start, gets.start), max(brings.stop, gets.stop))
            whole = _garbage(hull.length, reducer.dtype)
            self.input = whole[brings.start - hull.start : brings.stop - hull.start]
            self.output = whole[gets.start - hull.start : gets.stop - hull.start]
        else:
            self.input = _garbage(brings.length, reducer.dtype)
            self.output = _garbage(gets.length, reducer.dtype)
        self.input[:] = given
        self._sum = _garbage(gets.length, reducer.wide) if reducer.is_wide else self.output
        self._starts = (brings.start, gets.start, gets.start)

    def cells(self, place: Operand, start: int, stop: int) -> Array:
        """A view of the cells of a span."""
        array = (self.input, self.output, self._sum)[place]
        offset = self._starts[place]
        return array[start - offset : stop - offset]

    def value(self, step: ScheduleStep, arrived: list[Array], start: int, stop: int) -> Array:
        """What comes of the operands of a step, between two coordinates."""
        if step.own is not None:
            arrived.insert(step.own_at, self.cells(step.own, start, stop))
        partial = np.empty(stop - start, self._reducer.wide)
        self._reducer.fold(arrived, partial)
        if step.final:
            self._reducer.finish(partial, partial, world_size=self._world_size)
        return partial


def _garbage(count: int, dtype: Dtype) -> Array:
    return np.full(count * dtype.itemsize, 113, dtype="u1").view(dtype)


class ElementStream:
    """Elements on their way from one rank to another, in order."""

    def __init__(self, capacity: int) -> None:
        self.room = capacity
        self._chunks: deque[Array] = deque()
        self.ends: list[Actor] = []

    def push(self, elements: Array) -> None:
        """Put elements in; there must be room."""
        self._chunks.append(elements.copy())
        self.room -= len(elements)

    def pull(self, most: int) -> Array | None:
        """Take up to ``most`` elements out; None if there are none."""
        if not self._chunks:
            return None
        chunk = self._chunks.popleft()
        if len(chunk) > most:
            self._chunks.appendleft(chunk[most:])
            chunk = chunk[:most]
        self.room += len(chunk)
        return chunk


class StepState:
    """A step under way."""

    def __init__(self, step: ScheduleStep, reducer: Reducer) -> None:
        types = (reducer.dtype, reducer.wide)
        self.step = step
        self.value = step.stop if step.only_sends else step.start
        """How far the value is known: stored, or held by a relay."""
        self.pulled = [step.start] * len(step.sources)
        self.sent = dict.fromkeys(step.to, step.start)
        self.staged = [] if step.moves else [np.empty(step.length, types[f]) for f in step.takes]
        self.held = np.empty(step.length if step.into is None else 0, types[step.gives])
        self.on_value: list[Actor] = []
        """Who may continue when more of the value is known."""
        self.on_sent: list[Actor] = []
        """Who may continue when more of it was sent on."""

    @property
    def done(self) -> int:
        """How far everything about this step is over."""
        return min(self.value, *self.sent.values()) if self.sent else self.value


class Rank:
    """One rank: its memory and the state of its steps."""

    def __init__(self, program: Program, memory: RankMemory, reducer: Reducer, piece: int) -> None:
        self.program = program
        self.memory = memory
        self.piece = piece
        self.stages = [StepState(step, reducer) for step in program.steps]

    def readable(self, step: ScheduleStep) -> int:
        """How far the own operand may be read."""
        return self._least(step.stop, step.reads, lambda stage: stage.value)

    def writable(self, step: ScheduleStep) -> int:
        """How far the value may be stored."""
        return self._least(step.stop, step.overwrites, lambda stage: stage.done)

    def _least(self, limit: int, waits: Iterable[int], far: Callable[[StepState], int]) -> int:
        for index in waits:
            reached = far(self.stages[index])
            if reached < self.stages[index].step.stop:
                limit = min(limit, reached)
        return limit


class Actor:
    """Something that can make progress."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.awake = False

    def act(self, dice: Dice) -> list[Actor] | None:
        """Get a bit further, if possible; whom that may help, or None if nothing was possible."""
        raise NotImplementedError


class StreamSender(Actor):
    """The sending end of a stream."""

    def __init__(self, rank: Rank, peer: int, stream: ElementStream) -> None:
        super().__init__(rank)
        self.peer, self.stream = peer, stream
        self.queue = deque(rank.stages[index] for index in rank.program.outgoing[peer])

    def act(self, dice: Dice) -> list[Actor] | None:
        """Hand on what is ready, as far as there is room."""
        if not self.queue or not self.stream.room:
            return None
        stage = self.queue[0]
        step, start = stage.step, stage.sent[self.peer]
        ready = self.rank.readable(step) if step.only_sends else stage.value
        most = min(ready - start, self.stream.room)
        if most <= 0:
            return None
        stop = start + 1 + dice(most)
        place = step.own if step.only_sends else step.into
        if place is None:
            self.stream.push(stage.held[start - step.start : stop - step.start])
        else:
            self.stream.push(self.rank.memory.cells(place, start, stop))
        stage.sent[self.peer] = stop
        if stop == step.stop:
            self.queue.popleft()
        return self.stream.ends + stage.on_sent


class StreamReceiver(Actor):
    """The receiving end of a stream."""

    def __init__(self, rank: Rank, peer: int, stream: ElementStream) -> None:
        super().__init__(rank)
        self.peer, self.stream = peer, stream
        self.queue = deque(rank.stages[index] for index in rank.program.incoming[peer])
        self.combiners: dict[StepState, Combiner] = {}

    def act(self, dice: Dice) -> list[Actor] | None:
        """Take in what may be taken in: straight into memory, or into the staged pieces."""
        if not self.queue:
            return None
        stage = self.queue[0]
        step = stage.step
        which = step.sources.index(self.peer)
        start = stage.pulled[which]
        most = self._limit(stage) - start
        elements = self.stream.pull(1 + dice(most)) if most > 0 else None
        if elements is None:
            return None
        stop = start + len(elements)
        stage.pulled[which] = stop
        if stop == step.stop:
            self.queue.popleft()
        if not step.moves:
            stage.staged[which][start - step.start : stop - step.start] = elements
            return [*self.stream.ends, self.combiners[stage]]
        assert step.into is not None
        self.rank.memory.cells(step.into, start, stop)[:] = elements
        stage.value = stop
        return self.stream.ends + stage.on_value

    def _limit(self, stage: StepState) -> int:
        step = stage.step
        if step.moves:
            return self.rank.writable(step)
        over, pieces = (stage.done, RELAYED) if step.into is None else (stage.value, STAGED)
        first = (over - step.start) // self.rank.piece
        return min(step.stop, step.start + (first + pieces) * self.rank.piece)


class Combiner(Actor):
    """A step that computes a value from its operands, or copies memory."""

    def __init__(self, rank: Rank, stage: StepState) -> None:
        super().__init__(rank)
        self.stage = stage

    def act(self, dice: Dice) -> list[Actor] | None:  # noqa: ARG002 - pieces are combined whole
        """Combine the next piece, if all its operands are there and its place is free."""
        stage, step = self.stage, self.stage.step
        start = stage.value
        stop = min(start + self.rank.piece, step.stop)
        if start == stop or min(stage.pulled, default=stop) < stop:
            return None
        if self.rank.readable(step) < stop or self.rank.writable(step) < stop:
            return None
        arrived = [staged[start - step.start : stop - step.start] for staged in stage.staged]
        result = self.rank.memory.value(step, arrived, start, stop)
        if step.into is None:
            stage.held[start - step.start : stop - step.start] = result
        else:
            self.rank.memory.cells(step.into, start, stop)[:] = result
        stage.value = stop
        return stage.on_value


# --------------------------------------------------------------------------------------------------
# A machine for schedules: all ranks of a group in one place, on plain numpy, without a network.
#
# It does what an executor does, with the least room that the contract allows.  What moves next, and
# how far, is decided by dice that the caller passes in; so any interleaving can be played, and
# replayed. An actor that can do nothing sleeps until something changes that it may have waited for.
# When all sleep the run is over; if not all is done by then, it was a deadlock.


def straight(sides: int) -> int:
    """Dice for the quickest run: the rank that woke last continues, as far as it can."""
    return sides - 1


class Deadlock(Exception):
    """Every rank that is not done waits for another."""


@dataclass(frozen=True, slots=True)
class VerifyLimits:
    """The room that ranks have; unless told otherwise, the least there can be."""

    piece: int = 1
    capacity: int = 1
    """Elements that a stream holds."""


class ScheduleRun:
    """One run of one schedule."""

    def __init__(
        self,
        schedule: Schedule,
        inputs: Sequence[Array],
        reducer: Reducer,
        *,
        limits: VerifyLimits,
        in_place: bool,
    ) -> None:
        self._capacity = limits.capacity
        self._streams: dict[tuple[int, int], ElementStream] = {}
        self._actors: list[Actor] = []
        self.ranks: list[Rank] = []
        for program, given in zip(schedule.programs, inputs, strict=True):
            size = schedule.task.world_size
            memory = RankMemory(program, given, reducer, world_size=size, in_place=in_place)
            rank = Rank(program, memory, reducer, limits.piece)
            self.ranks.append(rank)
            self._connect(rank)

    def run(self, dice: Dice = straight) -> None:
        """Let all ranks act, in the order that the dice decide, until none can."""
        awake = self._actors.copy()
        for actor in awake:
            actor.awake = True
        with quiet():
            while awake:
                place = dice(len(awake))
                awake[place], awake[-1] = awake[-1], awake[place]
                actor = awake.pop()
                helped = actor.act(dice)
                actor.awake = helped is not None
                if helped is None:
                    continue
                awake.append(actor)
                for other in helped:
                    if not other.awake:
                        other.awake = True
                        awake.append(other)
        stuck = [
            f"rank {rank.program.rank} in step {index} at {stage.done} of {stage.step}"
            for rank in self.ranks
            for index, stage in enumerate(rank.stages)
            if stage.done < stage.step.stop
        ]
        if stuck:
            raise Deadlock("; ".join(stuck))

    def _stream(self, source: int, target: int) -> ElementStream:
        return self._streams.setdefault((source, target), ElementStream(self._capacity))

    def _connect(self, rank: Rank) -> None:
        """Make a rank's actors, and let each stage know whom its progress helps."""
        me = rank.program.rank
        senders = {
            peer: StreamSender(rank, peer, self._stream(me, peer)) for peer in rank.program.outgoing
        }
        receivers = {
            peer: StreamReceiver(rank, peer, self._stream(peer, me))
            for peer in rank.program.incoming
        }
        combiners: list[Combiner] = []
        for sender in senders.values():
            sender.stream.ends.append(sender)
        for receiver in receivers.values():
            receiver.stream.ends.append(receiver)
        for stage in rank.stages:
            step = stage.step
            sources = [receivers[peer] for peer in step.sources]
            stage.on_value.extend(senders[peer] for peer in step.to)
            movers: list[Actor] = list(stage.on_value if step.only_sends else sources)
            if not step.only_sends and not step.moves:
                combiner = Combiner(rank, stage)
                combiners.append(combiner)
                freed = stage.on_sent if step.into is None else stage.on_value
                freed.extend(sources)
                movers = [combiner]
                for receiver in sources:
                    receiver.combiners[stage] = combiner
            for index in {*step.reads, *step.overwrites}:
                rank.stages[index].on_value.extend(movers)
                rank.stages[index].on_sent.extend(movers)
        self._actors += [*senders.values(), *receivers.values(), *combiners]


# --------------------------------------------------------------------------------------------------

Wires: TypeAlias = defaultdict[tuple[int, int], deque[Array]]
"""What is on its way from one rank to another."""


class FaultyScheduleError(Exception):
    """The schedule does not do what it should; the text says where."""


def run(
    schedule: Schedule,
    inputs: Sequence[Array],
    reducer: Reducer,
    *,
    limits: VerifyLimits | None = None,
    in_place: bool = False,
    dice: Dice = straight,
) -> list[Array]:
    """Run a schedule on given inputs; what each rank gets.

    >>> from potluck.schedule import planner as registry
    >>> task = Task.whole(Collective.ALL_REDUCE, world_size=3, count=2)
    >>> inputs = [np.array([rank, 10]) for rank in range(3)]
    >>> outputs = run(registry.schedule("ring", task), inputs, Reducer.of(ReduceOp.SUM, "i8"))
    >>> [output.tolist() for output in outputs]
    [[3, 30], [3, 30], [3, 30]]
    """
    machine = ScheduleRun(
        schedule, inputs, reducer, limits=limits or VerifyLimits(), in_place=in_place
    )
    machine.run(dice)
    for rank, given in zip(machine.ranks, inputs, strict=True):
        if not in_place and rank.memory.input.tobytes() != given.tobytes():
            raise FaultyScheduleError(f"Rank {rank.program.rank} changed its input")
    return [rank.memory.output for rank in machine.ranks]


def inspect(schedule: Schedule) -> None:
    """Raise unless the schedule keeps to the contract, as far as reading it tells."""
    for complaint in complaints(schedule):
        raise FaultyScheduleError(complaint)


def prove(schedule: Schedule, *, limits: VerifyLimits | None = None, dice: Dice = straight) -> None:
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
            raise FaultyScheduleError("Two ranks have results that differ in some bits")


def play(schedule: Schedule, inputs: Sequence[Array], reducer: Reducer) -> list[Array]:
    """Run each rank's list strictly from top to bottom, on streams without limit.

    Much quicker than :func:`run`, and a property of its own: see the contract.
    """
    size = schedule.task.world_size
    wires: Wires = defaultdict(deque)
    memories = [
        RankMemory(program, given, reducer, world_size=size)
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
        raise FaultyScheduleError("Something was sent that no rank awaits")
    return [memory.output for memory in memories]


def _perform(program: Program, memory: RankMemory, wires: Wires) -> Iterator[int]:
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
            raise FaultyScheduleError(f"Rank {rank} gets {mine} instead of {right}")


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
