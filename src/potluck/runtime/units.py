"""Units: a program cut into pieces, with everything decided that can be decided beforehand.

A *unit* is one piece of one step.  Both ends of a stream cut a span at the same places, so a stream
is a list of units on either side.  What a step may wait for (see ``collective.schedule``) becomes
counts: a unit *waits* for so many events, and every event names the units that it helps.  There
are two: the **value** of a unit is known (stored, or held by a relay), and the unit is **done**
(its value has also been handed to all its streams).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from potluck.collective.schedule import Program, Step

__all__ = ["Arrival", "Kind", "Unit", "Units", "compile_program"]

STAGED = 2
"""Pieces held for each source of a step that combines: one comes in while another is waited for."""

NOBODY = -1


class Kind(IntEnum):
    """How the value of a unit comes about."""

    SEND = 0
    """It lies in memory."""
    MOVE = 1
    """It comes in, straight to where it belongs."""
    FOLD = 2
    """It is computed from operands."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One piece of one step."""

    kind: Kind
    step: Step
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A unit on the stream of one of its sources."""

    unit: int
    operand: int
    """Which of the unit's sources the stream is."""
    after_value: int = NOBODY
    """The unit whose value must be known before there is room for this one."""
    after_done: int = NOBODY
    """The unit that must be done before there is room for this one."""


@dataclass(frozen=True)
class Units:
    """A program, ready to be run."""

    program: Program
    units: tuple[Unit, ...]
    """In the order in which they could be worked off one by one."""
    waits: tuple[int, ...]
    """How many events each unit waits for: its arrivals (unless it moves), and what it reads or
    overwrites."""
    on_value: tuple[tuple[int, ...], ...]
    on_done: tuple[tuple[int, ...], ...]
    incoming: dict[int, tuple[Arrival, ...]]
    outgoing: dict[int, tuple[int, ...]]


class _Cutter:
    """Cuts one program."""

    def __init__(self, program: Program, piece: int, *, stages_all: bool) -> None:
        self._program = program
        self._piece = piece
        self._stages_all = stages_all
        self.units: list[Unit] = []
        self._first: list[int] = []
        for step in program.steps:
            self._first.append(len(self.units))
            moves = self._moves(step)
            kind = Kind.SEND if step.only_sends else Kind.MOVE if moves else Kind.FOLD
            self.units += [
                Unit(kind, step, start, min(start + piece, step.stop))
                for start in range(step.start, step.stop, piece)
            ]
        self.waits = [0] * len(self.units)
        self.on_value: list[list[int]] = [[] for _ in self.units]
        self.on_done: list[list[int]] = [[] for _ in self.units]

    def _moves(self, step: Step) -> bool:
        return step.moves and not self._stages_all

    def units_of(self, index: int) -> range:
        """The units of a step."""
        steps = self._program.steps
        count = -(-steps[index].length // self._piece)
        return range(self._first[index], self._first[index] + count)

    def connect(self) -> None:
        """Write down who waits for whom."""
        for index, step in enumerate(self._program.steps):
            previous = NOBODY
            for unit in self.units_of(index):
                stop = self.units[unit].stop
                for other in step.reads:
                    self._await(unit, self._reaching(other, stop), self.on_value)
                for other in step.overwrites:
                    self._await(unit, self._reaching(other, stop), self.on_done)
                if not step.sources and step.into is not None and previous != NOBODY:
                    self._await(unit, previous, self.on_value)  # memory fills from the front
                if not self._moves(step):
                    self.waits[unit] += len(step.sources)
                previous = unit

    def _reaching(self, index: int, stop: int) -> int:
        """The unit with which a step has got as far as ``stop``, or to its end; maybe none."""
        step = self._program.steps[index]
        if stop <= step.start:
            return NOBODY
        last = min(stop, step.stop) - 1
        return self._first[index] + (last - step.start) // self._piece

    def _await(self, unit: int, other: int, events: list[list[int]]) -> None:
        if other != NOBODY:
            events[other].append(unit)
            self.waits[unit] += 1

    def arrivals(self, peer: int, indices: tuple[int, ...]) -> tuple[Arrival, ...]:
        """What comes in on a peer's stream."""
        found: list[Arrival] = []
        for index in indices:
            step = self._program.steps[index]
            operand = step.sources.index(peer)
            for place, unit in enumerate(self.units_of(index)):
                freed = unit - STAGED if place >= STAGED and not self._moves(step) else NOBODY
                if step.into is None:
                    found.append(Arrival(unit, operand, after_done=freed))
                else:
                    found.append(Arrival(unit, operand, after_value=freed))
        return tuple(found)


def compile_program(program: Program, piece: int, *, stages_all: bool = False) -> Units:
    """Cut a program into units of ``piece`` elements.

    With ``stages_all`` nothing is received straight into its destination: it has to be decoded.
    """
    cutter = _Cutter(program, piece, stages_all=stages_all)
    cutter.connect()
    incoming = {peer: cutter.arrivals(peer, steps) for peer, steps in program.incoming.items()}
    outgoing = {
        peer: tuple(unit for index in steps for unit in cutter.units_of(index))
        for peer, steps in program.outgoing.items()
    }
    return Units(
        program,
        tuple(cutter.units),
        tuple(cutter.waits),
        tuple(map(tuple, cutter.on_value)),
        tuple(map(tuple, cutter.on_done)),
        incoming,
        outgoing,
    )
