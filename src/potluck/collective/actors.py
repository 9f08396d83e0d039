"""The parts of the machine that plays schedules: memory, streams, and whoever makes progress.

An *actor* does one small thing when asked (hand on, take in, combine) and names whoever may be able
to go on because of it.  Between them they keep to the contract of ``schedule`` with the least room
it allows: the prescribed staging and not one piece more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from potluck.collective.reduce import Array, Dtype, Reducer
from potluck.collective.schedule import RELAYED, STAGED, Place, Program, Step
from potluck.collective.task import Span

__all__ = ["Actor", "Combiner", "Dice", "Memory", "Rank", "Receiver", "Sender", "Stage", "Stream"]

Dice: TypeAlias = Callable[[int], int]
"""Called with *n*, returns one of 0 … *n* − 1."""


class Memory:
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

    def cells(self, place: Place, start: int, stop: int) -> Array:
        """A view of the cells of a span."""
        array = (self.input, self.output, self._sum)[place]
        offset = self._starts[place]
        return array[start - offset : stop - offset]

    def value(self, step: Step, arrived: list[Array], start: int, stop: int) -> Array:
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


class Stream:
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


class Stage:
    """A step under way."""

    def __init__(self, step: Step, reducer: Reducer) -> None:
        types = (reducer.dtype, reducer.wide)
        self.step = step
        self.value = step.stop if step.only_sends else step.start
        """How far the value is known: stored, or held by a relay."""
        self.pulled = [step.start] * len(step.sources)
        self.sent = dict.fromkeys(step.to, step.start)
        self.staged = [] if step.moves else [np.empty(step.length, types[f]) for f in step.takes]
        self.held = np.empty(step.length if step.into is None else 0, types[step.gives])
        self.on_value: list[Actor] = []
        """Who may go on when more of the value is known."""
        self.on_sent: list[Actor] = []
        """Who may go on when more of it was handed on."""

    @property
    def done(self) -> int:
        """How far everything about this step is over."""
        return min(self.value, *self.sent.values()) if self.sent else self.value


class Rank:
    """One rank: its memory and the state of its steps."""

    def __init__(self, program: Program, memory: Memory, reducer: Reducer, piece: int) -> None:
        self.program = program
        self.memory = memory
        self.piece = piece
        self.stages = [Stage(step, reducer) for step in program.steps]

    def readable(self, step: Step) -> int:
        """How far the own operand may be read."""
        return self._least(step.stop, step.reads, lambda stage: stage.value)

    def writable(self, step: Step) -> int:
        """How far the value may be stored."""
        return self._least(step.stop, step.overwrites, lambda stage: stage.done)

    def _least(self, limit: int, waits: Iterable[int], far: Callable[[Stage], int]) -> int:
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


class Sender(Actor):
    """The sending end of a stream."""

    def __init__(self, rank: Rank, peer: int, stream: Stream) -> None:
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


class Receiver(Actor):
    """The receiving end of a stream."""

    def __init__(self, rank: Rank, peer: int, stream: Stream) -> None:
        super().__init__(rank)
        self.peer, self.stream = peer, stream
        self.queue = deque(rank.stages[index] for index in rank.program.incoming[peer])
        self.combiners: dict[Stage, Combiner] = {}

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

    def _limit(self, stage: Stage) -> int:
        step = stage.step
        if step.moves:
            return self.rank.writable(step)
        over, pieces = (stage.done, RELAYED) if step.into is None else (stage.value, STAGED)
        first = (over - step.start) // self.rank.piece
        return min(step.stop, step.start + (first + pieces) * self.rank.piece)


class Combiner(Actor):
    """A step that computes a value from its operands, or copies memory."""

    def __init__(self, rank: Rank, stage: Stage) -> None:
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
