"""Schedules: a collective as data, one program for each rank.

A *program* is an ordered list of steps.  A *step* is one stage of a pipeline over one span of the
vector: pieces of it come in from ``sources`` (and from the rank's ``own`` memory), are combined in
that order, and go out: ``into`` memory and on ``to`` other ranks.  The same step type says "send
my part", "add what arrives and pass it on", "store the result and forward it".

The contract
============

An executor has one ordered stream of bytes for each directed pair of ranks, and may rely on this:

**Streams.**  What rank *p* sends to rank *q* is, in this order, the spans of those steps of *p*
that have *q* in ``to``; they match, one by one and with equal length and form, those steps of *q*
that have *p* among their ``sources``.  So a stream needs no tags, and both ends cut a span at the
same places: every ``piece`` elements from its start.

**Values.**  The value of a piece is the left fold of its operands: the sources in their order, with
the own operand after ``own_at`` of them.  Either one rank combines it and all others get it from
there, or several combine it, each from the same operands, in the same order and cut at the same
places: that is why results are identical to the last bit on all ranks.  ``final`` means that the
reduction ends here: a mean is divided, a wide sum is rounded, once.

**Forms.**  A transfer has the form ``DATA`` (the type of the array) or ``PARTIAL`` (an unfinished
reduction, in the type of the accumulator: wider for 16-bit floats, otherwise the same).  The place
``SUM`` holds partial values at the coordinates of the output; unless the accumulator is wider, it
*is* the output.  A codec may replace every ``DATA`` transfer of a schedule without partial ones:
each contribution is encoded once, and the one rank at which a value is ``final`` encodes it once,
keeps the decoded form itself and sends the encoded one to all.

**Order.**  Within a rank only memory orders steps, and all of that is written down.  Each step
advances through its span from start to stop.  It may combine up to a coordinate as soon as every
unfinished step in ``reads`` has *stored* beyond it, and store there as soon as every unfinished
step in ``overwrites`` is *done* with it: has stored it and handed it to all its streams.  (Steps
that are not listed never touch the same cells in a way that matters.)  So a piece is forwarded the
moment it is reduced.  When several steps could continue, the first in the list is the most urgent.

**Staging.**  A step that only moves (one source, no own operand) and stores can be received
straight into its destination once ``overwrites`` allows it, with no copy.  Every other step needs
a staged piece for each source (``STAGED``), filled as soon as it comes, whatever the step waits
for; one that does not store (a *relay*) needs two (``RELAYED``), and holds the combined piece in
one of them until it is handed on.  Beyond these pieces nothing is allocated, except ``SUM`` where
``needs_sum`` says so and the accumulator is wider.

**No deadlock.**  With that much staging a schedule ends whatever the streams' capacity and the
order of events: nothing that has become possible can become impossible again, so if one order ends,
all do; ``verify`` tries it with streams of a single element.  With unlimited streams each rank
could even run its list strictly from top to bottom.  A relay that takes part in a circle is never
longer than ``AlgorithmSettings.piece``: an executor must not use shorter pieces than that.

**Memory.**  Input and output may be the same memory if ``Task.in_place``; otherwise the input is
only read.  A step that copies a cell onto itself does nothing.  Until the program ends, the
output's content is undefined.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from potluck.errors import InvalidRank, UnsupportedOperation
from potluck.schedule.task import AlgorithmSettings, Collective, Span, Task

# --------------------------------------------------------------------------------------------------
# Hazards: which steps of one rank touch the same cells, so that one must wait for the other.
#
# Steps are shown one after the other, as if they ran in that order.  Cells that were treated alike
# so far form one interval; each remembers the step that wrote it last and those that read it since.

Cells = tuple[int | None, tuple[int, ...]]  # the last writer, and its readers

_UNTOUCHED: Cells = (None, ())


class Hazards:
    """The memory of one rank, as a line of intervals.

    >>> hazards = Hazards()
    >>> hazards.step(0, 0, 8, reads=True, writes=False)
    ((), ())
    >>> hazards.step(1, 4, 6, reads=False, writes=True)
    ((), (0,))
    >>> hazards.step(2, 0, 8, reads=True, writes=False)
    ((1,), ())
    """

    def __init__(self) -> None:
        self._starts: list[float] = [float("-inf")]  # each interval ends where the next begins
        self._cells: list[Cells] = [_UNTOUCHED]

    def step(
        self, index: int, start: int, stop: int, *, reads: bool, writes: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The steps whose values this one reads, and those whose cells it overwrites."""
        if not reads and not writes:
            return (), ()
        first, last = self._boundary(start), self._boundary(stop)
        writers: set[int] = set()
        earlier: set[int] = set()
        for place in range(first, last):
            writer, readers = self._cells[place]
            if writer is not None:
                writers.add(writer)
            earlier.update(readers)
            self._cells[place] = (index, ()) if writes else (writer, (*readers, index))
        return (
            tuple(sorted(writers)) if reads else (),
            tuple(sorted(earlier | writers)) if writes else (),
        )

    def _boundary(self, at: int) -> int:
        """The place of the interval that begins at ``at``; one is cut in two if need be."""
        place = bisect_left(self._starts, at)
        if place == len(self._starts) or self._starts[place] != at:
            self._starts.insert(place, at)
            self._cells.insert(place, self._cells[place - 1])
        return place


