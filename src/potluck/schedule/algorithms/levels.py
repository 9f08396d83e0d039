"""Two levels: the ranks of a machine first, then machines among themselves, then the ranks again.

Of a flat plan every rank's contribution may cross a cable.  Here the ranks of a machine add up
first, and what crosses is one sum per machine; the result comes back once, and is spread within the
machine.  So a cable carries the vector as often as with one rank per machine, however many there
are.

An all-reduce is divided among *owners*.  On each machine every element has one owner: the rank to
which the others bring their numbers, and from which they hear the result.  The owners of an
element, one on each machine, run any flat algorithm among themselves; that one's steps are taken
over as they are, with the sum of the machine (in ``SUM``) in the place of the rank's own input, and
with the ranks that hear from the owner among those to whom a result goes.  A reduction or a
broadcast has one owner per machine, so it is a tree of trees and stores no sums.

On every rank the contributions come first, then the steps among machines, then what it hears from
other owners.  Nothing waits for anything that comes later in a list, whichever rank's it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from potluck.errors import UnsupportedOperation
from potluck.schedule.algorithms.central import CENTRAL
from potluck.schedule.algorithms.direct import DIRECT
from potluck.schedule.algorithms.doubling import DOUBLING
from potluck.schedule.algorithms.ring import RING
from potluck.schedule.algorithms.tree import TREE, TreeShape
from potluck.schedule.schedule import (
    Algorithm,
    Draft,
    Form,
    Maker,
    Operand,
    Program,
    Schedule,
    ScheduleStep,
)
from potluck.schedule.task import AlgorithmSettings, Collective, Levels, Span, Task, cut, split

AMONG = {each.name: each for each in (DIRECT, DOUBLING, RING, TREE, CENTRAL)}
"""What machines can do among themselves."""

WITHIN = ("direct", "central", "tree", "ring")
"""What the ranks of a machine can do: every rank an owner, or one, to which a tree leads; or every
rank one, to which the way leads round."""


class Machine:
    """The ranks of one machine, and which of them owns what."""

    def __init__(
        self, ranks: tuple[int, ...], owned: dict[int, Span], within: str, arity: int
    ) -> None:
        self.ranks = ranks
        self.owned = owned
        """For each rank with a share: where it lies."""
        self._within = within
        self._arity = arity

    @property
    def is_shared(self) -> bool:
        """Whether there is anything to add up."""
        return len(self.ranks) > 1

    def before(self, rank: int) -> tuple[int, ...]:
        """All its ranks, backwards: first the one before ``rank``, last itself."""
        place = self.ranks.index(rank)
        return (*reversed(self.ranks[:place]), *reversed(self.ranks[place:]))

    def rising(self, owner: int) -> TreeShape:
        """How contributions reach an owner."""
        if self._within == "ring":
            return TreeShape((owner, *self.before(owner)[:-1]), 1)
        return self._tree(owner)

    def sinking(self, owner: int) -> TreeShape:
        """How results come from an owner."""
        if self._within == "ring":
            return TreeShape((owner, *reversed(self.before(owner)[:-1])), 1)
        return self._tree(owner)

    def _tree(self, owner: int) -> TreeShape:
        place = self.ranks.index(owner)
        order = self.ranks[place:] + self.ranks[:place]
        return TreeShape(order, self._arity if self._within == "tree" else max(1, len(order) - 1))


class Crossing:
    """The owners of one span, one on each machine, and what they do among themselves."""

    def __init__(
        self, schedule: Schedule, start: int, owners: Sequence[int], shared: set[int]
    ) -> None:
        self._schedule = schedule
        self._start = start
        self._owners = owners
        self._shared = shared  # the owners that bring a sum, not just their own numbers
        self._reduces = schedule.task.collective.reduces

    def steps(self, place: int) -> Iterator[ScheduleStep]:
        """Those of the machine at this place, with the ranks and the coordinates of the group."""
        for step in self._schedule.program(place).steps:
            yield self._placed(step, brings_sum=self._owners[place] in self._shared)

    def _placed(self, step: ScheduleStep, *, brings_sum: bool) -> ScheduleStep:
        sources = tuple(self._owners[source] for source in step.sources)
        takes, gives, own = step.takes, step.gives, step.own
        if self._reduces and (step.operands > 1 or step.final):  # results are not combined
            takes = tuple(
                Form.PARTIAL if source in self._shared else form
                for source, form in zip(sources, takes, strict=True)
            )
        if self._reduces and brings_sum and own is Operand.INPUT:
            own = Operand.SUM
            if not step.final:
                gives = Form.PARTIAL
        return ScheduleStep(
            step.start + self._start,
            step.stop + self._start,
            sources,
            takes,
            own,
            step.own_at,
            step.into,
            tuple(self._owners[target] for target in step.to),
            gives,
            step.final,
        )


class TwoLevels:
    """Everything that the programs of all ranks share."""

    def __init__(self, task: Task, layout: AlgorithmSettings) -> None:
        self.task = task
        self.layout = layout
        self.levels = layout.levels or Levels(tuple(range(task.world_size)))
        if self.levels.within not in WITHIN or self.levels.among not in AMONG:
            raise UnsupportedOperation(
                f"Two levels cannot be {self.levels.within!r} and {self.levels.among!r}",
                hint=f"Within a machine there are {', '.join(WITHIN)}; among them "
                f"{', '.join(AMONG)}.",
            )
        self.machines = self._machines()
        self._machine_of = {
            rank: number for number, each in enumerate(self.machines) for rank in each.ranks
        }
        self._steps: dict[int, list[ScheduleStep]] = {}

    def _machines(self) -> list[Machine]:
        """In the order in which they stand; the root, if there is one, leads its own."""
        found: dict[int, list[int]] = {}
        for rank in self.layout.order:
            found.setdefault(self.levels.machines[rank], []).append(rank)
        return [self._machine(tuple(ranks)) for ranks in found.values()]

    def _machine(self, ranks: tuple[int, ...]) -> Machine:
        whole, within = Span(0, self.task.total), self.levels.within
        if self.task.collective.has_root:
            root = self.task.root
            leader = root if root in ranks else ranks[0]
            owned = {leader: whole}
        elif within in {"central", "tree"}:
            owned = {ranks[0]: whole}
        else:
            shares = [self.layout.shares[rank] for rank in ranks]
            spans = split(whole, shares if any(shares) else [1] * len(ranks))
            owned = {rank: span for rank, span in zip(ranks, spans, strict=True) if span.length}
        return Machine(ranks, owned, within, self.layout.arity)

    def place_of(self, rank: int) -> int:
        """Where the machine of a rank stands."""
        return self._machine_of[rank]

    def machine_of(self, rank: int) -> Machine:
        """Where a rank is."""
        return self.machines[self._machine_of[rank]]

    @property
    def maker(self) -> Maker:
        """What makes the programs."""
        return self._rooted if self.task.collective.has_root else self._program

    @cached_property
    def _crossings(self) -> list[tuple[Crossing, tuple[int, ...]]]:
        """For each span with the same owners: what they do, and who they are."""
        edges = {0, self.task.total}
        for machine in self.machines:
            edges.update(span.start for span in machine.owned.values())
        shared = {rank for each in self.machines if each.is_shared for rank in each.ranks}
        made: dict[int, Schedule] = {}
        crossings = []
        for start, stop in pairwise(sorted(edges)):
            owners = tuple(_owner(machine, start) for machine in self.machines)
            length = stop - start
            if length not in made:
                made[length] = self._among(length)
            crossings.append((Crossing(made[length], start, owners, shared), owners))
        return crossings

    def _among(self, length: int) -> Schedule:
        size, levels = len(self.machines), self.levels
        root = self._machine_of[self.task.root] if self.task.collective.has_root else 0
        task = Task.whole(self.task.collective, size, length, root)
        shares = levels.shares or (1,) * size
        layout = AlgorithmSettings(tuple(range(size)), shares, levels.arity, self.layout.piece)
        return AMONG[levels.among].schedule(task, layout)

    def crossing(self, rank: int) -> list[ScheduleStep]:
        """What a rank does among machines, in order; nothing if it owns nothing."""
        if rank not in self._steps:
            place = self._machine_of[rank]
            self._steps[rank] = [
                step
                for each, owners in self._crossings
                if owners[place] == rank
                for step in each.steps(place)
            ]
        return self._steps[rank]

    def brought(self, owner: int) -> list[Span]:
        """What an owner needs the sum of, in the order in which it needs it."""
        needing = (Operand.SUM, Operand.INPUT)
        first: dict[Span, None] = {}
        for step in self.crossing(owner):
            # What rests in SUM between two exchanges is no longer the machine's own.
            if step.own in needing and not any(_covers(span, step) for span in first):
                first[Span(step.start, step.stop)] = None
        if self.levels.within != "ring" or self.task.collective.has_root:
            return list(first)
        # The ways to all owners close a circle, and there no relay is longer than a piece.
        return [part for span in first for part in _pieces(span, self.layout.piece)]

    def results(self, owner: int) -> list[Span]:
        """What comes of it, in the order in which it comes."""
        return [
            Span(step.start, step.stop)
            for step in self.crossing(owner)
            if step.into is Operand.OUTPUT
        ]

    def _program(self, rank: int) -> Program:
        """What a rank does in an all-reduce or a barrier."""
        draft, machine = Draft.of(self.task, rank), self.machine_of(rank)
        if machine.is_shared:
            self._add_up(draft, rank, machine)
        listeners = machine.sinking(rank).children(rank)
        for step in self.crossing(rank):
            told = listeners if step.into is Operand.OUTPUT else ()
            draft.add(step._replace(to=(*step.to, *told)))
        self._hear(draft, rank, machine)
        return draft.finish()

    def _add_up(self, draft: Draft, rank: int, machine: Machine) -> None:
        owners = [other for other in machine.before(rank) if other in machine.owned]
        spans = {owner: self.brought(owner) for owner in owners}
        ways = {owner: machine.rising(owner) for owner in owners}
        for number in range(max(map(len, spans.values()), default=0)):
            for owner in owners:
                if number >= len(spans[owner]):
                    continue
                span, way = spans[owner][number], ways[owner]
                if owner != rank:
                    way.rise(draft, rank, span)
                else:
                    step = _gathering(way, rank, span)
                    draft.add(step._replace(into=Operand.SUM, gives=Form.PARTIAL))

    def _hear(self, draft: Draft, rank: int, machine: Machine) -> None:
        for owner in machine.before(rank)[:-1]:
            if owner in machine.owned:
                way = machine.sinking(owner)
                source = way.parent(rank)
                assert source is not None
                for span in self.results(owner):
                    draft.store(span, source, to=way.children(rank))

    def _rooted(self, rank: int) -> Program:
        """What a rank does in a reduction to one rank, or a broadcast by one."""
        draft, machine = Draft.of(self.task, rank), self.machine_of(rank)
        (leader,) = machine.owned
        way = machine.rising(leader) if self.task.collective.reduces else machine.sinking(leader)
        below, above = way.children(rank), way.parent(rank)
        if above is None:
            for step in self.crossing(rank):
                draft.add(self._leading(step, way, rank))
        elif self.task.collective.reduces:
            for span in self.brought(leader):
                way.rise(draft, rank, span)
        else:
            for span in self.results(leader):
                draft.store(span, above, to=below)
        return draft.finish()

    def _leading(self, step: ScheduleStep, way: TreeShape, rank: int) -> ScheduleStep:
        """A step among machines that also hears from the ranks of this one, or tells them."""
        below = way.children(rank)
        if not self.task.collective.reduces:
            told = below if step.into is Operand.OUTPUT else ()
            return step._replace(to=(*step.to, *told))
        if step.own is not Operand.SUM:  # alone on its machine
            return step
        gathered = _gathering(way, rank, Span(step.start, step.stop))
        return step._replace(
            sources=(*gathered.sources, *step.sources),
            takes=(*gathered.takes, *step.takes),
            own=Operand.INPUT,
            own_at=step.own_at + len(below) if step.own_at else 0,
        )


def _gathering(way: TreeShape, rank: int, span: Span) -> ScheduleStep:
    """The step in which a rank adds what its children bring to its own."""
    below = way.children(rank)
    takes = tuple(Form.PARTIAL if way.children(child) else Form.DATA for child in below)
    return ScheduleStep(*span, below, takes, own=Operand.INPUT)


def _owner(machine: Machine, start: int) -> int:
    return next(
        (rank for rank, span in machine.owned.items() if span.start <= start < span.stop),
        machine.ranks[0],
    )


def _covers(span: Span, step: ScheduleStep) -> bool:
    return span.start <= step.start and step.stop <= span.stop


def _pieces(span: Span, piece: int) -> list[Span]:
    return [part for part in cut(span, max(1, -(-span.length // piece))) if part.length]


def divided(task: Task, layout: AlgorithmSettings) -> Maker:
    """Sums of machines, a sum of sums, and the result to all; as far as the task needs it."""
    return TwoLevels(task, layout).maker


LEVELS = Algorithm(
    "levels",
    "the ranks of a machine first, then machines among themselves",
    {
        Collective.ALL_REDUCE: divided,
        Collective.REDUCE: divided,
        Collective.BROADCAST: divided,
        Collective.BARRIER: divided,
    },
)