# --------------------------------------------------------------------------------------------------

STAGED = 1
"""Pieces that must be held for each source of a step that combines and stores."""

RELAYED = 2
"""Pieces that must be held for each source of a step that combines, or moves, without storing."""


class Operand(IntEnum):
    """Where an operand comes from, or a value goes, on a rank itself."""

    INPUT = 0
    OUTPUT = 1
    SUM = 2


class Form(IntEnum):
    """In which type elements travel."""

    DATA = 0
    PARTIAL = 1


class ScheduleStep(NamedTuple):
    """One stage of a rank's pipeline; see the contract above."""

    start: int
    stop: int
    sources: tuple[int, ...] = ()
    """Ranks from whose streams this span comes."""
    takes: tuple[Form, ...] = ()
    """The form in which each source sends it."""
    own: Operand | None = None
    own_at: int = 0
    into: Operand | None = None
    to: tuple[int, ...] = ()
    """Ranks to whose streams the value goes, the most urgent first."""
    gives: Form = Form.DATA
    final: bool = False
    reads: tuple[int, ...] = ()
    overwrites: tuple[int, ...] = ()

    def at(self, span: Span) -> ScheduleStep:
        """The same with another span."""
        return tuple.__new__(ScheduleStep, (*span, *self[2:]))  # four times as fast as _replace

    def after(self, reads: tuple[int, ...], overwrites: tuple[int, ...]) -> ScheduleStep:
        """The same with its dependencies."""
        return tuple.__new__(ScheduleStep, (*self[:-2], reads, overwrites))

    @property
    def length(self) -> int:
        """Elements of the span."""
        return self.stop - self.start

    @property
    def operands(self) -> int:
        """How many values are combined."""
        return len(self.sources) + (self.own is not None)

    @property
    def only_sends(self) -> bool:
        """Whether own memory is sent as it is."""
        return not self.sources and self.into is None

    @property
    def moves(self) -> bool:
        """Whether it can be received straight into its destination."""
        return len(self.sources) == 1 and self.own is None and self.into is not None


@dataclass(frozen=True)
class Program:
    """What one rank does."""

    rank: int
    input: Span
    output: Span
    steps: tuple[ScheduleStep, ...]
    incoming: dict[int, tuple[int, ...]] = field(init=False, repr=False)
    """For each rank that sends to this one: the steps that its stream feeds, in order."""
    outgoing: dict[int, tuple[int, ...]] = field(init=False, repr=False)
    """For each rank that this one sends to: the steps whose values go there, in order."""

    def __post_init__(self) -> None:
        """Sort the steps by stream."""
        object.__setattr__(self, "incoming", _by_peer(step.sources for step in self.steps))
        object.__setattr__(self, "outgoing", _by_peer(step.to for step in self.steps))

    @property
    def needs_sum(self) -> bool:
        """Whether partial values rest in memory between steps."""
        return any(Operand.SUM in (step.own, step.into) for step in self.steps)


def _by_peer(peers_of_steps: Iterable[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    streams: dict[int, list[int]] = {}
    for index, peers in enumerate(peers_of_steps):
        for peer in peers:
            streams.setdefault(peer, []).append(index)
    return {peer: tuple(steps) for peer, steps in streams.items()}


class Draft:
    """A program being written.  Empty spans are left out; what waits for what is found at the end.

    >>> draft = Draft(rank=1, brings=Span(0, 0), gets=Span(0, 8))
    >>> draft.store(Span(0, 8), source=0, to=(2,))
    >>> draft.finish().steps[0].moves
    True
    """

    def __init__(self, rank: int, brings: Span, gets: Span, *, in_place: bool = True) -> None:
        self._rank = rank
        self._input, self._output = brings, gets
        self._in_place = in_place
        self._steps: list[ScheduleStep] = []

    @classmethod
    def of(cls, task: Task, rank: int) -> Draft:
        """An empty program for a rank of a task."""
        return cls(rank, task.input(rank), task.output(rank), in_place=task.in_place)

    def add(self, step: ScheduleStep) -> None:
        """Append a step as it is, unless its span is empty."""
        if step.start < step.stop:
            self._steps.append(step)

    def send(
        self,
        span: Span,
        to: tuple[int, ...],
        *,
        own: Operand = Operand.INPUT,
        gives: Form = Form.DATA,
    ) -> None:
        """Send own memory, if there is anybody to send it to."""
        if to:
            self.add(ScheduleStep(*span, own=own, to=to, gives=gives))

    def keep(self, span: Span, to: tuple[int, ...] = (), *, final: bool = False) -> None:
        """Copy own input into the output, and send it."""
        self.add(ScheduleStep(*span, own=Operand.INPUT, into=Operand.OUTPUT, to=to, final=final))

    def store(self, span: Span, source: int, to: tuple[int, ...] = ()) -> None:
        """Receive into the output, and forward."""
        self.add(ScheduleStep(*span, (source,), (Form.DATA,), into=Operand.OUTPUT, to=to))

    def finish(self) -> Program:
        """The program, with every dependency between its steps."""
        hazards = Hazards()
        steps: list[ScheduleStep] = []
        for index, step in enumerate(self._steps):
            watched = step.own is not None and (step.own is not Operand.INPUT or self._in_place)
            reads, overwrites = hazards.step(
                index, step.start, step.stop, reads=watched, writes=step.into is not None
            )
            steps.append(step.after(reads, overwrites) if reads or overwrites else step)
        return Program(self._rank, self._input, self._output, tuple(steps))


Maker = Callable[[int], Program]
"""What an algorithm returns: the program of each rank, made when asked for."""


@dataclass(frozen=True)
class Schedule:
    """The programs of all ranks for one task; each is made when first asked for.

    An executor asks for its own only, a verifier for all.
    """

    task: Task
    layout: AlgorithmSettings
    algorithm: str
    maker: Maker = field(repr=False, compare=False)
    _made: dict[int, Program] = field(init=False, repr=False, compare=False, default_factory=dict)

    def program(self, rank: int) -> Program:
        """What ``rank`` does."""
        if not 0 <= rank < self.task.world_size:
            raise InvalidRank(rank, self.task.world_size)
        if rank not in self._made:
            self._made[rank] = self.maker(rank)
        return self._made[rank]

    @property
    def programs(self) -> list[Program]:
        """What every rank does."""
        return [self.program(rank) for rank in range(self.task.world_size)]


# --------------------------------------------------------------------------------------------------
# What an algorithm is: a name, and a builder for each collective that it offers.
#
# One file per algorithm declares one :class:`Algorithm`; ``registry`` lists them.

Builder: TypeAlias = Callable[[Task, AlgorithmSettings], Maker]
"""Does once what all ranks share, and returns what makes the program of each rank."""


@dataclass(frozen=True)
class Algorithm:
    """One way to move arrays."""

    name: str
    idea: str
    """How it works, for a sentence that begins with its name."""
    offers: Mapping[Collective, Builder] = field(repr=False)

    def schedule(self, task: Task, layout: AlgorithmSettings | None = None) -> Schedule:
        """The schedule of a task; without a layout, the plain one."""
        layout = layout or AlgorithmSettings.plain(task.world_size)
        if len(layout.order) != task.world_size:
            msg = f"The layout is for {len(layout.order)} ranks, the task for {task.world_size}"
            raise ValueError(msg)
        builder = self.offers.get(task.collective)
        if builder is None:
            raise UnsupportedOperation(
                f"The algorithm {self.name} offers no {task.collective.value}",
                hint=f"It offers {', '.join(sorted(each.value for each in self.offers))}.",
            )
        return Schedule(task, layout, self.name, builder(task, layout))
